"""What clients of the HTTP front may do to it: leave, dawdle, flood, and send no request at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Iterator

import pytest
from fake_engine import LONG, ScriptedEngine, balanced, echo, forever
from jaxinfer_service.http import app, body, schema, server
from jaxinfer_service.http.body import BoundedBody
from pydantic import ValidationError
from serving import PATIENCE_S, in_loop, until
from test_http import http, user

COMPLETION = {"prompt": "x", "max_tokens": 60}
CHAT = {"messages": user("x"), "max_tokens": 30}


def head(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {size}\r\n\r\n"
    ).encode()


@contextlib.asynccontextmanager
async def connection(plain):
    """(reader, writer) of a connection to the server that `plain` asks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", plain.base_url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


# -- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_who_leaves_while_it_waits_for_a_slot_waits_no_more(path, asked, stream):
    @in_loop
    async def leave():
        engine = ScriptedEngine(forever, LONG, step_seconds=0.01)
        async with http(engine) as (plain, _):
            holding = [
                asyncio.create_task(
                    plain.post("/v1/completions", json=COMPLETION | {"max_tokens": 30_000})
                )
                for _ in range(engine.limits.max_num_seqs)
            ]
            await until(lambda: len(engine.running) == 2)
            data = json.dumps(asked | {"stream": stream}).encode()
            async with connection(plain) as (_, writer):
                writer.write(head(path, len(data)) + data)
                await until(lambda: engine.waiting)
            await until(lambda: not engine.waiting)
            assert len(engine.running) == 2, "it left the queue, and nobody made room for it"
            for call in holding:
                call.cancel()
            await until(lambda: not engine.running)
            assert balanced(engine.counters, engine)

    leave()


@in_loop
async def test_of_several_prompts_all_end_when_the_client_leaves():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.01)
    async with http(engine) as (plain, _):
        asked = json.dumps({"prompt": ["a", "b"], "n": 2, "max_tokens": 30_000, "stream": True})
        async with connection(plain) as (reader, writer):
            writer.write(head("/v1/completions", len(asked)) + asked.encode())
            await reader.readuntil(b"data: ")
        await until(lambda: not engine.running and not engine.waiting)
        assert engine.counters.aborted == 4 and balanced(engine.counters, engine)


