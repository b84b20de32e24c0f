"""Traps in scheduling: in each of these somebody once starved, failed or was refused."""

from __future__ import annotations

import random

import pytest
from fakes import Harness, scheduler_limits

from jaxinfer.chunk_turns import MOST_PASSED_OVER
from jaxinfer.policy import SchedulerPolicy
from jaxinfer.request import FinishReason, Scheduling


def harness(slots: int, pages: int, chunk: int = 16, longest: int = 128, **policy) -> Harness:
    limits = scheduler_limits(slots, chunk, 4, (pages,))
    return Harness(limits, longest, True, SchedulerPolicy(**policy))


def at(priority: int) -> Scheduling:
    return Scheduling(priority=priority)


def test_a_preempted_request_that_starts_again_can_be_the_next_to_run():
    """Determinism "fixed" cuts its tokens back to the prompt; its pages' names reach further."""
    run = harness(2, 14, longest=40, separate_phases=True, ageing=5.0)
    for length, output, priority, steps in (
        (7, 18, 2, 5),
        (6, 19, 2, 3),
        (5, 13, 1, 10),
        (18, 9, 0, 6),
    ):
        run.submit([7 * i % 9 for i in range(length)], output, scheduling=at(priority))
        for _ in range(steps):
            run.step()
    run.drain()
    assert {*run.ends.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("prompt", "period", "policy"),
    [
        (100, 9, {"prefix_cache": False}),  # its prompt takes 13 steps, and nothing of it is kept
        (10, 15, {"separate_phases": True}),  # prompt and output take 22, and are computed again
        (10, 15, {"separate_phases": True, "prefix_cache": False}),
    ],
)
def test_who_is_preempted_over_and_over_rises_by_the_time_it_waited_in_all(prompt, period, policy):
    """One slot, and an urgent request before the other is done, every time."""
    run = harness(1, 40, chunk=8, ageing=30.0, **policy)
    low = run.submit([1] * prompt, 20, scheduling=at(5))
    for i in range(60):
        run.submit([2, 3, i % 40], 3, scheduling=at(0))
        for _ in range(period):
            run.step()
        if low in run.ends:
            break
    assert run.ends[low] is FinishReason.LENGTH
    assert run.engine.counters.preemptions > 1
    run.drain()


def test_a_long_prompt_of_one_tenant_leaves_others_their_turns():
    """A chunk of theirs after a chunk of its own, whether they come to wait or run already."""
    run = harness(4, 200, longest=400)
    long = run.submit([1] * 320, 4, scheduling=Scheduling(tenant="long"))
    run.step()
    short = run.submit([2] * 8, 4, scheduling=Scheduling(tenant="short"))
    middle = run.submit([3] * 60, 4, scheduling=Scheduling(tenant="middle"))
    for _ in range(5):
        run.step()
    assert run.outputs[short]
    again = run.submit([4] * 8, 4, scheduling=Scheduling(tenant="short"))
    for _ in range(10):
        run.step()
    assert run.outputs[again] and run.outputs[middle] and not run.outputs[long]
    run.drain()


def test_newcomers_keep_no_prompt_in_progress_from_going_on():
    """More prompts of tenants that nobody knew than can be computed."""
    run = harness(32, 800, longest=400, prefix_cache=False)
    long = run.submit([1] * 320, 4, scheduling=Scheduling(tenant="long"))
    for i in range(20 * (MOST_PASSED_OVER + 1) + 5):
        for j in range(1 + i % 2):
            run.submit([i % 50] * 16, 2, scheduling=Scheduling(tenant=f"{i} {j}"))
        run.step()
    assert run.outputs[long]


def test_interactive_requests_that_rose_keep_no_batch_request_from_rising():
    run = harness(4, 80, ageing=10.0, interactive_reserve=0.25)
    batch = ""
    for step in range(600):
        waiting = [s.request.scheduling.priority for s in run.scheduler.waiting]
        for priority, wanted in ((-1, 4), (0, 60)):
            for _ in range(wanted - waiting.count(priority)):
                run.submit([3, step % 40], 10, scheduling=at(priority))
        if step == 20:
            batch = run.submit([4] * 5, 4, scheduling=at(1))
        run.step()
        if batch in run.ends:
            return
    raise AssertionError("it starves")


