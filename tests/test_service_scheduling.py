"""The service over gRPC: priority, tenant and salt, cached tokens, deadlines refused on arrival."""

from __future__ import annotations

import grpc
from fake_engine import EOS, ScriptedEngine, balanced, echo
from jaxinfer_service.client import violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import PATIENCE_S, in_loop, refused, serving

from jaxinfer.request import FinishReason, Scheduling

Code = grpc.StatusCode


@in_loop
async def test_priority_tenant_and_salt_reach_the_engine():
    seen = []

    def script(request):
        seen.append(request.scheduling)
        return [EOS]

    async with serving(ScriptedEngine(script)) as (_, client):
        await client.generate("x")
        await client.generate("x", priority=-1000, tenant="队" * 256, cache_salt="s" * 256)
        async for _ in client.stream("x", priority=1000):
            pass
    assert seen == [
        Scheduling(),
        Scheduling(-1000, "队" * 256, "s" * 256),
        Scheduling(priority=1000),
    ]


@in_loop
async def test_what_is_out_of_range_is_named():
    engine = ScriptedEngine()
    async with serving(engine) as (_, client):
        for field, bad, limit in (
            ("priority", 1001, "from -1000 to 1000"),
            ("priority", -(2**63), "from -1000 to 1000"),
            ("tenant", "x" * 257, "at most 256"),
            ("cache_salt", "x" * 10_000, "at most 256"),
        ):
            error = await refused(client.generate("x", **{field: bad}))
            assert error.code() is Code.INVALID_ARGUMENT
            assert list(violations(error)) == [field] and limit in violations(error)[field]
            assert field in pb.GenerateRequest.DESCRIPTOR.fields_by_name
        assert engine.counters.received == 0


@in_loop
async def test_cached_tokens_are_reported():
    engine = ScriptedEngine(echo)
    engine.cached = lambda request: 2
    async with serving(engine) as (_, client):
        usage = pb.Usage(prompt_tokens=3, generated_tokens=4, cached_tokens=2)
        assert (await client.generate("abc")).usage == usage
        chunks = [chunk async for chunk in client.stream("abc")]
        assert chunks[-1].usage == usage


@in_loop
async def test_a_deadline_that_cannot_be_met_is_refused_on_arrival():
    engine = ScriptedEngine(echo)
    engine.late = "the first token is expected in 9.00 s, past the deadline in 5.00 s"
    async with serving(engine) as (server, client):
        for call in (
            client.generate("x", timeout=PATIENCE_S),
            client.generate("x", n=2, timeout=PATIENCE_S),
        ):
            error = await refused(call)
            assert error.code() is Code.DEADLINE_EXCEEDED and error.details() == engine.late
        assert (await client.generate("x")).text == "x"  # without a deadline
        assert engine.ended["r1"] is FinishReason.LATE
        counters = server._service.served.frontend.counters
        assert counters.refused == 3 and counters.aborted == 0 and balanced(counters, engine)
