"""Tools and reasoning over HTTP, as clients of the OpenAI API use them."""

from __future__ import annotations

import contextlib
import json

import httpx2 as httpx
import openai
import tokenizers
from fake_engine import EOS, ScriptedEngine, byte_tokenizer, limits, says
from jaxinfer_service.model import OpenedModel
from serving import in_loop, serving_model
from tokenizers import AddedToken

from jaxinfer.engine_thread import EngineThread
from jaxinfer.replies.formats import reply_format
from jaxinfer.request import Request
from jaxinfer.text import TextProcessor
from jaxinfer.tokenizer import Tokenizer

# The constructs of Qwen 3's.
TEMPLATE = r"""{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ "\n" }}
{%- endfor %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
TOLD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEXTUAL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
COLOGNE = ("weather", '{"city": "Köln"}')
LIMITS = limits(max_model_len=4096, kv_tokens=8192, vocab_size=300, max_queued_tokens=100_000)


def tokenizer_with(template: str, *special: str) -> Tokenizer:
    """The byte tokenizer with these special tokens: 257, 258, …"""
    raw = tokenizers.Tokenizer.from_str(byte_tokenizer()._definition)
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(raw.to_str(), {"chat_template": template}, [EOS])


class Said:
    """A model that gives its replies in turn; `prompts` and `requests` have what it was
    asked."""

    def __init__(self, *replies: str | list[int]):
        self.replies, self.prompts, self.requests = [*replies], list[str](), list[Request]()

    def __call__(self, request):
        self.requests.append(request)
        self.prompts.append(bytes(i for i in request.prompt if i < 256).decode())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return [*(reply.encode() if isinstance(reply, str) else reply), EOS]


def opened(engine, tokenizer) -> OpenedModel:
    return OpenedModel(
        ["fake"],
        TextProcessor(tokenizer, tokenizer.eos_ids, engine.limits),
        lambda *calls: EngineThread(engine, *calls),
        replies=reply_format(tokenizer),
    )


@contextlib.asynccontextmanager
async def chatting(script, tokenizer=None):
    """(openai client, httpx client) of a server whose model says what the script has."""
    model = opened(ScriptedEngine(script, LIMITS), tokenizer or tokenizer_with(TEMPLATE))
    async with serving_model(lambda: model, http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=url, timeout=30) as plain,
        ):
            yield client, plain


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


async def ask(client, **asked):
    """The choice of a whole answer, which a streamed one gives as well; and the usage."""
    asked = {"model": "fake", "messages": user("x"), "temperature": 0} | asked
    answer = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(
        **asked, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    (whole,), (parts,) = answer.choices, streamed.choices
    assert parts.finish_reason == whole.finish_reason
    assert (parts.message.content or None) == (whole.message.content or None)
    assert reasoning(parts) == reasoning(whole)
    assert calls(parts) == calls(whole)
    assert streamed.usage == answer.usage
    return whole, answer.usage


def calls(choice) -> list[tuple[str, str]]:
    found = choice.message.tool_calls or []
    assert all(call.id and call.type == "function" for call in found)
    assert len({call.id for call in found}) == len(found)
    return [(call.function.name, call.function.arguments) for call in found]


def reasoning(choice) -> str | None:
    found = (choice.message.model_extra or {}).get("reasoning_content")
    assert found == (choice.message.model_extra or {}).get("reasoning")
    return found


@in_loop
async def test_a_whole_round_trip():
    """A call, its result, and the answer: the answer's message goes back as it came."""
    said = Said(CALL, "It is warm.")
    async with chatting(said) as (client, _):
        asked = {"model": "fake", "tools": [WEATHER]}
        messages = user("Weather in Köln?")
        answer = await client.chat.completions.create(messages=messages, **asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"t": 22}'}
        messages += [choice.message, result]
        answer = await client.chat.completions.create(messages=messages, **asked)
        assert answer.choices[0].message.content == "It is warm."
        assert answer.choices[0].finish_reason == "stop"
    first, second = said.prompts
    assert (
        first == f"{json.dumps(WEATHER, ensure_ascii=False)}\n[user]Weather in Köln?\n[assistant]"
    )
    assert second == first + f'{CALL}\n[tool]{{"t": 22}}\n[assistant]'


