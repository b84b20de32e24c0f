"""Drives an engine offline and times what comes out of every step.

Definitions, the same for every engine that is compared (docs/benchmarking.md):

- A *full decode step* gives each of `concurrency` requests a token that is not its first: no prompt
  is being computed and no stream is missing. Decode tok/s is the tokens of such steps over the time
  between their results and the results before.
- Prefill tok/s is the prompt tokens of the first wave, the requests that get a slot at once, over
  the time until each of them has its first token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxinfer.bench.feeds import Feed, Waves
from jaxinfer.bench.workload import WorkItem
from jaxinfer.engine import Engine
from jaxinfer.request import (
    Command,
    FinishReason,
    SamplingParams,
    SequenceEvent,
    Submit,
)
from jaxinfer.validation import EngineLimits, build_request

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Steppable(Protocol):
    """What is driven: an `Engine`, or one that is being watched."""

    @property
    def limits(self) -> EngineLimits: ...
    @property
    def has_work(self) -> bool: ...
    def execute(self, command: Command, now: float) -> None: ...
    def step(self, now: float) -> list[SequenceEvent]: ...


@dataclass(slots=True)
class Watched:
    """An engine of which subclasses look at each step."""

    engine: Engine

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def execute(self, command: Command, now: float) -> None:
        self.engine.execute(command, now)


@dataclass(frozen=True, slots=True)
class StepMark:
    """The tokens one step's results brought, and when they were there (seconds from the start)."""

    time: float
    tokens: int
    firsts: int  # how many of them are the first of their request


@dataclass(slots=True)
class Timeline:
    """What a run of items did, by their numbers. Times are seconds from the start."""

    items: list[WorkItem]
    concurrency: int
    marks: list[StepMark] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    first_token: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return max(self.ended.values())

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(mark.tokens for mark in self.marks)

    @property
    def streams(self) -> int:
        """How many requests run at once at most."""
        return min(self.concurrency, len(self.items))

    @property
    def tpots(self) -> list[float]:
        """Seconds a token after the first, of every request with two tokens or more."""
        return [
            (self.ended[i] - self.first_token[i]) / (item.output_len - 1)
            for i, item in enumerate(self.items)
            if item.output_len > 1
        ]

    def ttfts(self, since_start: bool = False) -> list[float]:
        """Seconds from sending (or from the start) to the first token, by request."""
        return [
            self.first_token[i] - (0.0 if since_start else sent) for i, sent in enumerate(self.sent)
        ]

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second until the first wave has its first tokens."""
        wave = range(self.streams)
        tokens = sum(len(self.items[i].prompt) for i in wave)
        return tokens / max(self.first_token[i] for i in wave)


def full_decode_steps(marks: Sequence[StepMark], streams: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of every full decode step."""
    return [
        (mark.tokens, mark.time - before.time)
        for before, mark in itertools.pairwise(marks)
        if mark.tokens >= streams and mark.firsts == 0
    ]


def decode_rate(marks: Sequence[StepMark], streams: int) -> float | None:
    """Tokens a second with all streams decoding; None if that never happened."""
    steps = full_decode_steps(marks, streams)
    return sum(t for t, _ in steps) / sum(s for _, s in steps) if steps else None


def drive(
    engine: Steppable,
    items: Sequence[WorkItem],
    concurrency: int,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timeline:
    """`drive_feed` with every item sent at once."""
    return drive_feed(engine, Waves(items, len(items)), concurrency, progress, clock)


def drive_feed(
    engine: Steppable,
    feed: Feed,
    concurrency: int,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timeline:
    """Send what the feed gives and step until all of it has ended.

    Requests are greedy and run to their full length. `concurrency` is how many run at once: the
    engine's slots, unless there are fewer items. Raises RuntimeError if a request ends otherwise
    than by its length.
    """
    timeline = Timeline([], concurrency)
    start = clock()
    _send(engine, feed.due(()), timeline, start, clock)
    while engine.has_work:
        events = engine.step(clock())
        ended = _enter(timeline, events, clock() - start)
        if ended:
            outputs = [(number, timeline.outputs[number]) for number in ended]
            _send(engine, feed.due(outputs), timeline, start, clock)
            if progress:
                progress("requests", len(timeline.ended), feed.total)
    return timeline


def _send(
    engine: Steppable,
    items: Sequence[WorkItem],
    timeline: Timeline,
    start: float,
    clock: Callable[[], float],
) -> None:
    for item in items:
        number, now = len(timeline.items), clock()
        timeline.items.append(item)
        timeline.outputs.append([])
        timeline.sent.append(now - start)
        params = SamplingParams(
            temperature=0, max_new_tokens=item.output_len, ignore_eos=True, seed=0
        )
        request = build_request(item.prompt, params, engine.limits, (), str(number), now)
        engine.execute(Submit(request), now)


def _enter(timeline: Timeline, events: list[SequenceEvent], now: float) -> list[int]:
    """Enter what a step brought; returns the numbers of the requests that ended."""
    tokens = firsts = 0
    ended = []
    for event in events:
        number = int(event.request_id)
        if event.tokens and number not in timeline.first_token:
            timeline.first_token[number] = now
            firsts += 1
        tokens += len(event.tokens)
        timeline.outputs[number] += event.tokens
        if event.finish is FinishReason.LENGTH:
            timeline.ended[number] = now
            ended.append(number)
        elif event.finish is not None:
            raise RuntimeError(f"request {number} ended by {event.finish.value}: {event.error}")
    if tokens:
        timeline.marks.append(StepMark(now, tokens, firsts))
    return ended
