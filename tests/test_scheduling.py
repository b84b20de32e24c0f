"""What requests get from the scheduler: prefixes once, urgent ones first, promises kept."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fakes import Harness, expected, scheduler_limits

from jaxinfer.policy import CALM_STEPS, SchedulerPolicy
from jaxinfer.request import FinishReason, Scheduling

MAX_LEN = 64
BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
LOW, HIGH = Scheduling(priority=5), Scheduling(priority=0)


def harness(
    overlap: bool = True, slots: int = 4, chunk: int = 16, pages: int = 65, **policy: object
) -> Harness:
    limits = scheduler_limits(slots, chunk, 4, (pages,))
    return Harness(limits, MAX_LEN, overlap, SchedulerPolicy(**policy))


def computed(run: Harness) -> int:
    """Prompt tokens computed so far."""
    return sum(record.chunk_tokens for record in run.engine.records)


def runs_until(run: Harness, condition, steps: int = 200) -> None:
    for _ in range(steps):
        if condition():
            return
        run.step()
    raise AssertionError("it never happened")


# -- prefixes --------------------------------------------------------------------------------------


@BOTH_LOOPS
@pytest.mark.parametrize("length", [7, 8, 9, 20])
def test_the_same_prompt_again_computes_what_is_not_in_full_pages(overlap, length):
    """One under, equal to, and one over a page's multiple; at least one token is computed."""
    run = harness(overlap)
    prompt = list(range(1, length + 1))
    for _ in range(2):
        run.submit(prompt, 4)
        run.drain()
    hit = (length - 1) // 4 * 4
    assert computed(run) == length + (length - hit)
    assert run.outputs["r0"] == run.outputs["r1"]
    assert (run.engine.counters.prefix_queries, run.engine.counters.prefix_hits) == (
        2 * length,
        hit,
    )


@BOTH_LOOPS
def test_requests_that_arrive_together_compute_their_common_beginning_once(overlap):
    run = harness(overlap, slots=8, pages=129)
    common = list(range(1, 41))
    for i in range(8):
        run.submit([*common, i, i, i], 3)
    run.drain()
    assert computed(run) == 40 + 8 * 3, "the beginning once, and each one's end"


@BOTH_LOOPS
def test_a_conversation_finds_its_own_answers(overlap):
    run, history = harness(overlap), [1, 2, 3]
    for turn in range(6):
        name = run.submit(history, 5)
        run.drain()
        history = [*history, *run.outputs[name], 40 + turn]
    assert run.hit_rate() > 0.6
    assert computed(run) < 6 * 8, "less than two pages a turn"


def test_tenants_and_salts_share_nothing():
    run, prompt = harness(), list(range(1, 21))
    for scheduling in (
        Scheduling(tenant="a"), Scheduling(tenant="b"), Scheduling(cache_salt="a"), Scheduling(),
    ):  # fmt: skip
        run.submit(prompt, 2, scheduling=scheduling)
        run.drain()
    assert run.engine.counters.prefix_hits == 0
    run.submit(prompt, 2, scheduling=Scheduling(tenant="b"))
    run.drain()
    assert run.engine.counters.prefix_hits == 16


def test_without_the_cache_only_samples_of_one_prompt_share():
    run, prompt = harness(prefix_cache=False), list(range(1, 21))
    for group in ("g", "g", "g", "", ""):
        run.submit(prompt, 2, group=group)
    run.drain()
    assert computed(run) == 20 + 2 * 4 + 2 * 20
    run.submit(prompt, 2, group="h")
    run.drain()
    assert computed(run) == 20 + 2 * 4 + 3 * 20
    assert run.engine.counters.prefix_queries == 0


def test_a_failed_request_leaves_nothing_to_find():
    from fakes import POISON

    run, prompt = harness(), [1, 2, 3, POISON, 5, 6, 7, 8, 9]
    for _ in range(2):
        run.submit(prompt, 2)
        run.drain()
    assert list(run.ends.values()) == [FinishReason.ERROR] * 2
    assert run.engine.counters.prefix_hits == 0 and run.engine.load().pages[1] == 0


def test_events_say_what_was_cached():
    run, prompt = harness(), list(range(1, 21))
    run.submit(prompt, 2)
    run.drain()
    run.submit(prompt, 2)
    events = [event for _ in range(6) for event in run.step()]
    assert [event.cached_tokens for event in events if event.first_scheduled] == [16]


# -- who runs --------------------------------------------------------------------------------------


@BOTH_LOOPS
@pytest.mark.parametrize("policy", [{}, {"separate_phases": True}, {"host_pages": (64,)}])
def test_an_urgent_request_takes_a_slot_and_gives_it_back(overlap, policy):
    run = harness(overlap, slots=2, **policy)
    low = [run.submit([i, i + 1], 20, scheduling=LOW) for i in range(3)]
    for _ in range(8):
        run.step()
    urgent = run.submit([9, 9], 4, scheduling=HIGH)
    run.step()
    assert run.scheduler.by_id[urgent] in run.scheduler.running, "it runs next"
    assert run.engine.counters.preemptions == 1
    victim = run.scheduler.by_id[low[1]]
    assert victim.slot < 0, "of two equals, the one admitted last"
    runs_until(run, lambda: urgent in run.ends)
    runs_until(run, lambda: victim.slot >= 0)
    assert run.scheduler.by_id[low[2]].first_scheduled is None, "it is back before who came later"
    run.drain()  # compares every output with the one computed by hand


