"""`bench pages`: how many requests run at once in the same memory, paged or reserved whole.

The real scheduler runs every request of a load to its end, over a device that computes nothing.
Reserved whole, a request starts when all it may ever need is free:

    max_model_len  as much as any request may have
    power of two   its own length, rounded up to a power of two
    own length     its prompt and all its output, which nobody knows beforehand: the best there is

Of a model whose layers see windows, these keep no more than that, as a server divides the pool; the
same pool paged with every layer keeping everything is `no windows`.
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

Groups = tuple[tuple[int, int | None], ...]  # pages and window of each KV group


@dataclass(frozen=True, slots=True)
class Memory:
    """A KV pool: its tokens, if all layers keep all, how it is paged, and the longest sequence.
    `num_slots` is for all. `groups` are (pages, window) where layers see windows, as the same bytes
    are divided then; the null page is among the pages."""

    tokens: int
    page_size: int
    max_model_len: int
    num_slots: int
    chunk_tokens: int
    groups: Groups = ()


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
    alike = ((paged + 1, None),)
    ways: list[tuple[str, Feed, Groups]] = [
        ("paged", Waves(items, len(items)), memory.groups or alike)
    ]
    if memory.groups:
        ways.append(("no windows", Waves(items, len(items)), alike))
    for name, reserve in reserves.items():
        # The feed does the admission: pages are no limit to the scheduler below it.
        ample = paged + memory.num_slots * (1 + memory.max_model_len // memory.page_size)
        ways.append((name, Reserving(items, memory.tokens, reserve), ((ample + 1, None),)))
    entries = [_run(name, feed, groups, memory, progress) for name, feed, groups in ways]
    for entry in entries:
        entry["paged_to_this"] = entries[0]["mean_at_once"] / entry["mean_at_once"]
        entry["steps_to_paged"] = entry["steps"] / entries[0]["steps"]
    return entries


def _length(item: WorkItem) -> int:
    return len(item.prompt) + item.output_len


def _run(
    name: str, feed: Feed, groups: Groups, memory: Memory, progress: Progress | None
) -> dict[str, Any]:
    sizes = memory.num_slots, memory.chunk_tokens, memory.page_size
    pages, windows = zip(*groups)
    limits = SchedulerLimits(*sizes, pages, windows)
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
