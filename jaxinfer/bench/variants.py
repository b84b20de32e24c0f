"""One compiled engine run in several ways: another policy, the same programs.

`running_as` gives the engine a fresh scheduler for a while, and notes what every step computed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxinfer.engine import Engine
from jaxinfer.policy import SchedulerPolicy
from jaxinfer.runner import Runner, StepResult, StepRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.step_plan import StepPlan, StepShape


@dataclass(frozen=True, slots=True)
class StepNote:
    """What a step computed, and the seconds from the result before (or its dispatch) to its own."""

    decodes: int
    chunk_tokens: int
    seconds: float


class StepLog:
    """A runner that notes its steps. `decode_shape`: of all that compute no prompt, if given."""

    def __init__(
        self,
        runner: StepRunner,
        decode_shape: StepShape | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._runner, self._clock = runner, clock
        self._decode_shape = decode_shape
        self._in_flight: deque[tuple[int, int, float]] = deque()
        self._last_result = clock()
        self.steps: list[StepNote] = []

    def dispatch(self, plan: StepPlan) -> Any:
        self._in_flight.append((len(plan.decodes), plan.chunk_tokens, self._clock()))
        if self._decode_shape is not None and not plan.pieces:
            assert isinstance(self._runner, Runner)
            return self._runner.dispatch(plan, self._decode_shape)
        return self._runner.dispatch(plan)

    def collect(self, handle: Any) -> StepResult:
        result = self._runner.collect(handle)
        now = self._clock()
        decodes, chunk_tokens, dispatched = self._in_flight.popleft()
        seconds = now - max(dispatched, self._last_result)
        self.steps.append(StepNote(decodes, chunk_tokens, seconds))
        self._last_result = now
        return result

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return sum(step.chunk_tokens for step in self.steps)

    @property
    def prompt_steps(self) -> list[StepNote]:
        """Steps that computed a part of a prompt, whatever else."""
        return [step for step in self.steps if step.chunk_tokens]

    @property
    def decode_steps(self) -> list[StepNote]:
        """Steps that computed no prompt."""
        return [step for step in self.steps if not step.chunk_tokens]


@contextlib.contextmanager
def running_as(
    engine: Engine, policy: SchedulerPolicy, full_batch: bool = False
) -> Iterator[StepLog]:
    """The engine, which must be idle, with a scheduler of this policy and nothing cached.

    `full_batch`: decode steps take the program of all slots, however few decode.
    """
    scheduler, runner = engine.scheduler, engine.runner
    engine.scheduler = Scheduler(scheduler.limits, policy)
    engine.runner = log = StepLog(runner, _widest(runner) if full_batch else None)
    try:
        yield log
    finally:
        engine.scheduler, engine.runner = scheduler, runner


def _widest(runner: StepRunner) -> StepShape | None:
    """The decode step of all slots; None for a runner that has no programs."""
    if not isinstance(runner, Runner):
        return None
    shapes = [shape for shape in runner.programs.forward if not shape.chunk]
    return max(shapes, key=lambda shape: shape.rows)
