"""Which form of replies a model has: chosen by name, or found in its chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.replies import families, harmony, python_calls, thinking, xml_calls
from jaxinfer.replies.calls import Offered
from jaxinfer.replies.events import Reading
from jaxinfer.replies.scan import Text
from jaxinfer.replies.thinking import Thinking

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
HARMONY = "openai"
TOLD = "hermes"  # the form for models whose template takes no tools, see `tool_prompt`


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    """As Mistral's templates want them: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolParser:
    """How calls are read, which marks are written around them, and how their ids look."""

    read: Callable[[Text, Offered], Reading[None]]
    marks: tuple[str, ...] = ()
    new_id: Callable[[], str] = _call_id


TOOL_PARSERS: dict[str, ToolParser] = {
    TOLD: ToolParser(families.hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolParser(families.llama3, ("<|python_tag|>",)),
    "pythonic": ToolParser(python_calls.pythonic, ("<|python_tag|>",)),
    "mistral": ToolParser(families.mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _short_id),
    "deepseek_v3": ToolParser(families.deepseek, families.DEEPSEEK),
    "kimi_k2": ToolParser(families.kimi, families.KIMI),
    "granite": ToolParser(families.granite, ("<|tool_call|>", "<|/tool_call|>")),
    "phi4_mini_json": ToolParser(families.phi4, ("<|tool_call|>", "<|/tool_call|>")),
    "cohere": ToolParser(families.cohere, families.COHERE),
    "olmo3": ToolParser(python_calls.olmo3, ("<function_calls>", "</function_calls>")),
    "qwen3_coder": ToolParser(xml_calls.qwen3_coder, ("<tool_call>", "</tool_call>")),
    "seed_oss": ToolParser(xml_calls.seed_oss, ("<seed:tool_call>", "</seed:tool_call>")),
    HARMONY: ToolParser(harmony.harmony, harmony.MARKS),
}
REASONING_PARSERS: dict[str, Thinking] = {
    "deepseek_r1": thinking.THINK,
    "qwen3": thinking.THINK,
    "granite": thinking.GRANITE,
    "mistral": thinking.MAGISTRAL,
    "cohere": thinking.COHERE,
    "seed_oss": thinking.SEED,
    HARMONY: Thinking(()),  # its messages say themselves what they are
}

# What templates have that know of each, the most telling first.
_TOOLS_IN_TEMPLATES = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("seed_oss", ("seed:tool_call",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("functools",)),
    ("olmo3", ("<function_calls>",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("pythonic", ("func_name1",)),
)
_REASONING_IN_TEMPLATES = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("seed_oss", ("seed:think",)),
    ("mistral", ("[THINK]",)),
    ("cohere", ("<|START_THINKING|>",)),
    ("granite", ("<think></think>", "<response></response>")),
    ("granite", ("Here is my thought process:",)),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model's replies are read.

    Attributes:
        tool_parser, reasoning_parser: of `TOOL_PARSERS` and `REASONING_PARSERS`; "" for none.
        tool_marks, reasoning_marks: special tokens that are marks of them: they stay in the text
            that is read for these, whatever else is left out of it.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    tool_marks: frozenset[int] = frozenset()
    reasoning_marks: frozenset[int] = frozenset()

    def describe(self) -> str:
        """For a log."""
        tools, reasoning = self.tool_parser or NONE, self.reasoning_parser or NONE
        return f"tool_call_parser {tools}, reasoning_parser {reasoning}"

    @property
    def harmony(self) -> bool:
        """Whether all replies are messages on channels."""
        return HARMONY in (self.tool_parser, self.reasoning_parser)


def reply_format(
    tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ReplyFormat:
    """The form of a model's replies. A parser is a name, "none", or "auto": what the chat template
    knows of; one that takes no tools is told of them in Hermes' form.

    Raises ValueError for an unknown name, and a form that the model would not be told of.
    """
    check_parser("tool_call_parser", tool_call_parser, TOOL_PARSERS)
    check_parser("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    source = tokenizer.chat_template_source
    if tool_call_parser == AUTO:
        tool_call_parser = _found(source, _TOOLS_IN_TEMPLATES) if tokenizer.takes_tools else TOLD
    elif tool_call_parser not in (TOLD, NONE) and not tokenizer.takes_tools:
        raise ValueError(
            f"tool_call_parser = {tool_call_parser!r}, and the model's chat template takes no"
            f" tools; give one that does with --chat-template, or take {TOLD!r}: in that form the"
            " model is told of them"
        )
    if reasoning_parser == AUTO:
        reasoning_parser = _found(source, _REASONING_IN_TEMPLATES)
    tools = "" if tool_call_parser == NONE else tool_call_parser
    reasoning = "" if reasoning_parser == NONE else reasoning_parser
    tool_marks = TOOL_PARSERS[tools].marks if tools else ()
    marks = REASONING_PARSERS[reasoning].marks if reasoning else ()
    if HARMONY in (tools, reasoning):
        tool_marks = marks = harmony.MARKS
    return ReplyFormat(tools, reasoning, _ids(tokenizer, tool_marks), _ids(tokenizer, marks))


def _ids(tokenizer: Tokenizer, marks: tuple[str, ...]) -> frozenset[int]:
    ids = (tokenizer.raw.token_to_id(mark) for mark in marks)
    return frozenset(i for i in ids if i is not None)


def check_parser(field: str, name: str, known: Mapping[str, object]) -> None:
    """Raises ValueError with what there is."""
    if name not in (AUTO, NONE, *known):
        names = ", ".join((AUTO, NONE, *known))
        raise ValueError(f"{field} = {name!r} is not known; there are {names}")


def _found(source: str, telling: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    for name, words in telling:
        if all(word in source for word in words):
            return name
    return ""
