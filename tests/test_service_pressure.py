"""A server under pressure, with the real scheduler over a device that computes by hand."""

from __future__ import annotations

import asyncio
import collections
import time

import grpc
import psutil
from fakes import POISON, FakeRunner, expected, scheduler_limits
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from jaxinfer_service.client import violations
from serving import PATIENCE_S, in_loop, refused, serving, until

from jaxinfer.engine import Engine
from jaxinfer.scheduler import Scheduler
from jaxinfer.validation import EngineLimits

Code = grpc.StatusCode
MAX_LEN = 256


class SlowRunner(FakeRunner):
    """Every step takes `seconds`."""

    seconds = 0.0

    def dispatch(self, plan):
        time.sleep(self.seconds)
        return super().dispatch(plan)


class FakeEngine(Engine):
    """`gate`: as of the scripted engine, which `serving` opens when it leaves."""

    def __init__(
        self, slots: int = 4, pages: int = 33, queue: int = 100, step_seconds: float = 0.0
    ):
        limits = scheduler_limits(slots, 32, 4, (pages,))
        kv_tokens = (pages - 1) * 4
        super().__init__(
            Scheduler(limits),
            SlowRunner(limits, MAX_LEN),
            EngineLimits(POISON + 1, MAX_LEN, slots, kv_tokens, queue, 100_000),
        )
        self.runner.seconds = step_seconds
        self.gate = asyncio.Event()


def balanced(counters, engine) -> bool:
    load = engine.load()
    ended = counters.finished + counters.aborted + counters.refused
    return counters.received == ended + load.running + load.waiting


def answer(prompt: list[int], tokens: int) -> list[int]:
    from fakes import GREEDY

    from jaxinfer.request import Request

    return expected(Request("x", tuple(prompt), GREEDY, tokens, 0))[0]


@in_loop
async def test_a_prompt_larger_than_the_pool_is_refused_and_holds_nobody_up():
    """128 tokens of pool, 256 of max_model_len."""
    async with serving(FakeEngine()) as (_, client):
        large = asyncio.create_task(refused(client.generate([1] * 200, max_new_tokens=5)))
        small = [client.generate([i], max_new_tokens=3, temperature=0) for i in range(8)]
        answers = await asyncio.wait_for(asyncio.gather(*small), PATIENCE_S)
        assert [list(a.token_ids) for a in answers] == [answer([i], 3) for i in range(8)]
        error = await large
        assert error.code() is Code.INVALID_ARGUMENT
        (text,) = violations(error).values()
        assert "200 tokens" in text and "128 tokens" in text and "--kv-cache-memory" in text


@in_loop
async def test_ten_thousand_requests_at_once_and_a_queue_of_a_hundred():
    """The rest is refused with RetryInfo, memory stays flat, accepted ones finish."""
    engine, process = FakeEngine(queue=100, step_seconds=0.2), psutil.Process()
    async with serving(engine) as (server, client):
        await client.generate([1], max_new_tokens=1)
        before, outcomes = process.memory_info().rss, collections.Counter()
        retry = error_details_pb2.RetryInfo()

        async def one(i: int) -> None:
            try:
                got = await client.generate([i % 50, 2], max_new_tokens=4, temperature=0)
                assert list(got.token_ids) == answer([i % 50, 2], 4)
                outcomes["finished"] += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.RESOURCE_EXHAUSTED, error
                assert rpc_status.from_call(error).details[0].Unpack(retry)
                assert retry.retry_delay.seconds >= 1
                outcomes["refused"] += 1
                if outcomes["refused"] > 5000:  # however slowly they come
                    engine.runner.seconds = 0.0

        await asyncio.gather(*(one(i) for i in range(10_000)))
        counters = server._service.served.frontend.counters
        assert outcomes.total() == 10_000 and outcomes["finished"] >= 100
        assert outcomes["refused"] > 5000
        assert counters.finished == outcomes["finished"] + 1
        assert counters.refused == outcomes["refused"] and balanced(counters, engine)
        assert process.memory_info().rss - before < 300 << 20
        assert engine.load().pages[2] == 0


@in_loop
async def test_all_slots_held_by_low_ones_and_an_urgent_one_comes():
    engine = FakeEngine(slots=2, step_seconds=0.03)  # or they end before anybody looks
    async with serving(engine) as (server, client):
        low = [
            asyncio.create_task(
                client.generate([i, 1], max_new_tokens=60, temperature=0, priority=5)
            )
            for i in range(3)
        ]
        await until(lambda: engine.load().running == 2)
        urgent = await client.generate([9, 9], max_new_tokens=3, temperature=0, priority=-1)
        assert list(urgent.token_ids) == answer([9, 9], 3)
        for i, task in enumerate(low):
            assert list((await task).token_ids) == answer([i, 1], 60), "unchanged by preemption"
        assert balanced(server._service.served.frontend.counters, engine)


@in_loop
async def test_aborted_expired_late_refused_and_finished_ones_balance():
    engine = FakeEngine(slots=1)
    async with serving(engine) as (server, client):
        counters = lambda: server._service.served.frontend.counters  # noqa: E731
        await client.generate([1], max_new_tokens=5)  # finished
        await refused(client.generate([POISON + 7]))  # refused
        await refused(client.generate([POISON], max_new_tokens=5))  # the model's logits fail
        engine.runner.seconds = 0.1  # who leaves does so before it ends
        call = client.stream([2], max_new_tokens=100)
        await anext(aiter(call))
        call.cancel()  # aborted
        await until(lambda: counters().aborted == 2)
        streams = [client.stream([3, i], max_new_tokens=100, n=2) for i in range(2)]
        readers = [aiter(stream) for stream in streams]
        await anext(readers[0])
        streams[0].cancel()
        await until(lambda: counters().aborted == 4)
        engine.runner.seconds = 0.0
        async for _ in readers[1]:
            pass
        await until(lambda: not engine.has_work)
        total = counters()
        assert (total.received, total.refused) == (8, 1)
        assert (total.finished, total.aborted) == (3, 4)
        assert balanced(total, engine) and total.prompt_tokens == 1 + 1 + 1 + 4 * 2
        assert engine.load().pages[2] == 0
        engine.scheduler.check_invariants()


@in_loop
async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    engine = FakeEngine(slots=1)
    async with serving(engine) as (server, client):
        pace = engine.scheduler.pace
        pace.observe(0, 32, 0, 64.0)  # as if a prompt token took two seconds
        error = await refused(client.generate([1] * 20, max_new_tokens=2, timeout=10))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert "expected in" in error.details() and "past the deadline" in error.details()
        assert server._service.served.frontend.counters.refused == 1
