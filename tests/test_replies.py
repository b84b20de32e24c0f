"""Replies of chat models taken apart: reasoning, calls of tools and content, as they come."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer.replies.calls import Offered
from jaxinfer.replies.formats import REASONING_PARSERS, TOOL_PARSERS, ReplyFormat
from jaxinfer.replies.reader import Replies, ReplyReader
from jaxinfer.request import FinishReason
from jaxinfer.text import Delta, Finish

SCHEMA = {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
OFFERED = Offered({"f": SCHEMA, "g.h": {}})


@dataclass(frozen=True)
class Reply:
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def read(form: str, pieces: list[str], tail: str = "", **replies) -> Reply:
    """What a reply that comes in these pieces is, by "tool parser/reasoning parser"."""
    tools, _, reasoning = form.partition("/")
    settings = {"offered": OFFERED} | replies
    reader = ReplyReader(Replies(ReplyFormat(tools, reasoning), **settings), tail)
    whole = Delta()
    for piece in pieces:
        delta = Delta(text=piece)
        reader.read(delta)
        whole.extend(delta)
    end = Delta(finish=Finish(FinishReason.EOS))
    reader.read(end)
    whole.extend(end)
    assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
    assert all(call.id for call in whole.calls)
    return Reply(whole.text, whole.reasoning, tuple((c.name, c.arguments) for c in whole.calls))


F, G = ("f", '{"a": 1}'), ("g.h", "{}")
CASES = [
    # What families write, by their published templates.
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        Reply(calls=(F,)),
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g.h", "arguments": {}}</tool_call>\n',
        Reply("Let me see.", calls=(F, G)),
    ),
    (
        "hermes",  # SmolLM2's
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g.h"}]</tool_call>',
        Reply(calls=(F, G)),
    ),
    (
        "hermes/qwen3",
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        Reply(reasoning="hm", calls=(F,)),
    ),
    ("/qwen3", "<think>\n\n</think>\n\nHi.\n", Reply("Hi.\n")),
    ("/qwen3", "\n<think>a <tool_call> b", Reply(reasoning="a <tool_call> b")),
    ("/qwen3", "\n I write <think>.", Reply("\n I write <think>.")),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', Reply(calls=(F,))),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}};\n'
        '{"name": "g.h", "parameters": {}}',
        Reply(calls=(F, G)),
    ),
    ("llama3_json", 'See:<|python_tag|>{"name": "g.h"}', Reply("See:", calls=(G,))),
    ("pythonic", "[f(a=1), g.h()]", Reply(calls=(F, G))),
    (
        "pythonic",
        """[f(s="x, ')]", t={'k': [None, True, -1.5]})]""",
        Reply(calls=(("f", """{"s": "x, ')]", "t": {"k": [null, true, -1.5]}}"""),)),
    ),
    ("olmo3", "<function_calls>\nf(a=1)\ng.h()\n</function_calls>", Reply(calls=(F, G))),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g.h", "arguments": {}}]',
        Reply(calls=(F, G)),
    ),
    (
        "mistral/mistral",
        '[THINK]hm[/THINK]So:[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h[CALL_ID]abc123XYZ[ARGS]{}',
        Reply("So:", "hm", (F, G)),
    ),
    (
        "deepseek_v3/deepseek_r1",
        "<think>hm</think>So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g.h\n```'
        "json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Reply("So:", "hm", (F, G)),
    ),
    (
        "deepseek_v3",  # V3.1's
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g.h<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Reply(calls=(F, G)),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g.h:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        Reply(calls=(F, G)),
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', Reply(calls=(F,))),
    ("/granite", "Here is my thought process: hm. Here is my response: yes", Reply("yes", "hm.")),
    ("/granite", "<think>hm</think><response>yes</response>", Reply("yes", "hm")),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}]', Reply(calls=(F,))),
    ("phi4_mini_json", "functools is a module", Reply("functools is a module")),
    (
        "cohere/cohere",
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n{"tool_call_id": "0", "tool_name":'
        ' "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        Reply(reasoning="hm", calls=(F,)),
    ),
    (
        "cohere/cohere",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
        Reply("yes", "hm"),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n1\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        Reply(calls=(("f", '{"a": 1, "s": "1\\n2"}'),)),
    ),
    (
        "seed_oss/seed_oss",
        "<seed:think>hm</seed:think><seed:tool_call>\n<function=g.h>\n</function>\n</seed:tool_call>",
        Reply(reasoning="hm", calls=(G,)),
    ),
    (
        "openai/openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        Reply(reasoning="hm", calls=(F,)),
    ),
    (
        "openai/openai",
        "<|channel|>analysis<|message|>h<|end|><|start|>assistant<|channel|>analysis<|message|>m"
        "<|end|><|start|>assistant<|channel|>final<|message|>yes",
        Reply("yes", "h\nm"),
    ),
    ("openai/openai", ' to=functions.f<|channel|>commentary<|message|>{"a": 1}', Reply(calls=(F,))),
    # What small models write besides.
    (
        "hermes",
        '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}}</tool_call> Done',
        Reply("} Done", calls=(F,)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>\n"}}',
        Reply(calls=(("f", '{"s": "</tool_call>\\n"}'),)),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', Reply(calls=(F,))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', Reply(calls=(("f", '{"a'),))),
    (
        "hermes",  # its name was told before it broke: the rest of it cannot be content any more
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> Done',
        Reply("Done", calls=(("f", '{"a": 1,}}'),)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "w": 2}</tool_call>',
        Reply(', "w": 2}', calls=(F,)),
    ),
]


@pytest.mark.parametrize(("form", "text", "reply"), CASES)
def test_replies_are_read(form, text, reply):
    assert read(form, [text]) == reply
    assert read(form, list(text)) == reply, "character by character"


MALFORMED = [
    ("hermes", "<tool_call>f(a=1)</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call> </tool_call>'),
    ("hermes", '<tool_call>{"arguments": ' + "[" * 500 + "</tool_call>"),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": \\"\\ud800\\"}", "name": "f"}</tool_call>'),
    ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}'),
    ("llama3_json", '{"city": "Rome"}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[1, 2, f(a=1)]"),
    ("pythonic", "[unknown(a=1)]"),
    ("mistral", "[TOOL_CALLS] and f {"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>"),
    ("qwen3_coder", "<tool_call>\n<func"),
    ("openai/openai", "no channel at all"),
    ("openai/openai", "x" * 2000),
]


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_what_is_no_call_is_content(form, text):
    assert read(form, [text]) == read(form, list(text)) == Reply(text)


def test_what_nobody_offered_is_no_call():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes", [text], offered=None) == Reply(text)
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    assert read("openai", [call], offered=None) == Reply(call)


def test_one_call_where_they_may_not_be_several():
    text = '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g.h"}]</tool_call>x'
    assert read("hermes", [text], parallel=False) == Reply("x", calls=(F,))


def test_reasoning_that_the_prompt_began():
    assert read("/deepseek_r1", ["hm\n</think>\n\nyes"], "…<think>\n") == Reply("yes", "hm")
    assert read("/deepseek_r1", ["hm, and no end"], "<think>") == Reply(reasoning="hm, and no end")
    assert read("/qwen3", ["yes"], "<think>\n\n</think>\n\n") == Reply("yes")


def test_arguments_come_piece_by_piece():
    """Each as soon as it is certain, and the name before them."""
    for form, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "one two'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "one two'),
        ("llama3_json", '{"name": "f", "parameters": {"s": "one two'),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"s": "one two'),
    ):
        reader = ReplyReader(Replies(ReplyFormat(form), OFFERED), "")
        deltas = []
        for char in text:
            deltas.append(Delta(text=char))
            reader.read(deltas[-1])
        said = [call for delta in deltas for call in delta.calls]
        assert said[0].name == "f" and {call.name for call in said[1:]} == {""}
        assert [call.arguments for call in said[1:]][-7:] == list("one two")


def test_the_guide_has_all_parsers():
    guide = (Path(__file__).parent.parent / "docs/http.md").read_text()
    for table, names in (("tool-call", TOOL_PARSERS), ("reasoning", REASONING_PARSERS)):
        rows = guide.partition(f"| `--{table}-parser` |")[2].partition("\n\n")[0]
        first = " ".join(row.split("|")[1] for row in rows.splitlines()[1:] if row)
        assert set(re.findall(r"`(\w+)`", first)) == set(names)


# -- any reply -----------------------------------------------------------------------------------

FORMS = [f"{tools}/" for tools in TOOL_PARSERS] + [
    f"/{reasoning}" for reasoning in REASONING_PARSERS
]
FORMS += ["hermes/qwen3", "deepseek_v3/deepseek_r1", "cohere/cohere", "granite/granite"]
PARTS = sorted(
    {mark for parser in TOOL_PARSERS.values() for mark in parser.marks}
    | {mark for family in REASONING_PARSERS.values() for mark in family.marks}
    | {text for _, text, _ in CASES}
    | {*'{}[]()"\\,:;=<>| \n', '{"name": "f", ', '"arguments": ', '"parameters": {', "functools["}
    | {"<function=f>", "<parameter=s>", "</parameter>", "\\u12", "1e5", "null", "f(s='", "g.h()"}
)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.sampled_from(FORMS),
    st.lists(st.one_of(st.sampled_from(PARTS), st.integers(0, 9))),
    st.lists(st.integers(0, 10_000), max_size=30),
)
@example("hermes/", ["<tool_call>", '{"name": "f", ', '"arguments": ', "{", 3, "}", 4], [])
def test_any_text_is_read_the_same_however_it_is_cut_and_nothing_is_lost(form, parts, at):
    """Words that are put between the parts are all there afterwards, in some place."""
    words = [f"⟦{i}.{part}⟧" for i, part in enumerate(parts) if isinstance(part, int)]
    text = "".join(f"⟦{i}.{p}⟧" if isinstance(p, int) else p for i, p in enumerate(parts))
    reply = read(form, [text])
    assert read(form, cut(text, at)) == reply == read(form, list(text))
    said = reply.text + reply.reasoning + "".join(map("".join, reply.calls))
    said = said.replace("\\u27e6", "⟦").replace("\\u27e7", "⟧")
    assert [word for word in words if word not in said] == []


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g.h"]), st.dictionaries(st.text(), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WRITTEN = {
    "hermes": lambda calls: "\n".join(tagged(*call) for call in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{said}" for name, said in calls),
    "llama3_json": lambda calls: "; ".join(
        f'{{"name": "{name}", "parameters": {said}}}' for name, said in calls
    ),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{said}\n```<｜tool▁call▁end｜>"
            for name, said in calls
        )
        + "<｜tool▁calls▁end｜>"
    ),
}


@given(st.sampled_from(sorted(WRITTEN)), CALLS, st.booleans(), st.lists(st.integers(0, 10_000)))
def test_any_calls_come_back_as_they_were_written(form, calls, ascii_only, at):
    written = [(name, json.dumps(said, ensure_ascii=ascii_only)) for name, said in calls]
    reply = read(form, cut(WRITTEN[form](written), at))
    assert reply.calls == tuple(written) and not reply.text
