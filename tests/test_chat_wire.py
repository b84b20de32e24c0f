"""Tools and reasoning over gRPC: typed messages both ways."""

from __future__ import annotations

import json

import grpc
from fake_engine import ScriptedEngine
from jaxinfer_service.chat_prompt import chat
from jaxinfer_service.client import violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import in_loop, refused, serving_model
from test_chat_tools import CALL, LIMITS, TEMPLATE, WEATHER, Said, opened, tokenizer_with, user

CALLED = {"id": "c1", "type": "function"} | {
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'}
}


def server(script):
    return serving_model(lambda: opened(ScriptedEngine(script, LIMITS), tokenizer_with(TEMPLATE)))


@in_loop
async def test_a_reply_is_taken_apart_whole_and_streamed():
    said = Said(f"<think>hm</think>I look.\n{CALL}")
    async with server(said) as (_, client):
        asked = chat(user("Weather?"), [WEATHER])
        whole = await client.generate(asked)
        assert (whole.text, whole.reasoning) == ("I look.", "hm")
        (call,) = whole.tool_calls
        assert call.id.startswith("call_") and call.name == "weather"
        assert call.arguments == '{"city": "Köln"}'
        assert whole.usage.reasoning_tokens == len("<think>hm</think>")
        chunks = [chunk async for chunk in client.stream(asked)]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
        deltas = [call for chunk in chunks for call in chunk.tool_calls]
        assert deltas[0].name == "weather" and {call.index for call in deltas} == {0}
        assert "".join(call.arguments for call in deltas) == call.arguments
        assert chunks[-1].usage == whole.usage
        more = (await client.generate(asked, n=2)).more
        assert more[0].tool_calls[0].name == "weather" and more[0].reasoning == "hm"
        raw = await client.generate(chat(user("x"), [WEATHER], parse_reply=False))
        assert raw.text == said.replies[0] and not raw.tool_calls
        plain = await client.generate(user("x"))
        assert plain.text == said.replies[0] and not plain.usage.HasField("reasoning_tokens")
        parsed = await client.generate(chat(user("x"), parse_reply=True))
        assert parsed.reasoning == "hm" and parsed.text == f"I look.\n{CALL}"


@in_loop
async def test_what_belongs_to_a_chat_is_rendered():
    said = Said("x")
    async with server(said) as (_, client):
        messages = [
            *user("Weather?"),
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "20"},
        ]
        asked = chat(messages, [WEATHER], {"enable_thinking": False})
        await client.generate(asked)
        counted = await client.tokenize(asked)
    (prompt,) = said.prompts
    assert prompt == (
        f"{json.dumps(WEATHER, ensure_ascii=False)}\n[user]Weather?\n[assistant]<think>hm</think>"
        f"{CALL}\n[tool]20\n[assistant]<think></think>"
    )
    assert len(counted) == len(prompt.encode())


@in_loop
async def test_what_cannot_be_honoured_is_refused_by_name():
    async with server(Said("x")) as (_, client):
        message = pb.ChatMessage(role="user", content="x")
        for asked, field, said in (
            (pb.Chat(), "chat", "no messages"),
            (
                pb.Chat(messages=[message], tools=[pb.Tool()]),
                "chat.tools[0].name",
                "is empty",
            ),
            (
                pb.Chat(messages=[message], tools=[pb.Tool(name="f"), pb.Tool(name="f")]),
                "chat.tools[1].name",
                "another",
            ),
            (
                pb.Chat(messages=[message], tools=[pb.Tool(name="f", parameters="[")]),
                "chat.tools[0].parameters",
                "no JSON",
            ),
            (
                pb.Chat(messages=[message], tools=[pb.Tool(name="f", parameters="1")]),
                "chat.tools[0].parameters",
                "object",
            ),
            (
                pb.Chat(messages=[pb.ChatMessage(role="user", reasoning="hm")]),
                "chat.messages[0].reasoning",
                "assistant",
            ),
            (chat(user("x"), (), {"other": 1}), "chat.template_options", "does not read"),
        ):
            error = await refused(client.generate(asked))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            ((found, why),) = violations(error).items()
            assert found == field and said in why, (found, why)


