"""Who is more urgent gets what who is less urgent has, and what makes a request late or not."""

from __future__ import annotations

import pytest
from fakes import GREEDY, Harness, scheduler_limits

from jaxinfer.policy import SchedulerPolicy
from jaxinfer.request import FinishReason, Request, Scheduling
from jaxinfer.sequence import Sequence

LOW, HIGH = Scheduling(priority=5), Scheduling(priority=0)


def harness(pages: int, overlap: bool = True, slots: int = 8, **policy: object) -> Harness:
    limits = scheduler_limits(slots, 16, 4, (pages,))
    return Harness(limits, 200, overlap, SchedulerPolicy(**policy))


def steps_to_first_token(run: Harness, name: str) -> int:
    for steps in range(200):
        if run.outputs[name]:
            return steps
        run.step()
    raise AssertionError("it starves")


def test_what_is_kept_free_after_thrash_does_not_hold_back_the_urgent():
    run = harness(101)
    for i in range(4):
        run.submit([i] * 48, 40, scheduling=LOW)
    for _ in range(20):
        run.step()
    run.scheduler.thrash.extra = 0.5
    urgent = run.submit([9] * 20, 4, scheduling=HIGH)
    assert steps_to_first_token(run, urgent) <= 4
    run.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_only_the_less_urgent_share_are_theirs_to_give(overlap):
    """Four samples of one prompt hold all pages, most of them together."""
    run = harness(17, overlap, prefix_cache=False)
    for _ in range(4):
        run.submit([1] * 40, 20, scheduling=LOW, group="g")
    for _ in range(6):
        run.step()
    assert run.scheduler.pages.how_many_give(run.scheduler.running[:1], 8) == 0
    urgent = run.submit([9] * 48, 4, scheduling=HIGH)
    assert steps_to_first_token(run, urgent) <= 7
    assert not run.ends, "nobody had to end for it"
    run.drain()


def test_pages_that_the_urgent_share_too_are_nobodys_to_give():
    run = harness(17)
    run.submit([1] * 40, 20, scheduling=HIGH)
    run.step()
    low = run.submit([1] * 41, 10, scheduling=LOW)
    for _ in range(4):
        run.step()
    large = run.submit([9] * 40, 4, scheduling=HIGH)
    run.step()
    assert run.scheduler.by_id[low].slot >= 0 and run.engine.counters.preemptions == 0
    run.drain()
    assert large in run.ends


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_loses_its_slot_to_who_finds_no_pages(overlap):
    run = harness(21, overlap, slots=2, prefix_cache=False)
    run.submit([1] * 56, 20, scheduling=HIGH)
    low = run.submit([2] * 8, 20, scheduling=LOW)
    for _ in range(8):
        run.step()
    urgent = run.submit([3] * 40, 4, scheduling=HIGH)
    for _ in range(4):
        run.step()
    assert not run.outputs[urgent] and run.scheduler.preemptions == 0
    assert len(run.outputs[low]) > 4
    run.drain()
    assert run.order[-1] == urgent


def test_within_the_batch_class_the_more_urgent_go_first_too():
    run = harness(101, interactive_reserve=0.25)
    for i in range(8):
        run.submit([i] * 4, 50, scheduling=Scheduling(priority=2))
    for _ in range(8):
        run.step()
    assert len(run.scheduler.running) == 6
    urgent = run.submit([9] * 8, 4, scheduling=Scheduling(priority=1))
    assert steps_to_first_token(run, urgent) <= 3
    assert len(run.scheduler.running) == 6
    run.drain()


def test_a_backlog_of_the_batch_class_that_has_risen_leaves_the_reserve_free():
    """Otherwise it would take every slot after one ageing time, and at a level where nobody is
    preempted for who is asked to be urgent."""
    run = harness(101, interactive_reserve=0.25, ageing=10.0)
    for i in range(40):
        run.submit([i % 40] * 4, 60, scheduling=Scheduling(priority=2))
    urgent = [run.submit([41] * 4, 60) for _ in range(20)]  # somebody always waits at level 0
    most = 0
    for _ in range(120):
        run.step()
        running = run.scheduler.running
        batch = sum(s.request.scheduling.priority == 2 for s in running)
        most = max(most, batch)
        assert batch <= 6, "8 slots, a quarter reserved"
    assert most > 0, "and yet it rises: nothing waits for ever"
    run.drain()
    assert all(run.ends[name] is FinishReason.LENGTH for name in urgent)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pause_is_no_steps_time(overlap):
    """Ten minutes without a request say nothing of how long a step takes."""
    run = harness(101, overlap, tpot_target=0.1)
    for _ in range(3):
        run.submit([1, 2, 3], 6)
        while run.engine.has_work:
            run.step(0.02)
        run.now += 600
    run.submit([4] * 6, 20)
    for _ in range(4):
        run.step(0.02)
    pace = run.scheduler.pace
    assert pace.expect(1, 16, 1) < 0.5
    assert pace.first_token_in(0, 1, 1) < 10