def test_several_urgent_requests_take_several_slots_at_once():
    run = harness(slots=4)
    for i in range(4):
        run.submit([i, i], 30, scheduling=LOW)
    for _ in range(5):
        run.step()
    urgent = [run.submit([9, i], 3, scheduling=HIGH) for i in range(3)]
    run.step()
    assert all(run.scheduler.by_id[r] in run.scheduler.running for r in urgent)
    run.drain()


def test_an_urgent_request_takes_pages_only_if_that_helps():
    run = harness(slots=4, pages=17)  # 16 pages
    same = run.submit([1] * 28, 20, scheduling=HIGH)
    low = run.submit([2] * 8, 20, scheduling=LOW)
    for _ in range(4):
        run.step()
    large = run.submit([3] * 40, 4, scheduling=HIGH)  # ten pages: both would have to go
    for _ in range(3):
        run.step()
    assert run.engine.counters.preemptions == 0, "low pages alone would not do"
    assert run.scheduler.by_id[low] in run.scheduler.running
    runs_until(run, lambda: same in run.ends)
    runs_until(run, lambda: large in run.ends)
    run.drain()


def test_ageing_lets_the_low_ones_through():
    """A slot, and an urgent request whenever it is free: the low one runs once it has risen."""
    run = harness(slots=1, ageing=20.0)
    low = run.submit([1, 2], 3, scheduling=LOW)
    run.submit([7, 7], 3, scheduling=HIGH)
    waited = 0
    while low not in run.ends:
        if len(run.scheduler.waiting) < 3:
            run.submit([8, waited % 40], 3, scheduling=HIGH)
        run.step()
        waited += 1
        assert waited < 60, "it starves"
    assert waited > 15, "urgent ones went first"
    run.drain()


def test_tenants_of_one_priority_get_equal_shares():
    run = harness(slots=2, chunk=16)
    for i in range(30):
        run.submit([1, i], 4, scheduling=Scheduling(tenant="crowd"))
    for i in range(6):
        run.submit([2, i], 4, scheduling=Scheduling(tenant="few"))
    runs_until(run, lambda: all(f"r{i}" in run.ends for i in range(30, 36)))
    assert sum(f"r{i}" in run.ends for i in range(30)) <= 9, "as many as of the few, or so"
    run.drain()


def test_the_batch_class_leaves_its_share_free():
    run = harness(slots=4, interactive_reserve=0.5)
    for i in range(6):
        run.submit([i, i], 12, scheduling=Scheduling(priority=1))
    for _ in range(4):
        run.step()
    assert len(run.scheduler.running) == 2
    quick = run.submit([9, 9], 2)
    run.step()
    assert run.scheduler.by_id[quick] in run.scheduler.running
    assert run.engine.counters.preemptions == 0
    run.drain()


def test_a_batch_request_larger_than_its_share_runs_when_it_is_alone():
    run = harness(slots=4, pages=17, interactive_reserve=0.5)
    run.submit([1] * 50, 10, scheduling=Scheduling(priority=1))
    run.drain()


# -- pages under pressure --------------------------------------------------------------------------


@BOTH_LOOPS
def test_pages_that_went_to_host_memory_are_not_computed_again(overlap):
    for host, again in ((0, True), (64, False)):
        run = harness(overlap, slots=3, pages=20, host_pages=(host,), prefix_cache=False)
        for i in range(3):
            run.submit([i, 1, 2, 3, 4, 5], 30)
        run.drain()
        assert run.engine.counters.preemptions > 0
        assert (computed(run) > 18) == again


def test_host_memory_that_is_full_takes_no_more():
    run = harness(slots=4, pages=20, host_pages=(7,), prefix_cache=False)
    for i in range(4):
        run.submit([i, 1, 2, 3, 4, 5], 30)
    run.drain()
    assert run.engine.counters.preemptions > 1


def test_admission_leaves_the_watermark_free():
    run = harness(slots=8, pages=41, watermark=0.25)  # 10 of 40 pages
    for i in range(8):
        run.submit([i] * 20, 2)
    run.step()
    run.step()
    assert run.engine.load().pages[2] <= 30
    run.drain()


def test_thrash_is_counted_and_answered_by_admitting_less():
    """Sequences that grow a page at a time in a pool that is too small for all of them."""
    run = harness(slots=8, pages=33, watermark=0.0, prefix_cache=False)
    for i in range(24):
        run.submit([i] * 14, 40)
    runs_until(run, lambda: run.engine.counters.thrashes > 0, 2000)
    assert run.scheduler.thrash.extra > 0
    run.drain()
    guard = run.scheduler.thrash
    for _ in range(8 * CALM_STEPS):
        guard.step()
    assert guard.extra == 0.0, "forgotten after calm steps"


