"""An engine over a device that computes nothing, to look at what the scheduler decides.

Every token is 0 and every request runs to its length.
"""

from __future__ import annotations

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.engine import Engine
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.runner import StepResult
from jaxinfer.scheduler import Scheduler
from jaxinfer.step_plan import StepPlan
from jaxinfer.validation import EngineLimits

NO_LIMIT = 1 << 30


class NoDevice:
    """A runner whose results are known when a step is dispatched."""

    def dispatch(self, plan: StepPlan) -> StepResult:
        return result_of(plan)

    def collect(self, handle: StepResult) -> StepResult:
        return handle


def result_of(plan: StepPlan) -> StepResult:
    """A token for every row that yields one; the last one a request may have ends it."""
    rows = [outcomes.IDLE] * (len(plan.decodes) + len(plan.pieces))
    for row, sequence in plan.sampled():
        at_limit = sequence.num_outputs >= sequence.request.max_new_tokens
        rows[row] = outcomes.AT_LIMIT if at_limit else outcomes.RUNNING
    return StepResult([0] * len(rows), rows)


def engine_without_device(
    limits: SchedulerLimits, policy: SchedulerPolicy, max_model_len: int, vocab_size: int = 1 << 15
) -> Engine:
    """An engine that schedules and computes nothing."""
    windows = limits.windows or (None,) * len(limits.num_pages)
    whole = [count - 1 for count, window in zip(limits.num_pages, windows) if window is None]
    return Engine(
        Scheduler(limits, policy),
        NoDevice(),
        EngineLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=limits.num_slots,
            kv_tokens=min(whole) * limits.page_size if whole else max_model_len,
            max_queued_requests=NO_LIMIT,
            max_queued_tokens=NO_LIMIT,
        ),
    )