def test_who_leaves_the_queue_frees_no_slot():
    """A thousand that gave up waiting do not make the next end come sooner."""
    run = harness(101, slots=1)
    run.submit([1] * 4, 100)
    for _ in range(20):
        run.step()
    for i in range(50):
        name = run.submit([2, i % 40], 4)
        run.step()
        run.cancel(name)
    pace = run.scheduler.pace
    assert pace.first_token_in(0, 1, 1) == pace.first_token_in(0, 0, 1), "of ends nothing is known"
    run.drain()


def test_a_crowd_of_one_tenant_makes_no_other_tenants_request_late():
    run = harness(401, slots=4)
    for i in range(60):
        run.submit([i % 40] * 60, 10, scheduling=Scheduling(tenant="crowd"))
    for _ in range(60):
        run.step(0.05)
    few = run.submit([7] * 8, 4, timeout=3.0, scheduling=Scheduling(tenant="few"))
    own = run.submit([7] * 60, 4, timeout=3.0, scheduling=Scheduling(tenant="crowd"))
    steps_to_first_token(run, few)
    assert own in run.ends and run.engine.counters.refused == 1
    run.drain()


@pytest.mark.parametrize("long", [LOW, Scheduling(tenant="other")])
def test_a_long_prompt_that_runs_makes_late_only_who_comes_after_it(long):
    run = harness(401, slots=4)
    run.submit([1] * 64, 5)
    run.drain()  # a second for a chunk of 16 tokens
    run.submit([2] * 180, 4, scheduling=long)
    run.step()
    soon = run.submit([3] * 8, 4, timeout=5.0)
    own = run.submit([3] * 8, 4, timeout=5.0, scheduling=long)
    assert steps_to_first_token(run, soon) <= 4
    assert run.ends[own] is FinishReason.LATE
    run.drain()


def test_losing_a_slot_again_and_again_is_no_thrash():
    """Pages are plenty: keeping more of them free would only run fewer sequences."""
    run = harness(401, slots=4)
    for i in range(8):
        run.submit([i] * 8, 30, scheduling=LOW)
    for step in range(120):
        if step % 6 == 0:
            for _ in range(4):
                run.submit([9, step % 40], 2, scheduling=HIGH)
        run.step()
    assert run.engine.counters.preemptions > 10
    assert run.engine.counters.thrashes == 0 and run.scheduler.thrash.extra == 0.0
    run.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_page_is_found_as_soon_as_its_sequence_takes_the_next(overlap):
    """Who is preempted for want of a page has just filled its last one, and computes none again."""
    run = harness(7, overlap)
    run.submit([1, 2, 3, 4], 16)
    run.submit([5, 6, 7, 8], 16)
    while not run.scheduler.preemptions:
        run.step()
    (waits,) = run.scheduler.waiting
    full = waits.num_computed_tokens // 4
    assert full == 3 and waits.num_published == full
    (runs,) = run.scheduler.running
    while len(runs.pages[0]) == full:
        run.step()
    begins_so = Request("f", (*runs.tokens[: 4 * full], 9), GREEDY, 1, 0)
    found = run.scheduler.pages.lookup(Sequence(begins_so, [*begins_so.prompt], root=runs.root))
    assert found == [runs.pages[0][:full]]
    run.drain()


def test_who_arrived_last_gives_up_its_pages_though_it_was_admitted_before():
    run = harness(21, slots=2, prefix_cache=False)
    mine, other = Scheduling(tenant="mine"), Scheduling(tenant="other")
    run.submit([1] * 4, 4, scheduling=mine)
    run.submit([2] * 4, 8, scheduling=mine)
    run.step()
    early = run.submit([3] * 4, 60, scheduling=mine)
    late = run.submit([4] * 4, 60, scheduling=other)
    ran = []
    while not run.scheduler.preemptions:
        run.step()
        ran += [s.request.id for s in run.scheduler.running if s.request.id not in ran]
    assert ran[2:] == [late, early]
    assert [s.request.id for s in run.scheduler.running] == [early]
    run.drain()


def test_events_say_how_often_their_request_was_preempted():
    run = harness(101, slots=1)
    low = run.submit([1] * 4, 30, scheduling=LOW)
    said = []
    for number in range(3):
        for _ in range(4):
            said += [e.preemptions for e in run.step() if e.request_id == low]
        run.submit([2 + number] * 4, 2, scheduling=HIGH)
        run.step()
        load = run.engine.load()
        assert (load.waiting, load.preempted, load.deferred) == (1, 1, 0)
    run.drain()
    assert run.engine.load().preempted == 0
    assert said == sorted(said) and {0, 1, 2} <= set(said)
