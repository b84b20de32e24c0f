"""`bench pages`: how many requests run at once in the same memory, paged or reserved whole.

The real scheduler runs every request of a load to its end, over a device that computes nothing.
Reserved whole, a request starts when all it may ever need is free:

    max_model_len  as much as any request may have
    power of two   its own length, rounded up to a power of two
    own length     its prompt and all its output, which nobody knows beforehand: the best there is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.drive import Progress, Watched, drive_feed
from jaxinfer.bench.feeds import Feed, Reserving, Waves
from jaxinfer.bench.no_device import engine_without_device
from jaxinfer.bench.workload import WorkItem
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.request import SequenceEvent


@dataclass(frozen=True, slots=True)
class Memory:
    """A KV pool: its tokens, how it is paged, and the longest sequence. `num_slots` is for all."""

    tokens: int
    page_size: int
    max_model_len: int
    num_slots: int
    chunk_tokens: int


def compare_reservations(
    memory: Memory, items: Sequence[WorkItem], progress: Progress | None = None
) -> list[dict[str, Any]]:
    """One entry a way, paged first: requests that ran at once, and steps until all had ended."""
    reserves: dict[str, Callable[[WorkItem], int]] = {
        "max_model_len": lambda item: memory.max_model_len,
        "power of two": lambda item: 1 << (_length(item) - 1).bit_length(),
        "own length": _length,
    }
    paged = memory.tokens // memory.page_size
    ways: list[tuple[str, Feed, int]] = [("paged", Waves(items, len(items)), paged)]
    for name, reserve in reserves.items():
        # The feed does the admission: pages are no limit to the scheduler below it.
        ample = paged + memory.num_slots * (1 + memory.max_model_len // memory.page_size)
        ways.append((name, Reserving(items, memory.tokens, reserve), ample))
    entries = [_run(name, feed, pages, memory, progress) for name, feed, pages in ways]
    for entry in entries:
        entry["paged_to_this"] = entries[0]["mean_at_once"] / entry["mean_at_once"]
        entry["steps_to_paged"] = entry["steps"] / entries[0]["steps"]
    return entries


def _length(item: WorkItem) -> int:
    return len(item.prompt) + item.output_len


def _run(
    name: str, feed: Feed, pages: int, memory: Memory, progress: Progress | None
) -> dict[str, Any]:
    limits = SchedulerLimits(memory.num_slots, memory.chunk_tokens, memory.page_size, (pages + 1,))
    engine = engine_without_device(
        limits, SchedulerPolicy(prefix_cache=False), memory.max_model_len
    )
    census = _Census(engine, feed.total)
    drive_feed(census, feed, memory.num_slots, progress)
    return {
        "way": name,
        "mean_at_once": sum(census.running) / len(census.running),
        "most_at_once": max(census.running),
        "steps": census.steps,
        "preemptions": engine.counters.preemptions,
    }


@dataclass(slots=True)
class _Census(Watched):
    """An engine seen by `drive_feed`, counting who runs as long as others have yet to begin."""

    total: int
    begun: int = 0
    steps: int = 0
    running: list[int] = field(default_factory=list)

    def step(self, now: float) -> list[SequenceEvent]:
        events = self.engine.step(now)
        self.steps += 1
        if self.begun < self.total:
            self.running.append(len(self.engine.scheduler.running))
        self.begun += sum(event.first_scheduled is not None for event in events)
        return events
