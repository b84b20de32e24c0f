"""`bench steps`: what a step costs the host, and what each program costs the device.

Two passes over the same workload. The first runs the engine as it serves and takes the time of its
own thread: wall clock, waiting for the device apart, and CPU seconds of the thread. The second
waits after every program, so that a program's time is its own; that pass says nothing about rates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxinfer.bench.drive import Progress, Watched, drive
from jaxinfer.bench.stats import summarise
from jaxinfer.bench.workload import WorkItem
from jaxinfer.engine import Engine
from jaxinfer.programs import Programs
from jaxinfer.request import SequenceEvent
from jaxinfer.runner import Runner, StepResult, StepRunner
from jaxinfer.step_plan import StepPlan


@dataclass(slots=True)
class HostStep:
    """Seconds of the engine thread in one step, and the work that was dispatched in it."""

    wall: float
    cpu: float
    waited: float  # of the wall clock: blocked on the device's result
    rows: int
    chunk: int


class _WaitTimer:
    """A runner that also says how long `collect` blocked and what was dispatched last."""

    def __init__(self, runner: StepRunner):
        self.runner, self.waited = runner, 0.0
        self.plan: StepPlan | None = None

    def dispatch(self, plan: StepPlan) -> Any:
        self.plan = plan
        return self.runner.dispatch(plan)

    def collect(self, handle: Any) -> StepResult:
        start = time.perf_counter()
        result = self.runner.collect(handle)
        self.waited += time.perf_counter() - start
        return result


@dataclass(slots=True)
class _StepTimer(Watched):
    """An engine seen by `drive`, timing each of its steps on the calling thread."""

    steps: list[HostStep] = field(default_factory=list)

    def step(self, now: float) -> list[SequenceEvent]:
        timer = self.engine.runner
        assert isinstance(timer, _WaitTimer)
        timer.waited, timer.plan = 0.0, None
        wall, cpu = time.perf_counter(), time.thread_time()
        events = self.engine.step(now)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if timer.plan is not None:
            plan = timer.plan
            self.steps.append(
                HostStep(wall, cpu, timer.waited, len(plan.decodes), plan.chunk_tokens)
            )
        return events


def host_steps(
    engine: Engine, items: Sequence[WorkItem], concurrency: int, progress: Progress | None = None
) -> list[HostStep]:
    """Drive the items through the engine as it serves and time every step of its thread."""
    timed = _StepTimer(engine)
    runner, engine.runner = engine.runner, _WaitTimer(engine.runner)
    try:
        drive(timed, items, concurrency, progress)
    finally:
        engine.runner = runner
    return timed.steps


def device_programs(
    engine: Engine, items: Sequence[WorkItem], concurrency: int, progress: Progress | None = None
) -> dict[str, list[float]]:
    """Drive the items through, waiting for each program; seconds of every run, by its name."""
    runner = engine.runner
    assert isinstance(runner, Runner)
    programs = runner.programs
    seconds: dict[str, list[float]] = {}
    runner.programs = _timed_programs(programs, seconds)
    try:
        drive(engine, items, concurrency, progress)
    finally:
        runner.programs = programs
    return seconds


def _timed_programs(programs: Programs, seconds: dict[str, list[float]]) -> Programs:
    return dataclasses.replace(
        programs,
        forward={
            shape: _timed(program, f"forward {shape.rows}+{shape.chunk}", seconds)
            for shape, program in programs.forward.items()
        },
        forbid={
            rows: _timed(program, f"forbid {rows}", seconds)
            for rows, program in programs.forbid.items()
        },
        sample={
            key: _timed(program, f"sample {key[1]} {key[0]}", seconds)
            for key, program in programs.sample.items()
        },
        admit=_timed(programs.admit, "admit", seconds),
        load_history=_timed(programs.load_history, "load_history", seconds),
        put_masks=_timed(programs.put_masks, "put_masks", seconds),
    )


def _timed(
    program: Callable[..., Any], name: str, seconds: dict[str, list[float]]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return out

    return run


def steps_report(
    engine: Engine, items: Sequence[WorkItem], concurrency: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Both passes, in milliseconds. `host_decode` covers the full decode steps alone."""
    host = host_steps(engine, items, concurrency, progress)
    full = [s for s in host if s.rows == concurrency and s.chunk == 0]
    device = device_programs(engine, items, concurrency, progress)
    return {
        "num_steps": len(host),
        "concurrency": concurrency,
        "host_all": _host_summary(host),
        "host_decode": _host_summary(full),
        "programs": {
            name: {"runs": len(runs), **_milliseconds(runs)}
            for name, runs in sorted(device.items(), key=lambda entry: -sum(entry[1]))
        },
    }


def _host_summary(steps: Sequence[HostStep]) -> dict[str, Any]:
    """Per step: wall clock, CPU time of the engine thread, time it did not wait for the device."""
    wall = sum(s.wall for s in steps)
    return {
        "steps": len(steps),
        "wall_ms": _milliseconds([s.wall for s in steps]),
        "cpu_ms": _milliseconds([s.cpu for s in steps]),
        "host_ms": _milliseconds([s.wall - s.waited for s in steps]),
        "cpu_share": sum(s.cpu for s in steps) / wall if wall else 0.0,
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return summarise([s * 1e3 for s in seconds])
