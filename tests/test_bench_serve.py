"""The load generator over scripted servers: figures by hand, arrivals, concurrency, failures."""

from __future__ import annotations

import asyncio
import math

import pytest

from jaxinfer.bench.serve import (
    Record,
    details,
    is_good,
    parse_goodput,
    run,
    serve_metrics,
)
from jaxinfer.bench.workload import WorkItem

# Sent at 0: tokens at 0.1, 0.2 (two at once) and 0.4. Sent at 0.3: one token at 0.8.
FOUR_TOKENS = Record(10, sent=0.0, messages=[(0.1, 1), (0.2, 2), (0.4, 1)])
ONE_TOKEN = Record(20, sent=0.3, messages=[(0.8, 1)])
FAILED = Record(30, sent=0.0, error="UNAVAILABLE")


def test_times_of_a_request():
    assert FOUR_TOKENS.ttft == pytest.approx(0.1)
    assert FOUR_TOKENS.e2el == pytest.approx(0.4)
    assert FOUR_TOKENS.tpot == pytest.approx(0.3 / 3)
    assert FOUR_TOKENS.itls == pytest.approx([0.1, 0.2])
    assert ONE_TOKEN.tpot is None
    assert ONE_TOKEN.itls == []


def test_metrics_by_hand():
    metrics = serve_metrics([FOUR_TOKENS, ONE_TOKEN, FAILED], 2.0, {"ttft": 400})
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "request_goodput": 0.5,  # the second one's first token took 500 ms
        "output_throughput": 2.5,
        "total_token_throughput": 17.5,
        "max_output_tokens_per_s": 5,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 300.0,
        "median_ttft_ms": 300.0,
        "std_ttft_ms": 200.0,
        "p90_ttft_ms": 460.0,
        "p99_ttft_ms": 496.0,
        "mean_tpot_ms": 100.0,
        "mean_itl_ms": 150.0,
        "p99_itl_ms": 199.0,
        "mean_e2el_ms": 450.0,
        "median_e2el_ms": 450.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_limits_there_is_no_goodput():
    assert serve_metrics([ONE_TOKEN], 1.0, {})["request_goodput"] is None


def test_details_keep_the_order_of_arrival():
    lists = details([FAILED, ONE_TOKEN])
    assert lists["errors"] == ["UNAVAILABLE", ""]
    assert lists["input_lens"] == [30, 20]
    assert lists["output_lens"] == [0, 1]
    assert lists["ttfts"] == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    "limits, good",
    [({"ttft": 101}, True), ({"ttft": 99}, False), ({"tpot": 101}, True), ({"tpot": 99}, False),
     ({"e2el": 401}, True), ({"e2el": 399}, False), ({"ttft": 101, "e2el": 399}, False)],
)  # fmt: skip
def test_a_good_request_keeps_every_limit(limits, good):
    assert is_good(FOUR_TOKENS, limits) is good


def test_goodput_limits_are_read_or_refused():
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    for bad in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "ttft:x"):
        with pytest.raises(ValueError, match="METRIC:MILLISECONDS"):
            parse_goodput([bad])


class ScriptedServer:
    """Answers after `delay` seconds, and remembers how many requests it had at once."""

    def __init__(self, delay: float = 0.01):
        self.delay, self.running, self.most, self.seen = delay, 0, 0, []

    async def stream(self, item: WorkItem):
        self.seen.append((asyncio.get_running_loop().time(), item.prompt[0]))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if item.prompt[0] == 13:
                raise ConnectionError("gone")
            if item.prompt[0] == 14:
                return
            for _ in range(item.output_len):
                await asyncio.sleep(self.delay)
                yield 1
                yield 0  # a message without tokens is no token
        finally:
            self.running -= 1


def items(*prompts: int, output_len: int = 2) -> list[WorkItem]:
    return [WorkItem((prompt,), output_len) for prompt in prompts]


def test_every_request_is_recorded_in_order_and_progress_counts_up():
    reports = []
    records, duration = asyncio.run(
        run(ScriptedServer(), items(1, 2, 3), [0.0] * 3, progress=lambda *r: reports.append(r))
    )
    assert [r.output_tokens for r in records] == [2, 2, 2]
    assert all(r.ok and len(r.messages) == 2 for r in records)
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert duration >= max(r.e2el for r in records)


def test_requests_are_sent_at_their_arrival_times():
    server = ScriptedServer(0.001)

    async def timed() -> float:
        begun = asyncio.get_running_loop().time()
        await run(server, items(1, 2, 3), [0.1, 0.0, 0.05])
        return begun

    begun = asyncio.run(timed())
    assert [prompt for _, prompt in server.seen] == [2, 3, 1]
    # Never early; how late depends on the machine alone.
    for (moment, _), due in zip(server.seen, (0.0, 0.05, 0.1)):
        assert moment - begun >= due - 0.005


@pytest.mark.parametrize("limit, most", [(1, 1), (3, 3), (None, 8)])
def test_concurrency_is_bounded(limit, most):
    server = ScriptedServer()
    records, _ = asyncio.run(run(server, items(*range(8)), [0.0] * 8, max_concurrency=limit))
    assert server.most == most
    assert all(record.ok for record in records)
    # Waiting for a place is not part of a request's time: two tokens, 10 ms each.
    assert serve_metrics(records, 1.0, {})["max_concurrent_requests"] <= most


def test_a_failing_request_is_counted_and_the_others_go_on():
    records, duration = asyncio.run(run(ScriptedServer(), items(1, 13, 14), [0.0] * 3))
    metrics = serve_metrics(records, duration, {})
    assert (metrics["completed"], metrics["failed"]) == (1, 2)
    assert details(records)["errors"] == ["", "ConnectionError: gone", "the server sent no tokens"]
    assert not math.isnan(metrics["mean_ttft_ms"])
