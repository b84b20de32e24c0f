"""Spans of calls over both doors, as a collector receives them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import grpc
import httpx2 as httpx
import pytest
from fake_engine import LONG, ScriptedEngine, echo, forever, limits
from jaxinfer_service.tracing.setup import GRPC, HTTP, Tracing, _protocol, _url, open_tracing
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from otlp import attributes, collecting, collecting_over_http
from serving import in_loop, refused, serving, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=what-it-likes"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
SECRET = "sesame"  # of prompts, which no span repeats


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """No variables but those that a test sets."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@contextlib.asynccontextmanager
async def traced(script=echo, how=collecting, **sizes):
    """(engine, server, client, HTTP client, spans) of a server whose spans are collected; `spans`
    waits until there are so many and gives them by their names."""
    engine = ScriptedEngine(script, limits(**sizes) if sizes else LONG)
    with how() as (collector, endpoint):
        tracing = open_tracing(endpoint)
        assert isinstance(tracing, Tracing)

        async def spans(count: int) -> dict[str, list[Span]]:
            async def sent():
                await asyncio.to_thread(tracing.provider.force_flush)
                return len(collector.spans) >= count

            async with asyncio.timeout(20):
                while not await sent():
                    await asyncio.sleep(0.01)
            assert len(collector.spans) == count, [span.name for span in collector.spans]
            assert SECRET not in str(collector.requests)
            found: dict[str, list[Span]] = {}
            for span in collector.spans:
                found.setdefault(span.name, []).append(span)
            return found

        async with (
            serving(engine, http_port=0, tracing=tracing) as (server, client),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=60) as plain,
        ):
            yield engine, client, plain, spans


def is_child(span: Span, parent: Span) -> bool:
    return (span.trace_id, span.parent_span_id) == (parent.trace_id, parent.span_id)


@in_loop
async def test_a_grpc_call_continues_its_callers_trace():
    async with traced() as (engine, client, _, spans):
        engine.cached = lambda request: 3
        callers = TracerProvider().get_tracer("caller")
        before = time.time_ns()
        with callers.start_as_current_span("asking") as asking:
            answer = await client.generate(
                SECRET, temperature=0.5, top_p=0.9, seed=7, max_new_tokens=9, priority=2, tenant="t"
            )
        found = await spans(2)
        (call,), (request,) = found["jaxinfer.v1.Inference/Generate"], found["text_completion fake"]
        above = asking.get_span_context()
        assert call.trace_id == above.trace_id.to_bytes(16)
        assert call.parent_span_id == above.span_id.to_bytes(8)
        assert is_child(request, call)
        assert (call.kind, request.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
        said = attributes(call)
        assert len(said.pop("jaxinfer.request.id")) == 32
        assert said == {
            "rpc.system.name": "grpc",
            "rpc.method": "jaxinfer.v1.Inference/Generate",
            "rpc.response.status_code": "OK",
            "gen_ai.request.model": "fake",
            "gen_ai.response.id": answer.request_id,
        }
        said = attributes(request)
        seconds = {name: said.pop(name) for name in [*said] if "time_" in name or "e2e" in name}
        assert said == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "jaxinfer",
            "gen_ai.request.model": "fake",
            "gen_ai.response.model": "fake",
            "gen_ai.response.id": answer.request_id,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.request.seed": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.usage.input_tokens": 6,
            "gen_ai.usage.output_tokens": 7,
            "gen_ai.usage.cache_read.input_tokens": 3,
            "gen_ai.response.finish_reasons": ["stop"],
            "jaxinfer.request.priority": 2,
            "jaxinfer.request.tenant": "t",
            "jaxinfer.preemptions": 0,
        }
        timing = answer.timing
        latency = "gen_ai.latency."
        assert seconds == {
            "gen_ai.response.time_to_first_chunk": timing.first_token,
            f"{latency}time_to_first_token": timing.first_token,
            f"{latency}time_in_queue": timing.queued,
            f"{latency}time_in_model_prefill": pytest.approx(timing.first_token - timing.queued),
            f"{latency}time_in_model_decode": pytest.approx(timing.total - timing.first_token),
            f"{latency}time_in_model_inference": pytest.approx(timing.total - timing.queued),
            f"{latency}e2e": timing.total,
        }
        at = {event.name: event.time_unix_nano for event in request.events}
        began, ended = request.start_time_unix_nano, request.end_time_unix_nano
        assert before <= began <= at["scheduled"] <= at["first_token"] <= ended <= time.time_ns()
        assert at["first_token"] - began == pytest.approx(timing.first_token * 1e9, abs=2)
        assert call.start_time_unix_nano <= began and ended <= call.end_time_unix_nano


