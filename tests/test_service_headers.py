"""Ids of calls, error details, origins, and certificates that change while both doors are open."""

from __future__ import annotations

import asyncio
import io
import json
import ssl

import grpc
import httpx2 as httpx
import pytest
import trustme
from fake_engine import LONG, ScriptedEngine, echo, forever, limits
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from jaxinfer_service.call_ids import read
from jaxinfer_service.cli.console import set_up_logging
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.http.origins import read_origins
from jaxinfer_service.tls import Tls
from serving import in_loop, refused, serving, until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def log(monkeypatch):
    """The lines of a JSON log at level debug, as `serve` writes it."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    set_up_logging("debug", "json")
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def http(server, **how) -> httpx.AsyncClient:
    scheme = "https" if "verify" in how else "http"
    return httpx.AsyncClient(base_url=f"{scheme}://127.0.0.1:{server.http_port}", timeout=30, **how)


async def id_of(call) -> str:
    return dict(await call.initial_metadata())["x-request-id"]


def test_ids_of_calls_come_back_and_are_logged(log):
    @in_loop
    async def ask():
        async with serving(ScriptedEngine(echo), http_port=0) as (server, client):
            given = (("x-request-id", "mine-1"), ("traceparent", TRACE))
            request = client.stub.Generate(_request("a"), metadata=given)
            await request
            assert await id_of(request) == "mine-1"
            failed = client.stub.Generate(_request(""), metadata=given)
            assert (await refused(failed)).code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(await failed.trailing_metadata())["x-request-id"] == "mine-1"
            assert not [*await failed.initial_metadata()]  # or clients would not try again
            stream = client.stub.GenerateStream(_request("b"))
            assert [chunk async for chunk in stream] and len(await id_of(stream)) == 32
            async with http(server) as plain:
                body, headers = {"prompt": "c"}, {"X-Request-Id": "mine-2", "traceparent": "junk"}
                answer = await plain.post("/v1/completions", json=body, headers=headers)
                assert answer.headers["x-request-id"] == "mine-2"
                wrong = await plain.post("/v1/completions", json={}, headers=headers)
                assert wrong.status_code == 400 and wrong.headers["x-request-id"] == "mine-2"
                streamed = await plain.post("/v1/completions", json={**body, "stream": True})
                assert len(streamed.headers["x-request-id"]) == 32

    ask()
    ends = [line for line in log() if line["message"] == "finished"]
    assert [end["request_id"] for end in ends[:1]] == ["mine-1"]
    assert ends[0]["trace_id"] == TRACE.split("-")[1] and ends[0]["request"] == "r1"
    assert [len(end["request_id"]) for end in ends] == [6, 32, 6, 32]
    assert not any("trace_id" in end for end in ends[1:])


def test_calls_that_get_no_answer_are_logged_by_their_ids_and_without_their_text(log):
    engine = ScriptedEngine(forever, LONG)

    @in_loop
    async def ask():
        async with serving(engine) as (_, client):
            make = client.stub.GenerateStream

            def named(name):
                return {"metadata": (("x-request-id", name),)}

            left = make(_request("secret", 10_000), **named("left"))
            await left.read()
            left.cancel()
            unary = client.stub.Generate(_request("secret", 10_000), **named("left2"))
            await until(lambda: engine.counters.received == 2)
            unary.cancel()
            ended = make(_request("secret", 10_000), **named("aborted"))
            first = await ended.read()
            await client.control.Abort(_abort(first.request_id))
            with pytest.raises(grpc.aio.AioRpcError):
                while await ended.read():
                    pass
            await refused(client.stub.Generate(_request("secret", -7), **named("invalid")))
            await until(lambda: engine.counters.aborted == 3)

    ask()
    lines = {line.get("request_id"): line for line in log()}
    assert lines["left"]["message"] == lines["left2"]["message"] == "left by its caller"
    assert lines["aborted"]["reason"] == "ABORTED_BY_OPERATOR"
    assert (lines["invalid"]["code"], lines["invalid"]["reason"]) == (
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
    )
    assert "secret" not in str(lines) and "-7" not in str(lines)


def test_http_calls_that_get_no_answer_are_logged_too(log):
    engine = ScriptedEngine(forever, LONG)
    body = {"prompt": "secret", "max_tokens": 10_000}

    @in_loop
    async def ask():
        async with serving(engine, http_port=0) as (server, client), http(server) as plain:

            def asked(name, **more):
                how = {"json": body | more, "headers": {"x-request-id": name}}
                return plain.stream("POST", "/v1/completions", **how)

            async with asked("left", stream=True) as answer:
                await anext(answer.aiter_lines())
            whole = asyncio.create_task(asked("left2").__aenter__())
            await until(lambda: engine.counters.received == 2)
            whole.cancel()
            await until(lambda: engine.counters.aborted == 2)
            async with asked("invalid", max_tokens=-7) as answer:
                assert answer.status_code == 400
            async with asked("aborted", stream=True) as answer:
                lines = answer.aiter_lines()
                first = json.loads((await anext(lines)).removeprefix("data: "))
                await client.control.Abort(_abort(first["id"].removeprefix("cmpl-")))
                assert "aborted" in [line async for line in lines if line][-1]

    ask()
    lines = {line.get("request_id"): line for line in log()}
    assert lines["left"]["message"] == lines["left2"]["message"] == "left by its caller"
    assert (lines["aborted"]["code"], lines["aborted"]["reason"]) == ("409", "aborted_error")
    assert (lines["invalid"]["code"], lines["invalid"]["reason"]) == (
        "400",
        "invalid_request_error",
    )
    assert "secret" not in str(lines) and "-7" not in str(lines)


def _request(text: str, most: int = 3):
    from jaxinfer_service.client import generate_request

    return generate_request(text, max_new_tokens=most)


@pytest.mark.parametrize(
    "wrong",
    ["", "a b", "a\n", "é", "x" * 129, None],
    ids=["empty", "space", "line", "é", "long", "none"],
)
def test_what_is_no_id_is_replaced(wrong):
    assert len(read(wrong, None).request_id) == 32


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (TRACE, TRACE.split("-")[1]),
        ("cc" + TRACE[2:] + "-what-comes-in-later-versions", TRACE.split("-")[1]),
        ("ff" + TRACE[2:], ""),
        (TRACE.upper(), ""),
        (TRACE[:-1], ""),
        ("00-" + "0" * 32 + TRACE[35:], ""),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_trace_of_a_call(header, trace):
    assert read(None, header).trace_id == trace


@in_loop
async def test_every_error_says_what_kind_it_is():
    async with serving(ScriptedEngine(echo, limits(max_queued_requests=1))) as (_, client):
        calls = {
            "INVALID_REQUEST": client.generate("", timeout=20),
            "MODEL_NOT_FOUND": client.generate("a", model="other", timeout=20),
            "CALL_NOT_FOUND": client.control.Abort(_abort("r99"), timeout=20),
        }
        for reason, call in calls.items():
            assert [d.reason for d in await _details(call, error_details_pb2.ErrorInfo)] == [reason]
        client_side = await _details(client.generate("", timeout=20), error_details_pb2.BadRequest)
        assert client_side[0].field_violations[0].field == "text"


@in_loop
async def test_a_full_queue_says_when_to_try_again():
    engine = ScriptedEngine(echo, limits(max_queued_requests=1, max_num_seqs=1))
    async with serving(engine) as (_, client):
        engine.gate.clear()
        calls = [asyncio.ensure_future(client.generate("a", timeout=60)) for _ in range(6)]
        done, _ = await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        for kind, field in (("ErrorInfo", "reason"), ("RetryInfo", "retry_delay")):
            (detail,) = await _details(next(iter(done)), getattr(error_details_pb2, kind))
            value = getattr(detail, field)
            assert value == "QUEUE_FULL" if kind == "ErrorInfo" else value.seconds >= 1
        engine.gate.set()
        await asyncio.wait(calls)


def _abort(request_id: str):
    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2

    return control_pb2.AbortRequest(request_id=request_id)


async def _details(call, kind) -> list:
    """The details of this kind of a call's error."""
    status = rpc_status.from_call(await refused(call))
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


