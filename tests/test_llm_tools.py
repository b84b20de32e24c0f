"""Tools in the offline API, which are what they are over HTTP and gRPC."""

from __future__ import annotations

import pytest
from fake_engine import EOS, ScriptedEngine
from test_chat_tools import CALL, COLOGNE, LIMITS, TEMPLATE, WEATHER, Said, tokenizer_with, user

from jaxinfer import LLM, SamplingParams, StructuredOutput
from jaxinfer.request import RequestError

MADE = '[{"name": "weather", "arguments": {"city": "Köln"}}]'
NAMED = {"type": "function", "function": {"name": "weather"}}
GREEDY = SamplingParams(temperature=0)


def llm(said: Said) -> LLM:
    return LLM.over(ScriptedEngine(said, LIMITS), tokenizer_with(TEMPLATE), (EOS,))


def calls(completion):
    return [(call.name, call.arguments) for call in completion.tool_calls]


def test_a_call_its_result_and_the_answer():
    said = Said(f"<think>hm</think>I look.\n{CALL}", "20 degrees.")
    model, messages = llm(said), user("Weather?")
    (first,) = model.chat(messages, GREEDY, tools=[WEATHER])
    assert (first.text, first.reasoning, calls(first)) == ("I look.", "hm", [COLOGNE])
    (call,) = first.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "20"},
    ]
    (last,) = model.chat(messages, tools=[WEATHER])
    assert last.text == "20 degrees." and not last.tool_calls
    assert said.prompts[-1].endswith(f"[user]Weather?\n[assistant]{CALL}\n[tool]20\n[assistant]")


@pytest.mark.parametrize("params", [None, GREEDY, {"temperature": 0.5}])
@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED])
def test_which_tools_are_called(choice, params):
    said = Said(MADE)
    asked = [user("x"), user("y")]
    found = llm(said).chat(asked, params, tools=[WEATHER], tool_choice=choice)
    must = choice in ("required", NAMED)
    for completion in found:
        assert calls(completion) == ([COLOGNE] if must else [])
        assert completion.text == ("" if must else MADE)
    forms = [request.params.structured for request in said.requests]
    assert [form is not None for form in forms] == [must, must]
    assert ["weather" in prompt for prompt in said.prompts] == [choice != "none"] * 2


def test_samples_are_taken_apart_each():
    (found,) = llm(Said(CALL)).chat(user("x"), {"n": 2}, tools=[WEATHER])
    assert [calls(sample) for sample in found.samples] == [[COLOGNE]] * 2


FORM = StructuredOutput.regex("a")


@pytest.mark.parametrize(
    ("messages", "how", "field"),
    [
        (user("x"), {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (user("x"), {"tool_choice": "sometimes"}, "tool_choice"),
        (user("x"), {"tools": [WEATHER], "tool_choice": {"name": "weather"}}, "tool_choice"),
        (
            user("x"),
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "f"}}},
            "tool_choice",
        ),
        (user("x"), {"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (user("x"), {"tools": ["weather"]}, "tools[0]"),
        (user("x"), {"tools": [WEATHER["function"]]}, "tools[0]"),
        (
            user("x"),
            {"tools": [{"function": {"name": "f", "title": "F"}}]},
            "tools[0].function.title",
        ),
        (user("x"), {"tools": [{"function": {"name": 1}}]}, "tools[0].function.name"),
        (user("x"), {"tools": [{"function": {}}]}, "tools[0].function.name"),
        ("x", {"tools": [WEATHER]}, "prompt"),
        ([[{"content": "x"}]], {"tools": [WEATHER]}, "prompt[0]"),
        ([{"role": "user", "content": 1}], {"tools": [WEATHER]}, "prompt[0].content"),
        ([{"role": "user"}], {"tools": [WEATHER]}, "prompt[0].content"),
        ([{"role": "user", "content": "x", "mood": 1}], {"tools": [WEATHER]}, "prompt[0].mood"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}],
            {"tools": [WEATHER]},
            "prompt[0].tool_calls[0]",
        ),
        (
            user("x"),
            {"tools": [WEATHER], "tool_choice": "required", "params": {"structured": FORM}},
            "tools",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(messages, how, field):
    with pytest.raises(RequestError) as caught:
        llm(Said("x")).chat(messages, **how)
    assert [violation.field for violation in caught.value.violations] == [field]