@in_loop
async def test_an_http_call_continues_the_trace_of_its_headers():
    async with traced(how=collecting_over_http) as (_, _, plain, spans):
        chat = [{"role": "user", "content": SECRET}]
        asked = {"messages": chat, "n": 2, "stop": ["same"], "response_format": {"type": "text"}}
        answer = await plain.post("/v1/chat/completions", json=asked, headers=HEADERS)
        body = {"prompt": [SECRET, "b"], "stream": True, "max_tokens": 2, "model": "fake"}
        streamed = await plain.post("/v1/completions", json=body)
        found = await spans(5)
        (chats,), (texts,) = found["POST /v1/chat/completions"], found["POST /v1/completions"]
        (request,), asks = found["chat fake"], found["text_completion fake"]
        assert (chats.trace_id.hex(), chats.parent_span_id.hex()) == (TRACE, PARENT)
        assert chats.trace_state == HEADERS["tracestate"] and is_child(request, chats)
        assert texts.trace_id != chats.trace_id and not texts.parent_span_id
        assert len(asks) == 2 and all(is_child(ask, texts) for ask in asks)
        said = attributes(chats)
        assert said.pop("jaxinfer.request.id") == answer.headers["x-request-id"]
        assert said == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "url.path": "/v1/chat/completions",
            "url.scheme": "http",
            "http.response.status_code": 200,
            "gen_ai.request.model": "fake",
            "gen_ai.request.stream": False,
            "gen_ai.response.id": answer.json()["id"],
        }
        said = attributes(request)
        assert said["gen_ai.request.choice.count"] == 2
        assert said["gen_ai.response.finish_reasons"] == ["stop", "stop"]
        assert said["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
        assert attributes(texts)["gen_ai.request.stream"] is True
        assert attributes(texts)["gen_ai.response.id"] in streamed.text
        assert {tuple(attributes(ask)["gen_ai.response.finish_reasons"]) for ask in asks} == {
            ("length",), ("stop",)
        }  # fmt: skip


@in_loop
async def test_calls_that_end_early_say_how():
    """Cancelled by their clients, past their deadlines, ended by the operator; over both doors."""
    async with traced(forever) as (engine, client, plain, spans):
        stream = client.stream(SECRET)
        await anext(aiter(stream))
        stream.cancel()
        await until(lambda: not engine.running)
        late = await refused(client.generate(SECRET, timeout=0.2))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        asked = {"prompt": SECRET, "stream": True, "max_tokens": 10_000}
        async with plain.stream("POST", "/v1/completions", json=asked) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: not engine.running)
        timed = await plain.post("/v1/completions", json={"prompt": SECRET, "timeout": 0.1,
                                                          "max_tokens": 10_000})  # fmt: skip
        assert timed.status_code == 504
        found = await spans(8)
    requests = [attributes(span) for span in found["text_completion fake"]]
    ends = [said["gen_ai.response.finish_reasons"] for said in requests]
    # A client that leaves at its deadline, a moment before the server's own, looks like any other.
    was_late = ends[1] == ["deadline"]
    assert ends == [["cancelled"], ["deadline" if was_late else "cancelled"],
                    ["cancelled"], ["deadline"]]  # fmt: skip
    assert [said["error.type"] for said in requests] == [reason for (reason,) in ends]
    assert all(said["gen_ai.usage.output_tokens"] > 0 for said in requests[::2])
    codes = [span.status.code for span in found["text_completion fake"]]
    unset, error = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR
    assert codes == [unset, error if was_late else unset, unset, error]
    (cancelled,) = found["jaxinfer.v1.Inference/GenerateStream"]
    (expired,) = found["jaxinfer.v1.Inference/Generate"]
    left, over_time = found["POST /v1/completions"]
    assert attributes(cancelled)["rpc.response.status_code"] == "CANCELLED"
    code = attributes(expired)["rpc.response.status_code"]
    assert code in ("DEADLINE_EXCEEDED", "CANCELLED")
    assert attributes(left)["error.type"] == "cancelled"
    assert attributes(over_time)["http.response.status_code"] == 504
    late = error if code == "DEADLINE_EXCEEDED" else unset
    calls = (cancelled, expired, left, over_time)
    assert [call.status.code for call in calls] == [unset, late, unset, error]


