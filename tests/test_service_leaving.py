"""The service over gRPC: clients that leave, deadlines, silence, overload."""

from __future__ import annotations

import asyncio
import os
import sys

import grpc
import pytest
from fake_engine import LONG, ScriptedEngine, balanced, echo, forever, limits
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from jaxinfer_service.client import generate_request
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.servicer import SERVICE_NAME
from serving import in_loop, opened, refused, serving, until

from jaxinfer.frontend import Frontend
from jaxinfer.request import FinishReason, SamplingParams

Code = grpc.StatusCode


@in_loop
async def test_a_client_that_cancels_frees_its_slot():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, client):
        call = client.stream("x", max_new_tokens=10_000)
        await anext(aiter(call))
        call.cancel()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]
        unary = asyncio.create_task(client.generate("x", max_new_tokens=10_000))
        await until(lambda: engine.running)
        unary.cancel()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED] * 2
        assert balanced(server._service.served.frontend.counters, engine)


@in_loop
async def test_a_client_that_dies_frees_its_slot():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, _):
        script = (
            "import sys; from jaxinfer_service.client import Client\n"
            f"for chunk in Client('127.0.0.1:{server.port}').stream('x', max_new_tokens=10_000):\n"
            "    print('chunk', flush=True)"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert await process.stdout.readline() == b"chunk\n"
        process.kill()
        await process.communicate()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]


@in_loop
async def test_pings_through_a_long_silence_are_no_offence():
    """A server with gRPC's own settings says GOAWAY (too many pings) here, at the fourth ping."""
    engine = ScriptedEngine(echo)
    options = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with serving(engine) as (server, _):
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            call = channel.unary_unary(
                f"/{SERVICE_NAME}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            engine.gate.clear()
            waiting = asyncio.ensure_future(call(generate_request("patience")))
            await asyncio.sleep(5.5)  # a client pings once a second at most
            assert not waiting.done()
            engine.gate.set()
            assert (await waiting).text == "patience"


@in_loop
async def test_the_deadline_of_a_call_ends_its_request():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (_, client):
        error = await refused(client.generate("x", timeout=2))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not engine.has_work)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.stream("x", timeout=2):
                pass
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not engine.has_work)
        # The server cannot tell a client that leaves at its deadline, a moment before the server's
        # own, from one that cancels.
        reasons = {FinishReason.DEADLINE, FinishReason.CANCELLED}
        assert len(engine.ended) == 2 and {*engine.ended.values()} <= reasons


@in_loop
async def test_who_leaves_at_the_deadline_was_ended_by_it():
    """gRPC cancels a call that is late at the client, maybe before the server's timer fires."""
    now, engine = 100.0, ScriptedEngine(forever, LONG)
    model = opened(engine)
    front = Frontend(model.text, model.connect, clock=lambda: now)
    front.start()
    for late, reason in ((False, FinishReason.CANCELLED), (True, FinishReason.DEADLINE)):
        async with await front.submit("x", SamplingParams(), timeout=60.0) as stream:
            await anext(stream)
            now += 60.0 if late else 59.0
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()][-1] is reason
    assert front.load().counters == front.counters
    front.stop()


@in_loop
async def test_a_full_queue_says_when_to_retry():
    engine = ScriptedEngine(echo, limits(max_queued_requests=2))
    async with serving(engine) as (server, client):
        engine.gate.clear()
        first = asyncio.create_task(client.generate("warm"))
        await until(lambda: engine.running or engine.waiting)
        frontend = server._service.served.frontend
        calls = [asyncio.create_task(client.generate("abc")) for _ in range(20)]
        await until(lambda: sum(frontend._refused.values()) + len(frontend._streams) == 21)
        engine.gate.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        assert errors and all(e.code() is Code.RESOURCE_EXHAUSTED for e in errors)
        assert int(errors[0].trailing_metadata()["grpc-retry-pushback-ms"]) >= 1000
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(errors[0]).details[0].Unpack(retry)
        assert retry.retry_delay.seconds >= 1
        assert {end.text for end in ends if end not in errors} == {"abc"}
        assert (await first).text == "warm"
        assert frontend.counters.refused == len(errors) and balanced(frontend.counters, engine)


@in_loop
async def test_counters_balance_over_all_ways_to_end():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, client):
        await client.generate("a", max_new_tokens=5)
        await client.generate("a", stop=["%"])  # the fifth token
        await refused(client.generate("a", temperature=-1))
        await refused(client.generate("a", timeout=2))
        call = client.stream("a")
        await anext(aiter(call))
        call.cancel()
        await until(lambda: not engine.has_work)
        await asyncio.sleep(0.05)
        counters = server._service.served.frontend.counters
        assert (counters.received, counters.finished, counters.aborted, counters.refused) == (
            5, 2, 2, 1,
        )  # fmt: skip
        assert counters.prompt_tokens == 4
        assert engine.ended["r2"] is FinishReason.STOP_STRING
