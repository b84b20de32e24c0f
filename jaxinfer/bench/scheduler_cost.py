"""`bench scheduler`: what deciding a step costs the host, no device at all.

Slots are full and the queue keeps its length: for every request that ends another one comes, of
some tenant and priority, with lengths of real chats; a part of them begin with a prompt that others
have too. Steps are planned one ahead, as in the engine, and timed in three parts: `plan`; `read`,
which enters the tokens of the step before, ends requests and gives pages back; and `add`, once for
every request that comes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.bench.drive import Progress
from jaxinfer.bench.ladder import with_shared_prefix
from jaxinfer.bench.no_device import result_of
from jaxinfer.bench.stats import summarise
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.request import Request, SamplingParams, Scheduling
from jaxinfer.runner import StepResult
from jaxinfer.scheduler import Scheduler
from jaxinfer.step_plan import StepPlan

VOCAB_SIZE, MAX_TOKENS = 1 << 15, 4096
TENANTS, PRIORITIES = 16, 3
PREFIXES, PREFIX_LEN, WITH_PREFIX = 32, 512, 0.5  # a half of the requests begin with one of these
TEMPLATES = (
    512  # prompts that are made in advance; a request takes one, with a first token of its own
)
STEP_SECONDS = 0.02  # of simulated time


_InFlight = tuple[StepPlan, StepResult]


@dataclass(slots=True)
class Times:
    """Seconds by step; of `adds` by request. `rows` and `pieces` say what the steps were."""

    plans: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    adds: list[float] = field(default_factory=list)
    rows: int = 0
    chunk_tokens: int = 0


def requests(seed: int) -> Iterator[Request]:
    """Requests without end."""
    rng = np.random.default_rng(seed)
    items = make_workload("sharegpt", TEMPLATES, 0, 0, VOCAB_SIZE, MAX_TOKENS - PREFIX_LEN, seed)
    prefixes = rng.integers(0, VOCAB_SIZE, (PREFIXES, PREFIX_LEN)).tolist()
    for number in itertools.count():
        item = items[int(rng.integers(TEMPLATES))]
        item = WorkItem((number, *item.prompt[1:]), item.output_len)
        if rng.random() < WITH_PREFIX:
            item = with_shared_prefix([item], prefixes[int(rng.integers(PREFIXES))])[0]
        tenant, priority = f"tenant-{rng.integers(TENANTS)}", int(rng.integers(PRIORITIES))
        params = SamplingParams(temperature=0, max_new_tokens=item.output_len)
        yield Request(
            str(number), item.prompt, params, item.output_len, 0,
            scheduling=Scheduling(priority, tenant),
        )  # fmt: skip


def scheduler_times(
    limits: SchedulerLimits,
    policy: SchedulerPolicy,
    waiting: int,
    warm_up: int,
    steps: int,
    seed: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Milliseconds a step with `waiting` requests in the queue, after `warm_up` steps."""
    scheduler, arriving = Scheduler(limits, policy), requests(seed)
    times, before = Times(), None
    for number in range(-warm_up, steps):
        if number == 0:
            times = Times()
        now = (number + warm_up) * STEP_SECONDS
        _refill(scheduler, arriving, waiting, now, times)
        before = _step(scheduler, before, now, times)
        if progress and number % 100 == 0:
            progress(f"steps, {waiting} waiting", number + warm_up, warm_up + steps)
    totals = [plan + read for plan, read in zip(times.plans, times.reads)]
    free, cached, used = scheduler.pages.count()
    return {
        "waiting": waiting,
        "steps": steps,
        "step_ms": _milliseconds(totals),
        "plan_ms": _milliseconds(times.plans),
        "read_ms": _milliseconds(times.reads),
        "add_ms": _milliseconds(times.adds),
        "rows": times.rows / steps,
        "chunk_tokens": times.chunk_tokens / steps,
        "hit_rate": scheduler.prefix_hits / max(1, scheduler.prefix_queries),
        "preemptions": scheduler.preemptions,
        "pages": {"free": free, "cached": cached, "used": used},
    }


def _refill(
    scheduler: Scheduler, arriving: Iterator[Request], waiting: int, now: float, times: Times
) -> None:
    """Let requests come until the queue is as long as it should be."""
    while len(scheduler.waiting) < waiting:
        request = dataclasses.replace(next(arriving), arrival=now)
        start = time.perf_counter()
        scheduler.add(request)
        times.adds.append(time.perf_counter() - start)


def _step(
    scheduler: Scheduler, before: _InFlight | None, now: float, times: Times
) -> _InFlight | None:
    """Plan a step, then read the one before it."""
    start = time.perf_counter()
    plan = scheduler.plan(now)
    times.plans.append(time.perf_counter() - start)
    in_flight = None if plan is None else (plan, result_of(plan))
    if plan is not None:
        times.rows += len(plan.decodes)
        times.chunk_tokens += plan.chunk_tokens
    start = time.perf_counter()
    if before is not None:
        _read(scheduler, *before)
    times.reads.append(time.perf_counter() - start)
    return in_flight


def _read(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
    """What the engine has the scheduler do with a result."""
    tokens, row_outcomes, running = result.tokens, result.outcomes, outcomes.RUNNING
    for row, sequence in plan.sampled():
        if sequence.finished:
            continue
        sequence.tokens.append(tokens[row])
        if row_outcomes[row] != running:
            scheduler.finish(sequence)
    scheduler.retire(plan)


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return summarise([1e3 * s for s in seconds])
