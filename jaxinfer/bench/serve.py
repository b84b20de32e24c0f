"""Load on a running server: requests arrive by a rate, each is timed from its sending.

The transport is injected, so this module knows no protocol. Times are those a client sees:

    TTFT  sending to the first message with tokens
    ITL   between two messages with tokens
    TPOT  (last message - first message) / (output tokens - 1): only for two tokens or more
    E2EL  sending to the last message

A request is sent at its arrival time or, with `max_concurrency`, once one before it ended: waiting
for that is no part of its times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.bench.stats import summarise
from jaxinfer.bench.workload import WorkItem

Progress = Callable[[int, int], None]  # requests that ended, of how many
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Client(Protocol):
    """How a request reaches the server."""

    def stream(self, item: WorkItem) -> AsyncIterator[int]:
        """Send a request; yields how many tokens each message brings. Raises when it fails."""


@dataclass(slots=True)
class Record:
    """What became of one request. Times are `time.perf_counter` seconds."""

    prompt_tokens: int
    sent: float
    messages: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.messages)

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.messages)

    @property
    def ttft(self) -> float:
        return self.messages[0][0] - self.sent

    @property
    def e2el(self) -> float:
        return self.messages[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, None for a single token."""
        return (
            (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None
        )

    @property
    def itls(self) -> list[float]:
        return [b[0] - a[0] for a, b in zip(self.messages, self.messages[1:])]


async def run(
    client: Client,
    items: Sequence[WorkItem],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Record], float]:
    """Send every item at its arrival time; returns the records and the seconds all of it took."""
    gate: contextlib.AbstractAsyncContextManager[Any] = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    start, done = time.perf_counter(), 0

    async def one(item: WorkItem, arrival: float) -> Record:
        nonlocal done
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        async with gate:
            record = await send(client, item)
        done += 1
        if progress:
            progress(done, len(items))
        return record

    records = await asyncio.gather(*(one(i, a) for i, a in zip(items, arrivals, strict=True)))
    return list(records), time.perf_counter() - start


async def send(client: Client, item: WorkItem) -> Record:
    """One request, timed. A failure of the transport is recorded, not raised."""
    record = Record(len(item.prompt), time.perf_counter())
    try:
        async for tokens in client.stream(item):
            if tokens:
                record.messages.append((time.perf_counter(), tokens))
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
    if not record.messages and not record.error:
        record.error = "the server sent no tokens"
    return record


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """{"ttft": 500.0} from ["ttft:500"]: milliseconds a good request may take, or ValueError."""
    parsed = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            parsed[name] = float(value)
        except ValueError:
            parsed[name] = -1.0
        if name not in GOODPUT_METRICS or not parsed[name] > 0:
            known = ", ".join(GOODPUT_METRICS)
            raise ValueError(
                f"--goodput {limit!r}: write METRIC:MILLISECONDS, METRIC one of {known}"
            )
    return parsed


def is_good(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether a request stayed within every limit; a single token has no TPOT to break."""
    times = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
    return all(times[name] * 1e3 <= limit for name, limit in limits.items())


def serve_metrics(
    records: Sequence[Record], duration: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of a run, by the names load generators of this field use; latencies in ms."""
    ok = [record for record in records if record.ok]
    prompt, output = sum(r.prompt_tokens for r in ok), sum(r.output_tokens for r in ok)
    metrics: dict[str, Any] = {
        "duration": duration,
        "completed": len(ok),
        "failed": len(records) - len(ok),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(ok) / duration,
        "request_goodput": sum(is_good(r, goodput) for r in ok) / duration if goodput else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_output_tokens_per_s": _busiest_second(ok),
        "max_concurrent_requests": _most_at_once(ok),
    }
    latencies = {
        "ttft": [r.ttft for r in ok],
        "tpot": [r.tpot for r in ok if r.tpot is not None],
        "itl": [itl for r in ok for itl in r.itls],
        "e2el": [r.e2el for r in ok],
    }
    for name, seconds in latencies.items():
        for statistic, value in summarise([s * 1e3 for s in seconds]).items():
            metrics[f"{statistic}_{name}_ms"] = value
    return metrics


def details(records: Sequence[Record]) -> dict[str, Any]:
    """One entry a request, in order of arrival; times in seconds."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft if r.ok else 0.0 for r in records],
        "itls": [r.itls for r in records],
        "errors": [r.error for r in records],
    }


def _busiest_second(records: Sequence[Record]) -> int:
    """Most tokens received within one second of the run's clock."""
    seconds: Counter[int] = Counter()
    for record in records:
        for moment, tokens in record.messages:
            seconds[int(moment)] += tokens
    return max(seconds.values(), default=0)


def _most_at_once(records: Sequence[Record]) -> int:
    """Most requests between sending and end at one time."""
    changes = [(r.sent, 1) for r in records] + [(r.messages[-1][0], -1) for r in records]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