def test_a_deadline_is_judged_by_what_the_prefix_cache_lacks():
    run = harness(8, 200)
    for i in range(4):  # steps with a chunk of 16 take 1 s
        run.submit([i] * 64, 2)
    for _ in range(12):
        run.step()
    cold = run.submit([9] * 100, 1, timeout=2.0)
    run.step()
    assert run.ends[cold] is FinishReason.LATE
    run.submit([9] * 100, 1)
    run.drain()
    warm = run.submit([9] * 100, 1, timeout=3.0)
    run.drain()
    assert run.ends[warm] is FinishReason.LENGTH


def test_a_deadline_is_judged_by_ends_where_pages_are_short_and_slots_are_not():
    """Slots for all, pages for two. Each takes 10 steps, so two end every ten seconds."""
    run = harness(32, 15, prefix_cache=False)
    for i in range(14):
        run.submit([i] * 16, 10)
    for _ in range(40):
        run.step()
    assert len(run.scheduler.running) <= 3 and len(run.scheduler.waiting) >= 4
    late = run.submit([40] * 16, 10, timeout=10.0)
    urgent = run.submit([41] * 16, 2, timeout=10.0, scheduling=at(-1))
    run.step()
    assert run.ends[late] is FinishReason.LATE and urgent not in run.ends
    patient = run.submit([42] * 16, 10, timeout=400.0)
    run.drain()
    assert {run.ends[urgent], run.ends[patient]} == {FinishReason.LENGTH}


def test_samples_of_one_prompt_are_taken_or_refused_together():
    run = harness(8, 200)
    for i in range(4):
        run.submit([i] * 64, 2)
    for _ in range(12):
        run.step()
    first = f"r{len(run.requests)}"
    samples = [run.submit([7] * 64, 1, timeout=14.0, group=first) for _ in range(8)]
    run.drain()
    assert {run.ends[name] for name in samples} == {FinishReason.LENGTH}
    first = f"r{len(run.requests)}"
    samples = [run.submit([8] * 64, 1, timeout=0.5, group=first) for _ in range(8)]
    run.drain()
    assert {run.ends[name] for name in samples} == {FinishReason.LATE}


def test_records_have_every_preemption_also_of_steps_that_came_to_nothing():
    """The urgent one's pages are on their way back from who lost them: nothing can be computed."""
    run = harness(2, 9)
    run.submit([1] * 16, 12, scheduling=at(5))
    for _ in range(4):
        run.step()
    steps = len(run.engine.records)
    run.submit([2] * 24, 4, scheduling=at(0))
    run.step()
    assert run.engine.counters.preemptions == 1 and len(run.engine.records) == steps
    run.drain()
    assert sum(record.preempted for record in run.engine.records) == 1


def test_nobody_sits_out_while_there_is_a_page():
    """Pages that windows have passed are on their way back in nearly every step here."""
    for seed in range(8):
        rng = random.Random(seed)
        limits = scheduler_limits(6, 64, 2, (40, 22), (None, 5))
        run = Harness(limits, 64, True, SchedulerPolicy(watermark=0.0, prefix_cache=False))
        for _ in range(6):
            prompt = [rng.randrange(40) for _ in range(rng.randrange(2, 6))]
            run.submit(prompt, rng.randrange(10, 20))
        scheduler = run.scheduler
        plan = scheduler.plan

        def watched(now, scheduler=scheduler, plan=plan):
            could = [s for s in scheduler.running if s.decodes]
            planned = plan(now)
            if planned is not None and scheduler.pages.available:
                sat = [s for s in could if s in scheduler.running and s not in planned.decodes]
                assert not sat
            return planned

        scheduler.plan = watched
        run.drain()
