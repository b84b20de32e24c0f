"""How long a kernel takes on the device: many launches in one program, the median of several runs.

One program holds all launches of a run, each waiting for the one before it, so the host's dispatch
is paid once for all of them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

WANTED = 0.02  # seconds of one run: a thousand times what dispatching it takes
MOST, LEAST = 2000, 3
RUNS = 7


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: the median over the runs, and the fastest and slowest of them."""

    median: float
    fastest: float
    slowest: float
    launches: int


@functools.partial(jax.jit, static_argnames=("run",))
def once(inputs: Any, *, run: Callable[[Any], Any]) -> Any:
    """One launch, as one program."""
    return run(inputs)


Feed = Callable[[Any, Any], Any]


@functools.partial(jax.jit, static_argnames=("run", "feed", "times"))
def repeated(
    inputs: Any, *, run: Callable[[Any], Any], feed: Feed | None = None, times: int
) -> Any:
    """The last result of `times` launches, none of which can be left out or moved before another.

    With `feed` the next launch takes what it makes of the inputs and the last result.
    """

    def launch(_: Any, last: Any) -> Any:
        given, last = lax.optimization_barrier((inputs, last))
        return run(given if feed is None else feed(given, last))

    return lax.fori_loop(1, times, launch, run(inputs))


def launches(floor_us: float) -> int:
    """How many launches make a run long enough, of a kernel with that floor."""
    return max(LEAST, min(MOST, round(WANTED * 1e6 / max(floor_us, 1.0))))


def timed(program: Callable[[Any], Any], inputs: Any, times: int, runs: int = RUNS) -> Timing:
    """Time a compiled `repeated` of so many launches; the first run warms up and is not counted."""
    jax.block_until_ready(program(inputs))
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(program(inputs))
        taken.append((time.perf_counter() - start) / times * 1e6)
    return summary(taken, times)


def summary(taken: list[float], times: int) -> Timing:
    """The median and the ends of several runs' microseconds a launch."""
    return Timing(statistics.median(taken), min(taken), max(taken), times)
