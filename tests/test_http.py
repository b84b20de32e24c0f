"""The OpenAI-compatible front, driven by the official client and by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx2 as httpx
import openai
import pytest
from fake_engine import EOS, LIMITS, LONG, ScriptedEngine, echo, forever, says
from jaxinfer_service.model import OpenedModel
from jaxinfer_service.server import listen
from serving import PATIENCE_S, TOKENIZER, in_loop, serving, serving_model, until

from jaxinfer.engine_thread import EngineThread
from jaxinfer.generation import sampling_defaults
from jaxinfer.text import TextProcessor


@contextlib.asynccontextmanager
async def http(engine, **config):
    """(httpx client, openai client) of a server over a scripted engine."""
    async with serving(engine, http_port=0, **config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as plain,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield plain, client


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@in_loop
async def test_a_chat_is_answered_whole_and_streamed():
    async with http(ScriptedEngine(says("你好 😀 one"))) as (_, client):
        answer = await client.chat.completions.create(model="fake", messages=user("x"))
        assert answer.object == "chat.completion" and answer.model == "fake"
        assert answer.id.startswith("chatcmpl-")
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and choice.message.content == "你好 😀 one"
        assert choice.finish_reason == "stop" and choice.logprobs is None
        assert answer.usage.completion_tokens == len("你好 😀 one".encode()) + 1
        assert answer.usage.prompt_tokens == len("user: x\nassistant:")
        stream = await client.chat.completions.create(
            model="fake", messages=user("x"), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == "你好 😀 one" and not any("\ufffd" in text for text in texts)
        assert [c.finish_reason for k in chunks for c in k.choices][-1] == "stop"
        assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@in_loop
async def test_every_parameter_reaches_the_engine():
    asked = []

    def script(request):
        asked.append(request)
        return [97] * 10

    async with http(ScriptedEngine(script)) as (_, client):
        await client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "a"}] * 2},
                *user("x"),
            ],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            stop=["zz", "yy"],
            seed=11,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": 2},
            logprobs=True,
            top_logprobs=3,
            user="someone",
            response_format={"type": "text"},
            extra_body={
                "top_k": 4,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "stop_token_ids": [9],
                "include_stop_str_in_output": True,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "priority": 3,
                "tenant": "t",
                "cache_salt": "s",
            },
        )
    (request,) = asked
    params = request.params
    assert bytes(request.prompt) == b"system: aa\nuser: x\nassistant:"
    assert request.max_new_tokens == 7 and request.seed == 11 and request.stop_ids == (9,)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 4, 0.125)
    assert params.stop == ("zz", "yy") and params.logit_bias == ((5, 2.0),)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.5 and params.logprobs == 3
    assert params.include_stop and params.ignore_eos and not params.skip_special_tokens
    scheduling = request.scheduling
    assert (scheduling.priority, scheduling.tenant, scheduling.cache_salt) == (3, "t", "s")


@pytest.mark.parametrize(
    ("own", "lengths"),
    [({}, [16, 3]), ({"max_new_tokens": 7}, [7, 3]), ({"max_length": 30}, [27, 3])],
)
@in_loop
async def test_the_length_of_a_completion_that_says_none(own, lengths):
    asked = []

    def script(request):
        asked.append(request)
        return [97] * 40

    engine = ScriptedEngine(script)

    def open_model():
        text = TextProcessor(TOKENIZER, (), engine.limits, sampling_defaults(own))
        return OpenedModel(["fake"], text, lambda *calls: EngineThread(engine, *calls))

    async with serving_model(open_model, http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}/v1/completions"
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            for length in ({}, {"max_tokens": 3}):
                answer = await client.post(url, json={"model": "fake", "prompt": "abc"} | length)
                assert answer.status_code == 200, answer.text
    assert [request.max_new_tokens for request in asked] == lengths


@in_loop
async def test_completions_of_several_prompts_and_samples():
    async with http(ScriptedEngine(echo)) as (_, client):
        answer = await client.completions.create(
            model="fake", prompt=["one", "two"], n=2, max_tokens=2, echo=True
        )
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (0, "oneon", "length"),
            (1, "oneon", "length"),
            (2, "twotw", "length"),
            (3, "twotw", "length"),
        ]
        assert answer.usage.prompt_tokens == 6 and answer.usage.completion_tokens == 8
        stream = await client.completions.create(
            model="fake", prompt=[[104, 105], [106]], stream=True, echo=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "hihi", 1: "jj"}


@in_loop
async def test_a_completion_has_16_tokens_unless_it_says_so():
    async with http(ScriptedEngine(forever)) as (_, client):
        answer = await client.completions.create(model="fake", prompt="x")
        assert answer.usage.completion_tokens == 16
        assert answer.choices[0].finish_reason == "length"


@in_loop
async def test_logprobs_in_both_forms():
    async with http(ScriptedEngine(says("aé"))) as (_, client):
        answer = await client.completions.create(model="fake", prompt="x", logprobs=1)
        found = answer.choices[0].logprobs
        assert found.tokens == ["a", "\ufffd", "\ufffd", "<eos>"]
        assert found.token_logprobs == [-97.0, -195.0, -169.0, -256.0]
        assert found.text_offset == [0, 1, 2, 3]
        assert found.top_logprobs[0] == {"a": -97.0, "\x00": 0.0}, "the sampled one is among them"
        answer = await client.chat.completions.create(
            model="fake", messages=user("x"), logprobs=True, top_logprobs=1
        )
        entries = answer.choices[0].logprobs.content
        assert [entry.logprob for entry in entries] == found.token_logprobs
        assert entries[1].bytes == [0xC3] and len(entries[0].top_logprobs) == 1


@in_loop
async def test_stop_strings_and_ids_are_told():
    async with http(ScriptedEngine(says("one two"))) as (plain, _):
        for asked, reason in (
            ({"stop": "tw"}, "tw"),
            ({"stop_token_ids": [ord("t")]}, ord("t")),
            ({}, None),
        ):
            answer = await plain.post("/v1/completions", json={"prompt": "x"} | asked)
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] == reason


BAD = [
    ({"prompt": "x", "foo": 1}, "foo", "not known"),
    ({"prompt": "x", "max_tokens": "3"}, "max_tokens", "integer"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "at least 1"),
    ({"prompt": {"a": 1}}, "prompt", "valid string"),
    ({"prompt": ["a", 3]}, "prompt", "prompt[1]: input should be a valid string"),
    ({"prompt": [257]}, "prompt[0]", "from 0 to 256"),
    ({"prompt": [True]}, "prompt", "valid integer"),
    ({"prompt": [[1.0]]}, "prompt", "valid integer"),
    ({"prompt": "x", "stop_token_ids": [True]}, "stop_token_ids[0]", "valid integer"),
    ({"prompt": "x", "allowed_token_ids": [1.0]}, "allowed_token_ids[0]", "valid integer"),
    (
        {"prompt": "x", "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing",
    ),
    ({"prompt": "x" * 100}, "prompt", "max_model_len"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias[300]", "from 0 to 256"),
    ({"prompt": "x", "n": 65}, "n", "64"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream is not"),
    ({}, "prompt", "required"),
]


@pytest.mark.parametrize(("body", "param", "said"), BAD)
def test_bad_input_is_refused_by_name(body, param, said):
    @in_loop
    async def ask():
        async with http(ScriptedEngine(echo)) as (plain, _):
            for stream in (False, True) if "stream_options" not in body else (False,):
                answer = await plain.post("/v1/completions", json=body | {"stream": stream})
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["type"] == "invalid_request_error"
                assert said.lower() in error["message"].lower() and error["param"] == param

    ask()


@in_loop
async def test_what_is_no_json_or_no_route_is_answered_in_the_same_form():
    async with http(ScriptedEngine(echo)) as (plain, _):
        for send, code in (
            (plain.post("/v1/completions", content=b"{"), 400),
            (plain.post("/v1/completions", content=b"\xff\xfe"), 400),
            (plain.post("/v1/chat/completions", json=[1]), 400),
            (plain.get("/v1/nothing"), 404),
            (plain.delete("/v1/models"), 405),
            (plain.post("/v1/completions", json={"prompt": "x", "model": "gpt"}), 404),
            (plain.get("/v1/models/gpt"), 404),
        ):
            answer = await send
            assert answer.status_code == code and answer.json()["error"]["message"]


@in_loop
async def test_a_full_queue_is_429_with_retry_after():
    engine = ScriptedEngine(forever)
    async with http(engine) as (_, client):
        engine.gate.clear()
        asked = [client.completions.create(model="fake", prompt="x") for _ in range(8)]
        calls = [asyncio.create_task(call) for call in asked]  # of which four may wait
        await until(lambda: any(call.done() for call in calls))
        engine.gate.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
    refusals = [end for end in ended if isinstance(end, openai.RateLimitError)]
    assert refusals and len(refusals) < 8
    for refusal in refusals:
        assert int(refusal.response.headers["retry-after"]) >= 1
        assert refusal.body["code"] == "queue_full"
    assert {end.usage.completion_tokens for end in ended if end not in refusals} == {16}


@in_loop
async def test_a_client_that_leaves_ends_its_request():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.01)
    async with http(engine) as (plain, _):
        body = {"prompt": "x", "max_tokens": 30_000}
        whole = asyncio.create_task(plain.post("/v1/completions", json=body))
        await until(lambda: engine.running)
        whole.cancel()
        await until(lambda: not engine.running)
        body["stream"] = True
        async with plain.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: not engine.running)
        assert [end.value for end in engine.ended.values()] == ["cancelled", "cancelled"]


@in_loop
async def test_models_versions_and_health():
    async with http(ScriptedEngine(echo)) as (plain, client):
        (model,) = (await client.models.list()).data
        assert model.id == "fake" and model.max_model_len == LIMITS.max_model_len
        kinds = (model.dtype, model.quantization, model.kv_cache_dtype)
        assert kinds == ("float32", "none", "float32")
        assert (await client.models.retrieve("fake")).id == "fake"
        for path in ("/health", "/ready"):
            assert (await plain.get(path)).status_code == 200
        assert (await plain.get("/version")).json()["version"]
        assert (await plain.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]


@in_loop
async def test_an_engine_that_fails_is_503():
    engine = ScriptedEngine(forever)
    async with http(engine) as (plain, client):
        engine.fail_with = RuntimeError("broken")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="fake", prompt="x")
        assert caught.value.status_code == 503 and "broken" in caught.value.message
        assert (await plain.get("/health")).status_code == 503


@in_loop
async def test_a_failure_within_a_stream_is_its_last_event():
    engine = ScriptedEngine(forever, step_seconds=0.02)
    async with http(engine) as (plain, _):
        body = {"prompt": "x", "max_tokens": 60, "stream": True}
        events = []
        async with plain.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    events.append(json.loads(line.removeprefix("data: ")))
                    engine.fail_with = RuntimeError("broken")
        assert "broken" in events[-1]["error"]["message"]


@in_loop
async def test_tokenize_and_detokenize():
    async with http(ScriptedEngine(echo)) as (plain, _):
        found = await plain.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
        assert found.json() == {
            "count": 3,
            "max_model_len": 64,
            "tokens": [*"hé".encode()],
            "token_strs": ["h", "\ufffd", "\ufffd"],
        }
        chat = await plain.post("/tokenize", json={"messages": user("a")})
        assert bytes(chat.json()["tokens"]) == b"user: a\nassistant:"
        back = await plain.post("/detokenize", json={"tokens": [*"hé".encode(), EOS]})
        assert back.json() == {"prompt": "hé<eos>"}
        for body in ({}, {"prompt": "a", "messages": user("a")}):
            assert (await plain.post("/tokenize", json=body)).status_code == 400


@in_loop
async def test_many_callers_behind_a_semaphore():
    """What guides tell people to do: 32 at a time of 100 streamed prompts."""
    limits = type(LIMITS)(257, 64, 8, 64, 100, 10_000)
    async with http(ScriptedEngine(echo, limits)) as (_, client):
        turns = asyncio.Semaphore(32)

        async def ask(text: str) -> str:
            async with turns:
                stream = await client.completions.create(model="fake", prompt=text, stream=True)
                return "".join([c.text async for chunk in stream for c in chunk.choices])

        prompts = [f"prompt {i}" for i in range(100)]
        assert await asyncio.gather(*map(ask, prompts)) == prompts


@in_loop
async def test_small_messages_leave_at_once():
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda _, writer: accepted.set_result(writer), sock=listen("127.0.0.1", 0)
    )
    async with server:
        _, ours = await asyncio.open_connection(*server.sockets[0].getsockname())
        theirs = await accepted
        connection = theirs.get_extra_info("socket")
        at_once = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        ours.close()
        theirs.close()
    assert at_once