SPECIAL = ("[TOOL_CALLS]", "[OTHER]", "[THINK]", "[/THINK]")
REPLIES = [
    (CALL, None, None, [COLOGNE]),
    (f"I look.\n{CALL}\n{CALL}", "I look.", None, [COLOGNE] * 2),
    (f"<think>\nhm\n</think>\n\n{CALL}", None, "hm", [COLOGNE]),
    ("<think>hm</think>No.", "No.", "hm", []),
    ("<tool_call>weather(Köln)</tool_call>", "<tool_call>weather(Köln)</tool_call>", None, []),
    ("plain 😀 text ", "plain 😀 text ", None, []),
]


@in_loop
async def test_streamed_and_whole_answers_are_the_same():
    said = Said("")
    async with chatting(said) as (client, _):
        for reply, content, thought, made in REPLIES:
            said.replies = [reply]
            choice, usage = await ask(client, tools=[WEATHER])
            found = (choice.message.content, reasoning(choice), calls(choice))
            assert found == (content, thought, made)
            assert choice.finish_reason == ("tool_calls" if made else "stop")
            thinking = reply.partition("</think>")[0] + "</think>" if thought else ""
            tokens = usage.completion_tokens_details.reasoning_tokens
            assert tokens == len(thinking.encode()) and usage.completion_tokens > tokens