@in_loop
async def test_pages_of_other_origins_may_call_if_they_are_allowed():
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    allowed = read_origins(["https://a.example", '["http://localhost:3000"]'])
    engine, origins = ScriptedEngine(echo), ("https://a.example", "http://localhost:3000")
    async with (
        serving(engine, http_port=0, allowed_origins=allowed) as (server, _),
        http(server) as plain,
    ):
        for origin in (*origins, "https://b.example"):
            known, headers = origin in origins, {"origin": origin}
            answer = await plain.options("/v1/completions", headers=headers | preflight)
            assert answer.is_success == known
            answer = await plain.post("/v1/completions", json={}, headers=headers)
            assert answer.headers.get("access-control-allow-origin") == (origin if known else None)
            if known:
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
    async with serving(ScriptedEngine(echo), http_port=0) as (server, _), http(server) as plain:
        headers = {"origin": "https://a.example"} | preflight
        answer = await plain.options("/v1/completions", headers=headers)
        assert answer.status_code == 405 and not any("allow-origin" in h for h in answer.headers)


@pytest.mark.parametrize(
    "wrong",
    [
        "a.example",
        "https://a.example/",
        "https://",
        "https://u@a.example",
        "[1]",
        "[x",
        "https://[::",
    ],
)
def test_what_is_no_origin_is_named(wrong):
    with pytest.raises(ValueError, match="--allowed-origins"):
        read_origins([wrong])