# -- time ------------------------------------------------------------------------------------------


class Machine:
    """Steps that take time by what is in them: 10 ms, and 1 ms a prompt token computed.

    Overlapped: when a step is planned, the one before the last planned has just been read.
    """

    def __init__(self, run: Harness):
        self.run, self.gaps = run, []

    def step(self) -> list:
        records = self.run.engine.records
        tokens = records[-2].chunk_tokens if len(records) > 1 else 0
        self.gaps.append(0.010 + 0.001 * 64 * math.ceil(tokens / 64))
        return self.run.step(self.gaps[-1])


@pytest.mark.parametrize("target", [None, 0.05, 0.1])
def test_the_chunk_adapts_to_the_bound_on_the_time_between_tokens(target):
    limits = scheduler_limits(num_slots=4, chunk=512, page_size=16, pages=(400,))
    run = Harness(limits, 4000, True, SchedulerPolicy(tpot_target=target))
    machine = Machine(run)
    stream = run.submit([1, 2], 300)
    while not run.outputs[stream]:
        machine.step()
    for i in range(3):
        run.submit([i] * 1500, 2)
    machine.gaps.clear()
    while len(run.ends) < 3 and stream not in run.ends:
        machine.step()
    late = sum(machine.gaps) / len(machine.gaps)
    if target is None:
        assert max(machine.gaps) > 0.4, "nothing holds the chunk back"
    else:
        assert late <= 1.15 * target, "the bound holds in the mean"
        assert len(run.ends) == 3, "and prompts are computed all the same"
    run.drain()


def test_a_prompt_is_computed_even_if_decoding_alone_breaks_the_bound():
    limits = scheduler_limits(num_slots=4, chunk=128, page_size=16, pages=(100,))
    run = Harness(limits, 1000, True, SchedulerPolicy(tpot_target=0.001))
    machine = Machine(run)
    stream = run.submit([1, 2], 200)
    while not run.outputs[stream]:
        machine.step()
    run.submit([3] * 300, 2)
    for _ in range(150):
        machine.step()
    assert "r1" in run.ends and stream not in run.ends
    run.drain()


def test_a_request_that_would_come_too_late_is_refused_with_the_numbers():
    run = harness(slots=1)
    busy = run.submit([1] * 10, 50)
    runs_until(run, lambda: len(run.outputs[busy]) > 20)
    first = run.submit([2] * 40, 4)
    assert first not in run.ends, "without a deadline it just waits"
    runs_until(run, lambda: len(run.outputs[first]) == 4, 400)
    run.submit([3] * 40, 20)
    run.step()
    late = run.submit([4] * 40, 4, timeout=2.0)  # ends come one in 30 s or so, steps take 1 s
    events = run.step()
    (refusal,) = [event for event in events if event.request_id == late]
    assert refusal.finish is FinishReason.LATE and "past the deadline in 2.00 s" in refusal.error
    assert run.engine.counters.refused == 1
    patient = run.submit([5] * 40, 4, timeout=500.0)
    urgent = run.submit([6], 1, timeout=20.0, scheduling=Scheduling(priority=-1))
    run.step()
    assert {patient, urgent}.isdisjoint(run.ends)
    run.drain()


def test_a_worst_case_output_length_refuses_nobody():
    run = harness(slots=1)
    run.submit([1] * 4, 60)
    for _ in range(10):
        run.step()
    may_be_short = run.submit([2] * 4, 60, timeout=30.0)
    run.step()
    assert may_be_short not in run.ends, "nothing is known of when the running one ends"
    run.drain()


# -- everything at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True], ids=["mixed", "separate phases"])
@pytest.mark.parametrize("host", [0, 40])
def test_a_long_run_under_pressure_overlapped_as_synchronous(separate, host):
    """Conversations, tenants, priorities and a pool that is too small: 400 requests."""
    outputs = []
    for overlap in (False, True):
        policy = SchedulerPolicy(host_pages=(host,), separate_phases=separate, ageing=50.0)
        run = Harness(scheduler_limits(6, 24, 4, (40,)), MAX_LEN, overlap, policy)
        rng = np.random.default_rng(11)
        for i in itertools.count():
            if i < 400:
                like = run.requests.get(f"r{i - rng.integers(4, 12)}")
                prompt = rng.integers(0, 50, rng.integers(1, 20)).tolist()
                if like is not None and rng.random() < 0.6:
                    prompt = [*like.prompt, *expected(like)[0], *prompt]
                prompt = prompt[: MAX_LEN - 2]
                output = int(rng.integers(1, min(24, MAX_LEN - len(prompt)) + 1))
                tenant, priority = "abc"[rng.integers(0, 3)], int(rng.integers(0, 3))
                run.submit(prompt, output, (), None, Scheduling(priority, tenant))
            run.step()
            if i >= 400 and not run.engine.has_work:
                break
        run.drain()
        assert run.engine.counters.preemptions >= 15 and run.hit_rate() > 0.02
        outputs.append((run.outputs, run.ends))
    assert outputs[0] == outputs[1]
