"""What an engine is doing, as plain data: one record a step, and a summary for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.request import Counters
from jaxinfer.sequence import Sequence as EngineSequence

KEPT_RECORDS = 4096  # steps whose records are kept
KEPT_LATENCIES = 1024  # requests whose latencies the percentiles are taken over
PERCENTILES = (50, 90, 99)


class StepRecord(NamedTuple):
    """What the scheduler decided for one step. Pages are of all KV groups together."""

    step: int
    time: float  # the engine's clock
    running: int  # sequences with a slot
    waiting: int
    decodes: int  # rows that decode
    chunk_tokens: int  # prompt tokens computed
    admitted: int
    preempted: int
    free_pages: int
    cached_pages: int  # nobody's now, kept for requests that begin alike
    used_pages: int


class SlotRow(NamedTuple):
    """What a slot's sequence has done so far, in tokens."""

    slot: int
    request_id: str
    prompt: int
    cached: int  # of the prompt, by the prefix cache
    computed: int  # positions whose keys and values are in its pages, or on their way
    outputs: int
    most: int  # prompt and outputs in the end, at most

    @classmethod
    def of(cls, sequence: EngineSequence) -> SlotRow:
        return cls(
            sequence.slot,
            sequence.request.id,
            sequence.prompt_len,
            sequence.cached_tokens,
            sequence.num_computed_tokens,
            sequence.num_outputs,
            sequence.most_tokens,
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency in seconds, over the last requests; None where there is none yet."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Nearest-rank percentiles."""
        if not values:
            return cls()
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(*(ordered[min(last, len(ordered) * p // 100)] for p in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's load at one moment.

    Attributes:
        slots / running / waiting: sequences that can run at once, that do, and that wait. More
            can run than there are slots while the last tokens of some are on their way.
        waiting_tokens: prompt tokens of the waiting ones.
        deferred / preempted / held: of the waiting ones, those whose grammar is being read, those
            that ran before, and those that were set aside because their readers are slow.
        pages: (free, cached, used) of all KV groups; page_size: tokens of one.
        counters: of the same moment.
        ttft / tpot: seconds to the first token from arrival, and between tokens after it.
    """

    slots: int
    running: int
    waiting: int
    waiting_tokens: int
    pages: tuple[int, int, int]
    page_size: int
    counters: Counters
    deferred: int = 0
    preempted: int = 0
    held: int = 0
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