def test_origins_are_read_once_each():
    assert read_origins(["*", '["*", "https://a:1"]']) == ("*", "https://a:1")


def _write(ca: trustme.CA, folder, name: str):
    made = ca.issue_cert("127.0.0.1")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    return cert, key


def test_certificates_are_read_again_at_both_doors(tmp_path, caplog):
    """New connections take the new ones; a file that is broken changes nothing."""
    old, new, both = trustme.CA(), trustme.CA(), tmp_path / "both.pem"
    cert, key = _write(old, tmp_path, "server")
    client_cert, client_key = _write(old, tmp_path, "client")
    later_cert, later_key = _write(new, tmp_path, "later")
    for name, ca in (("old", old), ("new", new)):
        ca.cert_pem.write_to_path(tmp_path / name)
    both.write_bytes(old.cert_pem.bytes())
    tls = Tls(cert, key, both)

    async def speaks(server, trusted: str, pair) -> list[bool]:
        """Whether each door takes this pair and shows a certificate of whom is trusted."""
        found = []
        how = {"ca": tmp_path / trusted, "cert": pair[0], "key": pair[1]}
        async with AsyncClient(f"tls://127.0.0.1:{server.port}", **how) as client:
            try:
                await client.generate("a", timeout=5)
                found.append(True)
            except grpc.aio.AioRpcError:
                found.append(False)
        context = ssl.create_default_context(cafile=tmp_path / trusted)
        context.load_cert_chain(*pair)
        async with http(server, verify=context) as plain:
            try:
                found.append((await plain.get("/health")).is_success)
            except httpx.TransportError:
                found.append(False)
        return found

    @in_loop
    async def ask():
        first, later = (client_cert, client_key), (later_cert, later_key)
        how = {"ca": tmp_path / "old", "cert": client_cert, "key": client_key}
        async with serving(ScriptedEngine(echo), client=how, tls=tls, http_port=0) as (server, _):
            assert await speaks(server, "old", first) == [True, True]
            assert await speaks(server, "old", later) == [False, False]
            made = _write(new, tmp_path, "server")
            both.write_bytes(new.cert_pem.bytes())
            server.reload()
            assert await speaks(server, "new", later) == [True, True]
            assert await speaks(server, "new", first) == [False, False]
            assert await speaks(server, "old", later) == [False, False]
            made[0].write_text("broken")
            server.reload()
            assert await speaks(server, "new", later) == [True, True]

    ask()
    assert "stays as it was" in caplog.text


@in_loop
async def test_reflection_answers_to_both_of_its_names():
    ask = reflection_pb2.ServerReflectionRequest
    async with serving(ScriptedEngine(echo)) as (_, client):
        for version in ("v1", "v1alpha"):
            call = client.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=ask.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            symbol = "jaxinfer.v1.Inference"
            asked = iter([ask(list_services=""), ask(file_containing_symbol=symbol)])
            listed, file = [answer async for answer in call(asked)]
            names = [service.name for service in listed.list_services_response.service]
            assert {symbol, "jaxinfer.v1.Control", "grpc.health.v1.Health"} <= set(names)
            assert len(file.file_descriptor_response.file_descriptor_proto) >= 1