@in_loop
async def test_the_time_a_request_gives_itself_is_its_deadline():
    engine = ScriptedEngine(forever, step_seconds=0.05)
    async with http(engine) as (plain, _):
        answer = await plain.post("/v1/completions", json=COMPLETION | {"timeout": 0.2})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: not engine.running)
        for wrong in (0, -1, "1", float("inf")):
            answer = await plain.post(
                "/v1/completions",
                content=json.dumps(COMPLETION | {"timeout": wrong}),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_a_stream_that_ends_before_it_began_has_the_status_of_its_error(path, asked):
    """Or no client and no load balancer would try again."""

    @in_loop
    async def ask():
        engine = ScriptedEngine(forever)
        engine.late = "is late"
        async with http(engine) as (plain, _):
            asked_now = asked | {"stream": True}
            late = await plain.post(path, json=asked_now | {"timeout": 9})
            assert late.status_code == 504 and "is late" in late.json()["error"]["message"]
            engine.fail_with = RuntimeError("broken")
            failed = await plain.post(path, json=asked_now)
            assert failed.status_code == 503 and failed.headers["retry-after"]

    ask()


# -- what a body may cost ------------------------------------------------------------------------


@pytest.fixture
def small_bounds(monkeypatch):
    """Bodies of 1000 bytes in 2 s, heads in 2 s."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 2.0)

    def bounded(inner):
        return BoundedBody(inner, 1000, 2.0)

    monkeypatch.setattr(app, "BoundedBody", bounded)


def test_a_body_is_bounded_whether_it_says_its_size_or_not(small_bounds):
    @in_loop
    async def send():
        async with http(ScriptedEngine(echo)) as (plain, _):
            async with connection(plain) as (reader, writer):
                writer.write(head("/v1/completions", 1 << 40))  # and not a byte of it
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 413") and b"at most 1000 bytes" in answer
            async with connection(plain) as (reader, writer):
                chunked = head("/v1/completions", 0).replace(
                    b"content-length: 0", b"transfer-encoding: chunked"
                )
                writer.write(chunked + b"3e9\r\n" + b" " * 1001 + b"\r\n")
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 413") and b'"error"' in answer
            assert (await plain.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    send()


@in_loop
async def test_a_coded_body_is_refused_by_name():
    async with http(ScriptedEngine(echo)) as (plain, _):

        async def answer(coding: str):
            body, how = gzip.compress(b'{"prompt": "x"}'), {"content-encoding": coding}
            sent = body if coding == "gzip" else b'{"prompt": "x"}'
            head = {"content-type": "application/json"} | how
            return await plain.post("/v1/completions", content=sent, headers=head)

        assert (await answer("identity")).status_code == 200
        refused = await answer("gzip")
        assert refused.status_code == 415
        assert "content-encoding gzip" in refused.json()["error"]["message"]


def test_who_does_not_finish_a_request_is_not_waited_for(small_bounds):
    @in_loop
    async def send():
        async with http(ScriptedEngine(echo)) as (plain, _):

            async def answer_to(begun: bytes, drop: bytes = b"") -> bytes:
                """All that comes back; as long as nothing does, `drop` is sent, byte by byte."""
                async with connection(plain) as (reader, writer):
                    writer.write(begun)
                    read = asyncio.create_task(reader.read())
                    with contextlib.suppress(ConnectionError):
                        while not read.done():
                            writer.write(drop)
                            await asyncio.sleep(0.02)
                    return await read

            async with asyncio.timeout(PATIENCE_S):
                *nothing, late = await asyncio.gather(
                    answer_to(b""),
                    answer_to(b"POST /v1/completions HTTP/1.1\r\nhost:"),
                    answer_to(b"GET /health HTTP/1.1\r\nx: ", b"y"),  # a head for ever
                    answer_to(head("/v1/completions", 10) + b"{"),
                )
            assert nothing == [b""] * 3
            assert late.startswith(b"HTTP/1.1 408") and b"in time" in late

    send()


def lists(found: object) -> Iterator[dict]:
    """All schemas of lists in a schema of pydantic."""
    if isinstance(found, dict):
        if found.get("type") == "list":
            yield found
        found = list(found.values())
    if isinstance(found, list | tuple):
        for part in found:
            yield from lists(part)


BODIES = (schema.Completion, schema.ChatCompletion, schema.Tokenize, schema.Detokenize)


@pytest.mark.parametrize("kind", BODIES)
def test_a_long_wrong_list_is_not_looked_through(kind):
    found = list(lists(kind.__pydantic_core_schema__))
    assert found and all(entry.get("fail_fast") for entry in found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [1.5] * 5000},
        {"prompt": [{}] * 5000},
        {"prompt": [[{}] * 5000] * 100},
        {"prompt": "x", "stop": [1] * 5000},
        {"prompt": "x", "logit_bias": {str(i): "x" for i in range(5000)}},
        {"prompt": "x"} | {f"unknown{i}": 1 for i in range(5000)},
    ],
    ids=lambda wrong: max(wrong, key=len),
)
def test_a_wrong_body_has_few_errors_however_long_it_is(wrong):
    with pytest.raises(ValidationError) as caught:
        schema.Completion.model_validate(wrong)
    assert caught.value.error_count() <= 10


@in_loop
async def test_more_prompts_than_the_queue_takes_are_no_matter_of_trying_again():
    engine = ScriptedEngine(echo)
    async with http(engine) as (plain, _):
        for asked in ({"prompt": ["x"] * 5}, {"prompt": ["x"] * 3, "n": 2}):
            answer = await plain.post("/v1/completions", json=asked)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
            assert "queue takes 4" in answer.json()["error"]["message"]
        assert (await plain.post("/v1/completions", json={"prompt": ["x"] * 4})).status_code == 200


# -- what is no request --------------------------------------------------------------------------


@in_loop
async def test_the_answer_is_a_message_that_may_be_sent_back():
    """As everybody does: append the answer's message to the conversation, and go on."""
    async with http(ScriptedEngine(echo)) as (_, client):
        messages = user("a")
        for _ in range(2):
            answer = await client.chat.completions.create(model="fake", messages=messages)
            messages += [answer.choices[0].message, *user("b")]
        assert answer.usage.prompt_tokens > 20


@in_loop
async def test_null_is_left_out_everywhere():
    async with http(ScriptedEngine(echo)) as (plain, _):
        nothing = dict.fromkeys(("tools", "suffix", *schema.Completion.model_fields))
        assert (
            await plain.post("/v1/completions", json=nothing | {"prompt": "x"})
        ).status_code == 200
        options = {"stream": True, "stream_options": {"include_usage": None}}
        assert (
            await plain.post("/v1/completions", json=options | {"prompt": "x"})
        ).status_code == 200
        answer = await plain.post("/v1/completions", json=nothing)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "name", ["type", "id", "input", "format", "foo-bar", "5", "a b", "\ud800", "x" * 5000, "str"]
)
def test_an_unknown_field_is_named_whatever_it_is_called(name):
    @in_loop
    async def send():
        async with http(ScriptedEngine(echo)) as (plain, _):
            answer = await plain.post(
                "/v1/completions",
                content=json.dumps({"prompt": "x", name: 1}),
                headers={"content-type": "application/json"},
            )
            error = answer.json()["error"]
            shown = name.encode(errors="backslashreplace").decode()
            assert answer.status_code == 400 and error["param"][:99] == shown[:99]
            assert error["message"].startswith(shown[:99]) and len(error["message"]) < 2100

    send()


@in_loop
async def test_a_body_that_is_not_read_says_why():
    async with http(ScriptedEngine(echo)) as (plain, _):
        for data, kind, said in (
            (b'{"prompt": "x"}', "text/plain", "content-type: application/json"),
            (b'{"prompt": "x"}', "application/x-www-form-urlencoded", "content-type:"),
            (b"[" * 100_000, "application/json", "recursion"),
            (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", "digits"),
            (b'{"prompt": "\xff"}', "application/json", "decode"),
        ):
            answer = await plain.post(
                "/v1/completions", content=data, headers={"content-type": kind}
            )
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@in_loop
async def test_load_balancers_may_ask_for_the_head_alone():
    async with http(ScriptedEngine(echo)) as (plain, _):
        assert (await plain.head("/health")).status_code == 200
        assert (await plain.head("/ready")).status_code == 200
        assert (await plain.get("/v1/models/")).json()["data"][0]["id"] == "fake"


def test_bodies_and_messages_of_both_doors_have_one_bound():
    from jaxinfer_service import server as grpc_server

    assert dict(grpc_server._OPTIONS)["grpc.max_receive_message_length"] == body.MOST_BYTES