@in_loop
async def test_a_call_is_streamed_by_its_name_and_then_piece_by_piece():
    async with chatting(Said(CALL)) as (client, _):
        stream = await client.chat.completions.create(
            model="fake", messages=user("x"), tools=[WEATHER], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    found = [call for delta in deltas for call in delta.tool_calls or ()]
    assert {call.index for call in found} == {0}
    assert found[0].function.name == "weather" and found[0].id.startswith("call_")
    assert all(call.id is None and call.function.name is None for call in found[1:])
    assert "".join(call.function.arguments for call in found) == '{"city": "Köln"}'
    assert not any(delta.content for delta in deltas)


@in_loop
async def test_marks_that_are_special_tokens_are_read_and_not_shown():
    """Though special tokens are left out of texts."""
    tokenizer = tokenizer_with(
        "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{# [TOOL_CALLS] [THINK] #}",
        *SPECIAL,
    )
    mark, other, think, end = (tokenizer.raw.token_to_id(token) for token in SPECIAL)
    call = [other, think, *b"hm", end, *b"So:", mark, *b'[{"name": "weather", "arguments": {}}]']
    async with chatting(Said(call), tokenizer) as (client, _):
        choice, _ = await ask(client, tools=[WEATHER])
        assert choice.message.content == "So:" and calls(choice) == [("weather", "{}")]
        assert reasoning(choice) == "hm"
        assert len(choice.message.tool_calls[0].id) == 9, "as Mistral's templates want it"
        choice, _ = await ask(client)
        assert choice.message.content == 'So:[{"name": "weather", "arguments": {}}]'


@in_loop
async def test_a_template_without_tools_is_told_of_them():
    """As the demo model's: in its system message, and with calls and results as text."""
    said = Said(CALL)
    async with chatting(said, tokenizer_with(TOLD)) as (client, _):
        choice, _ = await ask(client, tools=[WEATHER])
        assert calls(choice) == [COLOGNE]
        call = {"id": "c", "type": "function"}
        call["function"] = {"name": "weather", "arguments": '{"city": "Rome"}'}
        messages = [
            {"role": "system", "content": "Be brief."},
            *user("Weather?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "20"},
            {"role": "tool", "tool_call_id": "d", "content": "30"},
        ]
        await ask(client, messages=messages, tools=[WEATHER])
    prompt = said.prompts[-1]
    assert prompt.startswith("[system]Be brief.\n\nYou can use") and '"city"' in prompt
    assert prompt.endswith(
        '[user]Weather?\n[assistant]<tool_call>\n[{"name": "weather", "arguments": {"city": "Rome"'
        "}}]\n</tool_call>\n[user]<tool_response>\n20\n</tool_response>\n<tool_response>\n30\n"
        "</tool_response>\n[assistant]"
    )


@in_loop
async def test_choices_of_tools():
    said = Said(f"{CALL}{CALL}")
    async with chatting(said) as (client, _):
        choice, _ = await ask(client, tools=[WEATHER], tool_choice="none")
        assert choice.message.content == CALL * 2 and "weather" not in said.prompts[-1]
        choice, _ = await ask(client, tools=[WEATHER], parallel_tool_calls=False)
        assert calls(choice) == [COLOGNE]
        choice, _ = await ask(client, tools=[WEATHER], max_tokens=len(CALL.encode()) - 17)
        assert choice.finish_reason == "length" and calls(choice) == [("weather", '{"city": "Köl')]


@in_loop
async def test_options_of_the_template():
    said = Said("hm</think>yes")
    async with chatting(said) as (client, plain):
        for asked in (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"reasoning_effort": "none"},
        ):
            choice, _ = await ask(client, **asked)
            assert said.prompts[-1].endswith("<think></think>")
            assert choice.message.content == "hm</think>yes"
        counted = {"messages": user("x"), "chat_template_kwargs": {"enable_thinking": False}}
        found = (await plain.post("/tokenize", json=counted)).json()
        assert found["count"] == len(said.prompts[-1])


@in_loop
async def test_reasoning_that_the_template_begins():
    tokenizer = tokenizer_with(TOLD + "<think>\n")
    async with chatting(Said("hm\n</think>\n\nyes"), tokenizer) as (client, _):
        choice, usage = await ask(client)
        assert choice.message.content == "yes" and reasoning(choice) == "hm"
        assert usage.completion_tokens_details.reasoning_tokens == len("hm\n</think>")
        choice, usage = await ask(client, max_tokens=2)
        assert choice.message.content is None and reasoning(choice) == "hm"
        assert choice.finish_reason == "length"
        assert usage.completion_tokens_details.reasoning_tokens == 2


BAD = [
    ({"tool_choice": "auto"}, "tool_choice", "there are no tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "another tool's"),
    ({"tools": [TEXTUAL]}, "tools[0].function.parameters", "'object'"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "none of tools",
    ),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1"),
    ({"tools": [{"type": "web"}]}, "tools[0].type", "function"),
    ({"chat_template_kwargs": {"enable": 1}}, "chat_template_kwargs", "does not read"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "does not read"),
    ({"reasoning_effort": "high"}, "chat_template_kwargs", "has reasoning_effort"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "is missing"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
        "messages[0].tool_call_id",
        "the role is not tool",
    ),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "at least 1"),
    ({"functions": [{}]}, "functions", "not known"),
]


@in_loop
async def test_what_cannot_be_honoured_is_refused_by_name():
    async with chatting(says("x")) as (_, plain):
        for asked, param, said in BAD:
            answer = await plain.post("/v1/chat/completions", json={"messages": user("x")} | asked)
            error = answer.json()["error"]
            assert answer.status_code == 400 and said in error["message"], error
            assert error["param"] == param, error


@in_loop
async def test_tools_of_a_model_whose_calls_cannot_be_read():
    tokenizer = tokenizer_with("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    async with chatting(says("x"), tokenizer) as (_, plain):
        asked = {"messages": user("x"), "tools": [WEATHER]}
        answer = await plain.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.text
        answer = await plain.post("/v1/chat/completions", json=asked | {"tool_choice": "none"})
        assert answer.status_code == 200
