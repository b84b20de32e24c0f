"""Calls that are promised: what a model is held to, and that it is read again."""

from __future__ import annotations

import json

import pytest
from fake_engine import says
from serving import in_loop
from test_chat_tools import CALL, COLOGNE, WEATHER, Said, ask, calls, chatting, tokenizer_with, user
from test_grammar_process import ask as follow
from test_grammar_process import process
from test_structured import ROOMY, asks, drive, engine_for, said

from jaxinfer.grammar_process import GrammarError
from jaxinfer.replies.calls import Offered
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.replies.promised import only_calls, tagged_calls
from jaxinfer.replies.reader import Replies, ReplyReader
from jaxinfer.request import FinishReason
from jaxinfer.text import Delta, Finish

__all__ = ["process"]  # a fixture

F = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/small"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = {"f": F, 'g"{': {}}
STRICT_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

STRICT_G = '<tool_call>\n{"name": "g", "arguments": {"z": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            only_calls(TOOLS, several=True),
            ['[{"name": "f", "arguments": {"a": 1}}, {"name": "g\\"{", "arguments": {"z": []}}]'],
            ["", " ", '[{"name": "h"', '[{"name": "f", "arguments": {"a": 10', "[]"],
        ),
        (
            only_calls({"f": F}, several=False),
            ['[{"name": "f", "arguments": {"a": 1}}]'],
            ['[{"name": "f", "arguments": {"a": 1}},', '[{"name": "g'],
        ),
        (  # arguments have names, also where a schema does not say so
            only_calls({"f": {"enum": [3, {"a": 1}]}, "g": {"anyOf": [{}, {}]}}, several=False),
            ['[{"name": "f", "arguments": {"a":1}}]', '[{"name": "g", "arguments": {"z": 1}}]'],
            ['[{"name": "f", "arguments": 3}]', '[{"name": "g", "arguments": "x"}]'],
        ),
        (
            tagged_calls({"f": F, "g": None}),
            [
                "",
                "text <tool",
                f"I look.\n{STRICT_F}{STRICT_F}\nDone",
                STRICT_G,
            ],
            ["<tool_call>f", f"x {STRICT_F[:-20]}, ", STRICT_F.replace("1", "10")],
        ),
    ],
    ids=["several", "one", "named", "tagged"],
)
def test_what_a_reply_is_held_to(process, form, good, bad):
    for text in good:
        _, end = follow(process, form, text.encode())
        assert end, text
    for text in bad:
        try:
            _, end = follow(process, form, text.encode())
        except GrammarError:
            continue
        assert not end, text


def test_a_model_that_knows_of_no_tools_calls_them():
    """A random one, held to their form: what it says is read as calls with good arguments."""
    compact = F | {"x-guidance": {"whitespace_flexible": False}}
    form = only_calls({"f": compact}, several=False)
    outputs = drive(engine_for(ROOMY), asks({"x": ([1, 2, 3], {"structured": form})}))
    text = said(outputs["x"])
    reader = ReplyReader(Replies(ReplyFormat(), Offered({"f": F}), promised=True), "")
    delta = Delta(text=text, finish=Finish(FinishReason.EOS))
    reader.read(delta)
    (call,) = delta.calls
    assert call.name == "f" and 0 <= json.loads(call.arguments)["a"] <= 9 and not delta.text


@in_loop
async def test_a_call_that_must_be_made():
    script = Said('[{"name": "weather", "arguments": {"city": "Köln"}}]')
    async with chatting(script) as (client, _):
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            found, _ = await ask(client, tools=[WEATHER], tool_choice=choice)
            assert calls(found) == [COLOGNE] and found.message.content is None
    kinds = {request.params.structured.kind for request in script.requests}
    assert kinds == {"grammar"}
    async with chatting(script, tokenizer_with("{{ tools }}{{ messages }}")) as (client, _):
        found, _ = await ask(client, tools=[WEATHER], tool_choice="required")
        assert calls(found) == [COLOGNE], "though how this model calls is not known"


@in_loop
async def test_strict_tools():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    script = Said(CALL)
    async with chatting(script) as (client, plain):
        found, _ = await ask(client, tools=[strict])
        assert calls(found) == [COLOGNE]
        assert "begun" in script.requests[-1].params.structured.source
        asked = {"messages": user("x"), "tools": [strict]}
        for more, param in (
            ({"response_format": {"type": "json_object"}}, "tools"),
            ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "tools"),
        ):
            answer = await plain.post("/v1/chat/completions", json=asked | more)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        wrong = {"type": "object", "properties": {"a": {"type": "nothing"}}}
        wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": wrong}}
        answer = await plain.post("/v1/chat/completions", json=asked | {"tools": [wrong]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    async with chatting(says("x"), tokenizer_with("{{ tools }}[TOOL_CALLS]")) as (_, plain):
        answer = await plain.post("/v1/chat/completions", json=asked)
        assert answer.json()["error"]["param"] == "tools[0].function.strict"
