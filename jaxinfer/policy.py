"""What the scheduler has and how it chooses: limits, knobs, and a guard against thrash."""

from __future__ import annotations

from dataclasses import dataclass

CALM_STEPS = 256  # steps without thrash after which half of the extra reserve is given back
LEAST_EXTRA, MOST_EXTRA = 0.05, 0.5  # fractions of the pool


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and the pool can hold."""

    num_slots: int
    chunk_tokens: int
    page_size: int
    num_pages: tuple[int, ...]  # by KV group, the null page included
    windows: tuple[int | None, ...] = ()  # by KV group, tokens its layers see; (): all see all


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """See `EngineConfig` for what its fields mean; times are in seconds.

    Attributes:
        host_pages: pages of host memory for preempted sequences, by KV group.
        separate_phases: determinism "fixed": prompts and outputs never share a step, and what is
            found in the prefix cache was computed as a prompt.
    """

    prefix_cache: bool = True
    watermark: float = 0.01
    ageing: float = 30.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    tpot_target: float | None = None
    batch_priority: int = 1
    interactive_reserve: float = 0.0
    host_pages: tuple[int, ...] = ()
    separate_phases: bool = False


class ThrashGuard:
    """Sees sequences that are preempted again before they went on by a page, and then has
    admission leave a larger part of the pool free, until it has been calm for a while."""

    def __init__(self, page_size: int):
        self.count = 0
        self.extra = 0.0  # fraction of the pool that admission leaves free besides
        self._page_size = page_size
        self._calm = 0

    def preempted_again(self, tokens: int) -> None:
        """A sequence was preempted `tokens` tokens after it had been admitted again."""
        if tokens < self._page_size:
            self.count += 1
            self.extra = min(max(2 * self.extra, LEAST_EXTRA), MOST_EXTRA)
            self._calm = 0

    def step(self) -> None:
        """A step was planned."""
        self._calm += 1
        if self.extra and self._calm >= CALM_STEPS:
            self._calm = 0
            self.extra = self.extra / 2 if self.extra > LEAST_EXTRA else 0.0