MADE = '[{"name": "weather", "arguments": {"city": "Köln"}}]'
NAMED = {"function": {"name": "weather"}}


@in_loop
async def test_which_tools_are_called():
    """As over HTTP: the model is told of none, or its reply is held to be calls."""
    said = Said(MADE)
    async with server(said) as (_, client):
        for choice in ("auto", "none", "required", NAMED):
            answer = await client.generate(chat(user("x"), [WEATHER], tool_choice=choice))
            must = choice in ("required", NAMED)
            assert answer.text == ("" if must else MADE)
            assert [(c.name, c.arguments) for c in answer.tool_calls] == (
                [("weather", '{"city": "Köln"}')] if must else []
            )
            assert ("weather" in said.prompts[-1]) == (choice != "none")
            form = said.requests[-1].params.structured
            assert (form is not None and form.kind == "grammar") == must
        told = await client.tokenize(chat(user("x"), [WEATHER]))
        assert len(told) > len(
            await client.tokenize(chat(user("x"), [WEATHER], tool_choice="none"))
        )
        streamed = client.stream(chat(user("x"), [WEATHER], tool_choice="required"))
        calls = [call async for chunk in streamed for call in chunk.tool_calls]
        assert "".join(call.arguments for call in calls) == '{"city": "Köln"}'
        first = said.requests[-1].params.structured.source
        one = chat(user("x"), [WEATHER], tool_choice="required", parallel_tool_calls=False)
        await client.generate(one)
        assert "call)*" in first and "call)*" not in said.requests[-1].params.structured.source


@in_loop
async def test_strict_tools_hold_calls_to_their_schemas():
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    said = Said(CALL)
    async with server(said) as (_, client):
        await client.generate(chat(user("x"), [strict]))
        assert "begun" in said.requests[-1].params.structured.source
        await client.generate(chat(user("x"), [strict], tool_choice="none"))
        assert said.requests[-1].params.structured is None
        wrong = {"type": "object", "properties": {"a": {"type": "nothing"}}}
        function = {"name": "f", "strict": True, "parameters": wrong}
        error = await refused(client.generate(chat(user("x"), [{"function": function}])))
        assert [*violations(error)] == ["chat.tools"]


@in_loop
async def test_choices_of_tools_that_cannot_be_honoured_are_refused_by_name():
    message, tool = pb.ChatMessage(role="user", content="x"), pb.Tool(name="f")
    form = {"regex": "a"}
    async with server(Said("x")) as (_, client):
        for more, field, said, asked in (
            ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, "chat.tool_choice", "no tools", {}),
            ({"tool_choice_name": "f"}, "chat.tool_choice", "no tools", {}),
            ({"tool_choice_name": ""}, "chat.tool_choice", "names no tool", {}),
            ({"tool_choice_name": "g", "tools": [tool]}, "chat.tool_choice", "none of tools", {}),
            ({"tool_choice": 9, "tools": [tool]}, "chat.tool_choice", "not known", {}),
            (
                {"tool_choice_name": "f", "tools": [tool]},
                "chat.tools",
                "another form",
                {"structured": form},
            ),
        ):
            chat_ = pb.Chat(messages=[message], **more)
            error = await refused(client.generate(chat_, **asked))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            ((found, why),) = violations(error).items()
            assert found == field and said in why, (found, why)
    async with serving_model(
        lambda: opened(ScriptedEngine(Said("x"), LIMITS), tokenizer_with("{{ tools }}[TOOL_CALLS]"))
    ) as (_, client):
        strict = pb.Tool(name="f", strict=True)
        error = await refused(client.generate(pb.Chat(messages=[message], tools=[strict])))
        assert [*violations(error)] == ["chat.tools[0].strict"]
