"""How families of models write calls of tools: as JSON after marks of their own, most of them."""

from __future__ import annotations

import re

from jaxinfer.replies.calls import (
    Offered,
    Outcome,
    bare_arguments,
    json_calls,
    known_json_calls,
    tagged,
    unmarked,
)
from jaxinfer.replies.events import Arguments, Content, Reading, Says
from jaxinfer.replies.scan import Marks, Text, match, name, peek, skip_space, until

_FUNCTION = re.compile(r"[\w.:/-]+")


def hermes(text: Text, offered: Offered) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": …}</tool_call>; SmolLM2 has a list of them within."""
    yield from tagged(text, offered, ["<tool_call>"], ["</tool_call>"], json_calls)


def granite(text: Text, offered: Offered) -> Reading[None]:
    """<|tool_call|>[{"name": …, "arguments": …}, …]"""
    yield from tagged(text, offered, ["<|tool_call|>"], ["<|/tool_call|>"], json_calls)


def phi4(text: Text, offered: Offered) -> Reading[None]:
    """functools[{"name": …, "arguments": …}, …], or as Granite."""
    starts = ["functools", "<|tool_call|>"]
    yield from tagged(text, offered, starts, ["<|/tool_call|>"], json_calls)


def cohere(text: Text, offered: Offered) -> Reading[None]:
    """<|START_ACTION|>[{"tool_name": …, "parameters": …}, …]<|END_ACTION|>, or a reply between
    <|START_RESPONSE|> and <|END_RESPONSE|>, or <|START_TEXT|> and <|END_TEXT|>."""
    if opened := (yield from match(text, *_COHERE_REPLY)):
        yield from until(text, Marks([_COHERE_REPLY[opened]]), Content)
    yield from tagged(text, offered, ["<|START_ACTION|>"], ["<|END_ACTION|>"], json_calls)


_COHERE_REPLY = {
    "<|START_RESPONSE|>": "<|END_RESPONSE|>",
    "<|START_TEXT|>": "<|END_TEXT|>",
}
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", *_COHERE_REPLY.keys(), *_COHERE_REPLY.values())


def llama3(text: Text, offered: Offered) -> Reading[None]:
    """The reply is {"name": …, "parameters": …}, or several of them, maybe with ; between."""
    yield from unmarked(text, offered, "<|python_tag|>", known_json_calls)


def mistral(text: Text, offered: Offered) -> Reading[None]:
    """[TOOL_CALLS][{"name": …, "arguments": …}, …], or since 2025 [TOOL_CALLS]name[ARGS]{…}"""
    yield from tagged(text, offered, ["[TOOL_CALLS]"], [], _mistral)


def _mistral(text: Text, offered: Offered) -> Reading[Outcome]:
    if (yield from peek(text)) in ("[", "{"):
        return (yield from json_calls(text, offered))
    called = yield from name(text, _FUNCTION)
    if (yield from match(text, "[CALL_ID]")):
        yield from name(text, _FUNCTION)
    yield from match(text, "[ARGS]")
    yield from skip_space(text)
    return (yield from bare_arguments(text, called))


def deepseek(text: Text, offered: Offered) -> Reading[None]:
    """Sections of calls: of V3 and R1 function<sep>name and fenced JSON, of V3.1 name<sep>JSON."""
    yield from _sections(text, offered, DEEPSEEK)


def kimi(text: Text, offered: Offered) -> Reading[None]:
    """Sections of calls functions.name:0<|tool_call_argument_begin|>{…}"""
    yield from _sections(text, offered, KIMI)


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _sections(text: Text, offered: Offered, words: tuple[str, ...]) -> Reading[None]:
    section, call, separator, call_end, section_end = words
    marks = Marks([section, call, call_end, section_end])
    within = False  # a call, or a section that had one
    says: Says = Content
    while mark := (yield from until(text, marks, says)):
        says = Content
        text.keep(len(mark))
        if mark == section:
            yield from skip_space(text)
            mark = yield from match(text, call)
        if mark == call:
            outcome = yield from _section_call(text, separator)
            within = within or outcome is not Outcome.NONE
            if outcome is Outcome.BROKEN:
                says = Arguments
            if outcome is Outcome.NONE:
                yield Content(text.release())
        elif not within or not mark:
            yield Content(text.release())
        else:
            text.release()


def _section_call(text: Text, separator: str) -> Reading[Outcome]:
    yield from skip_space(text)
    called = yield from name(text, _FUNCTION)
    if not (yield from match(text, separator)):
        return Outcome.NONE
    yield from skip_space(text)
    fenced = called == "function" and (yield from peek(text)) != "{"
    if fenced:
        called = yield from name(text, _FUNCTION)
        yield from skip_space(text)
        yield from match(text, "```json", "```")
        yield from skip_space(text)
    found = _NUMBERED.fullmatch(called)
    outcome = yield from bare_arguments(text, found[1] if found else "")
    if fenced and outcome is Outcome.DONE:
        yield from skip_space(text)
        yield from match(text, "```")
    return outcome
