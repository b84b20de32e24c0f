"""`bench front`, `bench soak`, `bench beside`: over a scripted engine, with real clients."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from fake_engine import ScriptedEngine, forever, limits
from jaxinfer_service.bench import beside, front, mock_server, soak
from jaxinfer_service.bench.clients import prompts
from jaxinfer_service.bench.doors import HttpDoor, door
from jaxinfer_service.bench.own_server import Meter, own_server, thread_seconds
from jaxinfer_service.cli import app as cli
from jaxinfer_service.server import ServerConfig
from serving import TOKENIZER, in_loop, serving, until, wait_until
from typer.testing import CliRunner

from jaxinfer.bench import serve
from jaxinfer.bench.no_device import engine_without_device
from jaxinfer.bench.setup import BenchEngine
from jaxinfer.bench.workload import WorkItem
from jaxinfer.config import EngineConfig
from jaxinfer.generation import SamplingDefaults
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy

ROOMY = limits(max_model_len=4096, kv_tokens=1 << 16, max_num_seqs=4, max_queued_requests=100)


def bench(engine: ScriptedEngine) -> BenchEngine:
    generation = SimpleNamespace(eos_ids=TOKENIZER.eos_ids, sampling=SamplingDefaults())
    model = SimpleNamespace(tokenizer=TOKENIZER, generation=generation)
    return BenchEngine(engine, model, EngineConfig())


def ignored(what: str, done: int, total: int) -> None:
    pass


@in_loop
async def test_every_way_is_measured_at_every_number_of_streams():
    engine = ScriptedEngine(forever, ROOMY, step_seconds=0.002)
    lengths = {"input_len": 5, "output_len": 20}
    cells = await front._measure(bench(engine), [1, 3], lengths, 2, 0, ignored)
    for n in (1, 3):
        for way, cell in cells[n].items():
            assert len(cell.tokens_per_second) == len(cell.process_us) == 2
            assert all(rate > 0 for rate in cell.tokens_per_second)
            assert min(cell.front_us) > 0 and max(cell.front_share) <= 1.01
            door_is = way != front.OFFLINE
            assert len(cell.tokens_per_message) == 2 * door_is
            assert all(tokens >= 1 for tokens in cell.tokens_per_message)
            assert len(cell.added_ttft_ms) == 2 * n * door_is
            assert all(0 < added < 60_000 for added in cell.added_ttft_ms)
    # A round to warm up and two, three ways: all of it reached the one engine and ended.
    assert engine.counters.finished == engine.counters.received == 3 * 3 * (1 + 3)
    assert engine.counters.generated_tokens == 20 * 36
    front._publish(cells, None)


@in_loop
async def test_requests_begin_together_however_they_come():
    engine, begun = ScriptedEngine(forever, limits(max_num_seqs=3)), []
    lengths = {"input_len": 5, "output_len": 4}

    def noted(command, now, execute=engine.execute):
        begun.append(len(engine.records))  # steps so far
        execute(command, now)

    engine.execute = noted
    await front._measure(bench(engine), [3], lengths, 1, 0, ignored)
    assert len(begun) == 18
    assert all(len({*begun[i : i + 3]}) == 1 for i in range(0, 18, 3)), begun


@in_loop
async def test_a_soak_tells_of_every_request_and_what_is_left():
    engine = ScriptedEngine(forever, ROOMY, step_seconds=0.001)
    result = await soak._soak(bench(engine), 2.0, 4, 0, ignored)
    assert result["failed"] == {} and result["balanced"] and result["pages_used"] == 0
    assert result["received"] == result["finished"] + result["aborted"] + result["refused"]
    assert {"reads_all", "leaves"} <= result["requests"].keys()
    assert result["refused"] == result["requests"].get("asks_badly", 0)
    assert sum(result["requests"].values()) == result["received"]
    assert len(result["memory"]) > 3


def test_the_slope_of_memory_is_a_minutes():
    assert soak._slope([(0.0, 100.0), (30.0, 101.0), (60.0, 102.0)]) == pytest.approx(2.0)
    assert soak._slope([(0.0, 100.0)]) == 0.0


@in_loop
async def test_some_requests_are_held_to_a_schema_by_either_door():
    asked = []

    def script(request):
        asked.append(request)
        return forever(request)

    engine = ScriptedEngine(script, ROOMY, step_seconds=0.02)  # or all tokens come at once
    job = {"plain": 2, "formed": 1, "input_len": 3, "output_len": 20, "vocab_size": 200, "seed": 1}
    async with own_server(bench(engine)) as own:
        for server in own.targets.values():
            found = await own.load(kind="load", servers=[server], schema=beside.SCHEMA, **job)
            assert [record["tokens"] for record in found["records"]] == [20, 20, 20]
            assert beside._speed(found["records"][0]) > 0
    formed = [request.prompt for request in asked if request.params.structured is not None]
    assert formed == [prompts(job)[2].prompt] * 2 and len(asked) == 6


@in_loop
async def test_who_interrupts_it_does_not_wait_for_what_the_clients_do():
    engine = ScriptedEngine(forever, ROOMY, step_seconds=0.01)
    job = {"plain": 1, "formed": 0, "input_len": 3, "output_len": 4000, "vocab_size": 200}

    async def loaded() -> None:
        async with own_server(bench(engine)) as own:
            await own.load(kind="load", servers=[own.targets["http"]], schema=None, seed=0, **job)

    task = asyncio.create_task(loaded())
    await until(lambda: engine.counters.generated_tokens > 3)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 20  # of the 40 that the request would take
    assert engine.counters.aborted == 1


def test_a_request_that_failed_has_no_speed():
    with pytest.raises(RuntimeError, match="no room"):
        beside._speed({"error": "no room"})


def test_a_stream_of_one_message_has_no_speed():
    with pytest.raises(RuntimeError, match="raise --output-len"):
        beside._speed({"tokens": 4, "decode": 0.0})


@in_loop
async def test_http_load_keeps_connections_and_says_what_was_refused():
    async with serving(ScriptedEngine(forever, ROOMY), http_port=0) as (server, _):
        way = door(f"http://127.0.0.1:{server.http_port}")
        assert isinstance(way, HttpDoor)
        await way.wait_ready(30)
        for _ in range(2):
            assert sum([n async for n in way.stream(WorkItem((40, 41), 7))]) == 7
            assert len(way._idle) == 1
        way._idle[0].reader.feed_eof()  # as of a server that waited long enough
        assert sum([n async for n in way.stream(WorkItem((40,), 3))]) == 3
        way._idle[0].writer.transport.abort()  # closed, which is not known yet
        assert sum([n async for n in way.stream(WorkItem((40,), 3))]) == 3
        with pytest.raises(ConnectionError, match=r"HTTP 400: .*max_model_len"):
            async for _ in way.stream(WorkItem((40,), 10_000)):
                pass
        await way.close()


@in_loop
async def test_a_mock_servers_steps_take_their_time_whatever_is_in_them():
    engine = engine_without_device(SchedulerLimits(4, 64, 16, (64,)), SchedulerPolicy(), 64)
    server = mock_server.paced(bench(engine), 0.02, ServerConfig(port=0, http_port=0))
    running = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    way = door(f"127.0.0.1:{server.port}")
    await way.wait_ready(30)
    items = [WorkItem(tuple(range(1, n)), 10) for n in (2, 30, 50)]
    records, _ = await serve.run(way, items, [0.0] * 3)
    await way.close()
    server.shut_down()
    await running
    assert [record.output_tokens for record in records] == [10] * 3
    # From the first one's step on: a token a step, and prompts of 82 tokens take one or two.
    assert all(record.e2el >= 0.2 for record in records)
    assert max(record.e2el for record in records) < 2


@in_loop
async def test_the_environments_key_is_sent_and_what_is_no_http_is_said(monkeypatch):
    heads, answers = [], [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"\x00\x01\r\n\r\n"]

    async def answer(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[min(len(heads), 2) - 1])
        writer.close()

    monkeypatch.setenv("JAXINFER_API_KEY", "secret")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        way = door(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await way.wait_ready(30)
        assert b"\r\nauthorization: bearer secret\r\n" in heads[0].lower()
        with pytest.raises(TimeoutError, match="does not speak HTTP"):
            await way.wait_ready(0.5)
        await way.close()


@pytest.mark.parametrize("address", ["http://localhost:1", "https://localhost:1", "grpc://a:1"])
def test_what_is_no_address_is_refused_by_every_command(address):
    for command in (["top", "--once"], ["chat"], ["inspect", "--expert-load"]):
        result = CliRunner().invoke(cli, [*command, "--server", address])
        assert result.exit_code == 2 and "is no address of gRPC" in " ".join(result.output.split())


@in_loop
async def test_a_server_that_is_not_there_is_waited_for_and_named():
    with pytest.raises(TimeoutError, match=r"http://127\.0\.0\.1:1 is not ready after 0\.3 s"):
        await door("http://127.0.0.1:1").wait_ready(0.3)


@pytest.mark.skipif(not thread_seconds(), reason="the system does not tell threads apart")
def test_the_front_is_what_came_after_the_engine():
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            pass

    engine = threading.Thread(target=busy)
    engine.start()
    meter = Meter({*thread_seconds()}, engine.native_id)
    time.sleep(0.3)
    of_engine = meter.spent()
    assert of_engine.front < of_engine.process / 2
    front_thread = threading.Thread(target=busy)
    front_thread.start()
    try:
        wait_until(lambda: meter.spent().front > of_engine.front + 0.05)
    finally:
        stop.set()
    both = meter.spent()
    assert both.process >= both.front and both.wall > 0.3


def test_numbers_of_streams_are_numbers():
    assert front._numbers("1,16, 64") == [1, 16, 64]
    for wrong in ("", "0", "a", "1,-2"):
        with pytest.raises(Exception, match="--streams"):
            front._numbers(wrong)
