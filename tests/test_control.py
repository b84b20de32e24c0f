"""The Control service over a scripted engine: info, load, watching, aborting."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import grpc
import pytest
from fake_engine import LONG, PAGE_SIZE, ScriptedEngine, byte_tokenizer, echo, forever, says
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from jaxinfer_service import control, version
from jaxinfer_service.client import AsyncClient, violations
from jaxinfer_service.live import MAX_STEPS, MAX_WATCHERS, page_map, steps_after
from jaxinfer_service.model import OpenedModel
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb
from jaxinfer_service.server import Server, ServerConfig
from serving import PATIENCE_S, in_loop, opened, refused, serving, serving_model, until

from jaxinfer.config import EngineConfig
from jaxinfer.engine_thread import EngineThread
from jaxinfer.generation import SamplingDefaults
from jaxinfer.load import Percentiles, StepRecord
from jaxinfer.request import FinishReason
from jaxinfer.text import TextProcessor

Code = grpc.StatusCode


async def watch(client, **request):
    return client.control.WatchLoad(pb.WatchLoadRequest(**request))


def record(step, time):
    return StepRecord(step, time, 1, 2, 3, 4, 5, 6, 7, 8, 9)


# -- what it is ------------------------------------------------------------------------------------


@in_loop
async def test_server_info_says_what_is_served_and_how():
    engine = ScriptedEngine()
    tokenizer = byte_tokenizer()
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=77, dtype="bfloat16", prefix_cache=False,
        kv_offload_bytes=5, deterministic=True, tpot_target_ms=50, tensor_parallel_size=2,
        quantization="w8a8", kv_dtype="fp8",
    )  # fmt: skip
    fields = {"temperature": 0.5, "top_k": 3, "stop": ("x",)}
    sampling = SamplingDefaults(fields, max_length=40, not_honoured=("num_beams = 4",))

    def open_model():
        return OpenedModel(
            ["one", "two"],
            TextProcessor(tokenizer, tokenizer.eos_ids, engine.limits, sampling),
            lambda on_events, on_stop: EngineThread(engine, on_events, on_stop),
            config,
            "mixed",
            "fixed",
        )

    async with serving_model(open_model) as (_, client):
        info = await client.control.ServerInfo(pb.ServerInfoRequest())
    assert 0 < info.uptime < 60
    info.ClearField("uptime")
    assert info == pb.ServerInfoResponse(
        version=version(), model_names=["one", "two"], dtype="bfloat16", tensor_parallel_size=2,
        slots=2, max_model_len=64, chunk_tokens=77, page_size=PAGE_SIZE, pages=8,
        kv_capacity_tokens=64, kv_offload_bytes=5, prefix_cache=False, deterministic=True,
        determinism="fixed", preset="mixed", tpot_target_ms=50, max_queued_requests=4,
        max_queued_tokens=1000, quantization="w8a8", kv_dtype="float8_e4m3fn",
        generation=pb.GenerationDefaults(
            eos_token_ids=tokenizer.eos_ids, temperature=0.5, top_k=3, stop=["x"], max_length=40,
            not_honoured=["num_beams = 4"],
        ),
    )  # fmt: skip
    assert version()


@in_loop
async def test_it_is_listed_by_reflection_and_health_and_unavailable_while_loading():
    loaded, loop = asyncio.Event(), asyncio.get_running_loop()

    def slow_open():
        asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result()
        return opened(ScriptedEngine())

    server = Server(ServerConfig(port=0), slow_open)
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    async with AsyncClient(f"127.0.0.1:{server.port}", retries=0) as client:
        calls = [
            client.control.ServerInfo(pb.ServerInfoRequest()),
            client.control.Load(pb.LoadRequest()),
            client.control.Abort(pb.AbortRequest(request_id="r1")),
            anext(aiter(client.control.WatchLoad(pb.WatchLoadRequest()))),
        ]
        for call in calls:
            error = await refused(call)
            assert error.code() is Code.UNAVAILABLE and "loading" in error.details()
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            services = [s.name for s in answer.list_services_response.service]
        assert control.SERVICE_NAME == "jaxinfer.v1.Control" and control.SERVICE_NAME in services
        loaded.set()
        await client.wait_ready(PATIENCE_S)
        check = health_pb2.HealthCheckRequest(service=control.SERVICE_NAME)
        assert (await client._health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
    server.shut_down()
    await task


# -- what it does ----------------------------------------------------------------------------------


@in_loop
async def test_load_has_the_engines_figures_and_counters():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)  # two slots
    engine.cached = lambda request: 3
    engine.ttft = Percentiles(0.5, 1.5, 2.5)
    async with serving(engine) as (_, client):
        await refused(client.generate("x", temperature=-1))
        calls = [asyncio.create_task(client.generate("abcde")) for _ in range(3)]
        await until(lambda: len(engine.running) == 2 and engine.waiting)
        load = await client.control.Load(pb.LoadRequest())
        assert (load.slots, load.running, load.waiting, load.waiting_tokens) == (2, 2, 1, 5)
        assert load.pages == pb.Pages(free=5, cached=1, used=2) and load.page_size == PAGE_SIZE
        assert load.ttft == pb.Percentiles(p50=0.5, p90=1.5, p99=2.5)
        assert not load.tpot.HasField("p50")
        counters = load.counters
        assert (counters.received, counters.refused, counters.prompt_tokens) == (4, 1, 15)
        assert (counters.prefix_queries, counters.prefix_hits) == (10, 6)
        assert counters.generated_tokens > 0 and 0 < load.time < 60
        for call in calls:
            call.cancel()
        await until(lambda: not engine.has_work)
        load = await client.control.Load(pb.LoadRequest())
        assert (load.running, load.waiting, load.counters.aborted) == (0, 0, 3)


@in_loop
async def test_watching_brings_every_step_once_in_order():
    engine = ScriptedEngine(says("a" * 40), step_seconds=0.002)
    async with serving(engine) as (server, client):
        await client.generate("x")
        await asyncio.sleep(0.3)  # those steps are no part of the last interval
        begun = (await client.control.Load(pb.LoadRequest())).time
        seen, maps, times = [], [], []
        call = await watch(client, interval=0.1, map_cells=4)
        engine.gate.clear()  # until all are there: one waits for the others
        answers = asyncio.gather(*(client.generate("abc") for _ in range(3)))
        await until(lambda: len(server._service.served.frontend._streams) == 3)
        engine.gate.set()
        async for message in call:
            seen += message.steps
            maps += message.page_maps
            times.append(message.load.time)
            assert message.steps_left_out == 0
            if answers.done() and not engine.has_work and len(times) > 3 and not message.steps:
                break
        call.cancel()
        records = [r for r in engine.records if r.step > 40]
        assert [s.step for s in seen] == [r.step for r in records]
        assert sum(s.chunk_tokens for s in seen) == 9 and sum(s.admitted for s in seen) == 3
        assert sum(s.decodes for s in seen) == 3 * 40
        assert {s.running for s in seen} == {1, 2} and max(s.waiting for s in seen) == 1
        assert seen[0].pages.used + seen[0].pages.cached + seen[0].pages.free == 8
        assert all(later - earlier > 0.08 for earlier, later in itertools.pairwise(times))
        assert all(begun <= s.time <= times[-1] for s in seen)
        assert {m.pages for m in maps} == {8} and {len(m.cells) for m in maps} == {4}
        no_map = await watch(client, map_cells=0)
        assert len((await anext(aiter(no_map))).page_maps) == 0
        no_map.cancel()


@in_loop
async def test_the_first_message_has_the_steps_of_its_interval_and_no_message_too_many():
    engine = ScriptedEngine()
    async with serving(engine) as (server, client):
        now = server._service.served.frontend._clock()
        engine.records.extend(record(i, now - 30) for i in range(100))
        engine.records.extend(record(100 + i, now - 2) for i in range(MAX_STEPS + 7))
        message = await anext(aiter(await watch(client, interval=10)))
        assert [s.step for s in message.steps] == [*range(107, 107 + MAX_STEPS)]
        assert message.steps_left_out == 7
        first = message.steps[0]
        assert (first.running, first.waiting, first.decodes, first.chunk_tokens) == (1, 2, 3, 4)
        assert (first.admitted, first.preempted) == (5, 6)
        assert first.pages == pb.Pages(free=7, cached=8, used=9)
        assert first.time < message.load.time - 1.9
        early = await anext(aiter(await watch(client, interval=1)))
        assert not early.steps and not early.steps_left_out


@in_loop
async def test_so_many_may_watch_at_once():
    async with serving(ScriptedEngine()) as (_, client):
        calls = [await watch(client) for _ in range(MAX_WATCHERS)]
        for call in calls:
            await anext(aiter(call))
        error = await refused(anext(aiter(await watch(client))))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "8 callers watch" in error.details()
        calls[0].cancel()
        async with asyncio.timeout(PATIENCE_S):  # the server hears of it when it does
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await anext(aiter(await watch(client)))
                    break


@in_loop
async def test_what_is_watched_is_bounded():
    async with serving(ScriptedEngine()) as (_, client):
        for field, bad, limit in (
            ("interval", 0.09, "at least 0.1"),
            ("interval", 60.1, "at most 60"),
            ("interval", float("nan"), "at least 0.1"),
            ("map_cells", -1, "from 0 to 4096"),
            ("map_cells", 4097, "from 0 to 4096"),
        ):
            error = await refused(anext(aiter(await watch(client, **{field: bad}))))
            assert error.code() is Code.INVALID_ARGUMENT
            assert list(violations(error)) == [field] and limit in violations(error)[field]


@in_loop
async def test_a_watcher_does_not_hold_up_the_end():
    async with serving(ScriptedEngine()) as (server, client):
        call = await watch(client, interval=60)
        await anext(aiter(call))
        server.shut_down()
        async with asyncio.timeout(30):
            error = await refused(anext(aiter(call)))
        assert error.code() is Code.UNAVAILABLE and "stopped" in error.details()


@in_loop
async def test_load_answers_when_the_engine_has_failed():
    engine = ScriptedEngine(forever, LONG)
    async with serving(engine) as (_, client):
        engine.gate.clear()
        call = asyncio.create_task(client.generate("x"))
        await until(lambda: engine.has_work)
        engine.fail_with = MemoryError("the device is gone")
        engine.gate.set()
        await refused(call)
        assert (await client.control.Load(pb.LoadRequest())).counters.received == 1


# -- ending a call ---------------------------------------------------------------------------------


@in_loop
async def test_abort_ends_a_call_and_all_its_samples():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (_, client):
        stream = client.stream("x", n=3)
        request_id = (await anext(aiter(stream))).request_id
        unary = asyncio.create_task(client.generate("y"))
        await until(lambda: engine.counters.received == 4)
        await client.control.Abort(pb.AbortRequest(request_id=request_id))

        async def rest():
            async for _ in stream:
                pass

        error = await refused(rest())
        assert error.code() is Code.ABORTED and "aborted on the server" in error.details()
        await until(lambda: len(engine.running) == 1 and not engine.waiting)
        assert engine.ended == dict.fromkeys(("r1", "r1.1", "r1.2"), FinishReason.CANCELLED)
        await client.control.Abort(pb.AbortRequest(request_id="r2"))
        assert (await refused(unary)).code() is Code.ABORTED
        await until(lambda: not engine.has_work)


@in_loop
async def test_a_flush_lets_nothing_be_found_of_before():
    engine = ScriptedEngine(echo)
    engine.cached = lambda request: 2
    async with serving(engine) as (_, client):
        assert (await client.generate("abc")).usage.cached_tokens == 2
        await client.control.FlushPrefixCache(pb.FlushPrefixCacheRequest())
        assert (await client.generate("abc")).usage.cached_tokens == 0


@in_loop
async def test_asked_to_drain_the_server_lets_what_runs_finish_and_ends():
    engine = ScriptedEngine(forever, LONG)
    server = Server(ServerConfig(port=0), lambda: opened(engine))
    running = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    async with AsyncClient(f"127.0.0.1:{server.port}", retries=0) as client:
        await client.wait_ready(PATIENCE_S)
        engine.gate.clear()
        runs = asyncio.create_task(client.generate("x", max_new_tokens=50))
        await until(lambda: engine.waiting or engine.running)
        engine.gate.set()
        await until(lambda: engine.counters.generated_tokens)
        engine.gate.clear()
        for _ in range(2):  # once more changes nothing
            await client.control.Drain(pb.DrainRequest())
        assert not await client.is_serving(PATIENCE_S)
        assert (await refused(client.generate("y"))).code() is Code.UNAVAILABLE
        engine.gate.set()
        assert len((await runs).token_ids) == 50
        assert await running


@in_loop
async def test_abort_of_an_unknown_or_unnamed_call():
    async with serving(ScriptedEngine(echo)) as (_, client):
        ended = await client.generate("x")
        for name in (ended.request_id, "nobody's"):
            error = await refused(client.control.Abort(pb.AbortRequest(request_id=name)))
            assert error.code() is Code.NOT_FOUND and name in error.details()
        error = await refused(client.control.Abort(pb.AbortRequest()))
        assert error.code() is Code.INVALID_ARGUMENT and "request_id" in violations(error)


@in_loop
async def test_undecodable_bytes_and_unknown_fields_are_invalid_arguments():
    async with serving(ScriptedEngine()) as (_, client):
        for method in ("ServerInfo", "Load", "WatchLoad", "Abort", "FlushPrefixCache", "Drain"):
            name = f"/{control.SERVICE_NAME}/{method}"
            for data in (b"\xff\xff\xff", b"\x98\x06\x01"):
                if method == "WatchLoad":
                    call = anext(aiter(client.channel.unary_stream(name)(data)))
                else:
                    call = client.channel.unary_unary(name)(data)
                error = await refused(call)
                assert error.code() is Code.INVALID_ARGUMENT, (method, data, error)


# -- the parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "cells", "expected"),
    [
        ([1, 0, 2], 3, [1, 0, 2]),
        ([1, 0, 2], 256, [1, 0, 2]),
        ([1, 1, 0, 0, 2, 2, 2], 2, [1, 2]),  # four pages a cell: a tie is used
        ([0, 0, 0, 2], 1, [0]),
        ([0, 2, 2, 0], 1, [2]),
        ([1] + [0] * 99, 10, [0] * 10),
        ([1], 4, [1]),
    ],
)
def test_a_page_map_shows_what_most_pages_of_a_cell_are(states, cells, expected):
    assert [*page_map(bytes(states), cells)] == expected


def test_a_page_map_has_at_most_its_cells_and_covers_all_pages():
    for pages in range(1, 70):
        for cells in range(1, 20):
            shown = page_map(bytes([1] * pages), cells)
            assert 0 < len(shown) <= cells and set(shown) == {1}


def test_steps_after():
    records = [record(step, 0.0) for step in range(3, 8)]
    assert [r.step for r in steps_after(records, 5)] == [6, 7]
    assert [r.step for r in steps_after(records, -1)] == [3, 4, 5, 6, 7]
    assert steps_after(records, 7) == [] and steps_after([], 0) == []