@in_loop
async def test_refused_calls_have_a_span_and_their_prompts_none():
    async with traced(max_queued_requests=1, max_num_seqs=1) as (engine, client, plain, spans):
        await refused(client.generate(SECRET, max_new_tokens=-1))
        await refused(client.generate(SECRET, model="other"))
        assert (await plain.post("/v1/completions", json={"prompt": ""})).status_code == 400
        engine.gate.clear()
        calls = [asyncio.ensure_future(client.generate(SECRET, n=1)) for _ in range(4)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert next(iter(done)).exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        engine.gate.set()
        await asyncio.wait(calls)
        taken = sum(call.exception() is None for call in calls)
        surrogate = b'{"prompt": "a", "model": "\\ud800"}'
        json = {"content-type": "application/json"}
        await plain.post("/v1/completions", content=surrogate, headers=json)
        found = await spans(8 + taken)
    calls = found["jaxinfer.v1.Inference/Generate"]
    codes = [attributes(call)["rpc.response.status_code"] for call in calls]
    assert codes[:2] == ["INVALID_ARGUMENT", "NOT_FOUND"]
    assert codes.count("RESOURCE_EXHAUSTED") == 4 - taken and codes.count("OK") == taken
    assert all(call.status.code == Status.STATUS_CODE_UNSET for call in calls)
    assert attributes(calls[1])["gen_ai.request.model"] == "other"
    assert len(found["text_completion fake"]) == taken
    wrong, unknown = found["POST /v1/completions"]
    assert attributes(wrong)["error.type"] == "400"
    assert attributes(unknown)["gen_ai.request.model"] == "\\ud800"


@in_loop
async def test_what_is_not_sampled_and_what_is_no_call_has_no_span():
    async with traced() as (_, client, plain, spans):
        await client.stub.Generate(_request(), metadata=tuple(NOT_SAMPLED.items()))
        await plain.post("/v1/completions", json={"prompt": "a"}, headers=NOT_SAMPLED)
        for path in ("/health", "/metrics", "/v1/models"):
            await plain.get(path)
        await plain.post("/tokenize", json={"prompt": SECRET}, headers={"traceparent": "junk"})
        assert [*(await spans(1))] == ["POST /tokenize"]


def _request():
    from jaxinfer_service.client import generate_request

    return generate_request("a")


@in_loop
async def test_the_log_has_the_traces_id(caplog):
    """Also of calls that came without a trace."""
    from jaxinfer_service.call_ids import AddIds

    caplog.handler.addFilter(AddIds())
    caplog.set_level("DEBUG", "jaxinfer_service.end_log")
    async with traced() as (_, client, _, spans):
        await client.generate(SECRET)
        (call,) = (await spans(2))["jaxinfer.v1.Inference/Generate"]
    ends = [record for record in caplog.records if record.message == "finished"]
    assert [record.trace_id for record in ends] == [call.trace_id.hex()]


@in_loop
async def test_a_collector_that_is_not_there_delays_nobody(monkeypatch, caplog):
    monkeypatch.setattr("jaxinfer_service.tracing.setup.FLUSH_SECONDS", 0.2)
    caplog.set_level("WARNING", "jaxinfer_service")
    tracing = open_tracing("http://127.0.0.1:1")
    async with serving(ScriptedEngine(echo), tracing=tracing) as (_, client):
        assert (await client.generate("abc")).text == "abc"
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert "could not be sent" in caplog.text


@in_loop
async def test_a_caller_without_a_span_sends_no_trace():
    sent = []

    class Listening(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation, details, request):
            sent.append(dict(details.metadata or ()))
            return await continuation(details, request)

    async with serving(ScriptedEngine(echo)) as (_, client):
        client.channel._unary_unary_interceptors.append(Listening())
        await client.generate("a")
        with trace.use_span(trace.NonRecordingSpan(_context())):
            await client.generate("a")
            assert await client.tokenize("a") == [97]
    assert [each.get("traceparent") for each in sent] == [None, *[HEADERS["traceparent"]] * 2]


def _context() -> trace.SpanContext:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=False, trace_flags=flags)


# -- where to ------------------------------------------------------------------------------------


def test_nobody_asks_for_spans():
    assert open_tracing(None) is None


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("http://c:4317", GRPC),
        ("https://c", GRPC),
        ("http://c:4318", HTTP),
        ("https://c/v1/traces", HTTP),
        ("http://[::1]:4317/", GRPC),
    ],
)
def test_the_protocol_follows_from_the_address(url, protocol):
    assert _protocol(_url(url, "x")) == protocol


def test_the_environment_says_where_and_how(monkeypatch):
    with collecting_over_http("") as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", HTTP)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
        tracing = open_tracing(None)
        tracing.tracer.start_span("one").end()
        tracing.provider.shutdown()
        assert collector.paths == ["/v1/traces"] and collector.headers[0]["x-team"] == "a"
        found = collector.resource()
        assert (found["service.name"], found["deployment.environment"]) == ("mine", "lab")
        for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
            with monkeypatch.context() as more:
                more.setenv(name, value)
                assert open_tracing(None) is None


def test_the_option_wins_over_the_environment(monkeypatch):
    with collecting() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
        tracing = open_tracing(endpoint)
        tracing.tracer.start_span("one").end()
        tracing.provider.shutdown()
    assert [span.name for span in collector.spans] == ["one"]
    assert collector.resource()["service.name"] == "jaxinfer"


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://c:4317", "http://", "http://c:x", "x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="--otlp-endpoint is"):
        open_tracing(url)


def test_what_cannot_be_honoured_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'"):
        open_tracing("http://c:4317")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(ValueError, match="OTEL_SDK_DISABLED"):
        open_tracing("http://c:4317")


@pytest.mark.parametrize("name", ["exporter.otlp.proto.grpc.trace_exporter", "sdk.trace"])
def test_without_the_packages_the_option_is_refused(monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, f"opentelemetry.{name}", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxinfer\[tracing\]'"):
        open_tracing("http://c:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    caplog.set_level("WARNING", "jaxinfer_service")
    assert open_tracing(None) is None and "jaxinfer[tracing]" in caplog.text
