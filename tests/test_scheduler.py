"""What the scheduler puts into a step, and when slots and pages come back."""

from __future__ import annotations

import pytest
from fakes import GREEDY, scheduler_limits

from jaxinfer.request import Request
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import NO_SLOT
from jaxinfer.step_plan import MAX_PIECES


def request(name: str, prompt: int, output: int = 4, deadline: float | None = None) -> Request:
    """Prompts of different names begin differently."""
    tokens = tuple(range(1000 * ord(name[0]), 1000 * ord(name[0]) + prompt))
    return Request(name, tokens, GREEDY, output, 0, deadline=deadline)


def read(scheduler: Scheduler, plan, ended: tuple[str, ...] = ()) -> None:
    """What the engine does with a step's result: a token a row, some of which end."""
    for _, sequence in plan.sampled():
        if sequence.finished:
            continue
        sequence.tokens.append(7)
        if sequence.request.id in ended:
            scheduler.finish(sequence)
    scheduler.retire(plan)
    scheduler.check_invariants()


def names(sequences) -> list[str]:
    return [sequence.request.id for sequence in sequences]


def pieces(plan) -> list[tuple[str, int, int, bool]]:
    return [(p.sequence.request.id, p.start, p.length, p.last) for p in plan.pieces]


def test_a_prompt_longer_than_the_chunk_is_split():
    scheduler = Scheduler(scheduler_limits(chunk=8))
    scheduler.add(request("a", 19))
    seen = []
    for _ in range(3):
        plan = scheduler.plan(0.0)
        seen += pieces(plan)
        assert not plan.decodes
        read(scheduler, plan)
    assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 3, True)]
    assert names(scheduler.plan(0.0).decodes) == ["a"]


def test_a_chunk_serves_several_prompts_beside_the_decodes():
    scheduler = Scheduler(scheduler_limits(chunk=8))
    scheduler.add(request("a", 3))
    read(scheduler, scheduler.plan(0.0))
    for name in "bcd":
        scheduler.add(request(name, 3))
    plan = scheduler.plan(0.0)
    assert names(plan.decodes) == ["a"]
    assert pieces(plan) == [("b", 0, 3, True), ("c", 0, 3, True), ("d", 0, 2, False)]
    assert names(plan.admitted) == ["b", "c", "d"]
    assert [row for row, _ in plan.sampled()] == [
        0,
        1,
        2,
    ]  # d's piece is not the last of its prompt
    read(scheduler, plan)
    plan = scheduler.plan(0.0)
    assert names(plan.decodes) == ["a", "b", "c"]
    assert pieces(plan) == [("d", 2, 1, True)]


def test_a_chunk_has_at_most_so_many_pieces():
    scheduler = Scheduler(scheduler_limits(num_slots=20, chunk=64, pages=(50,)))
    for i in range(12):
        scheduler.add(request(f"{i}", 2))
    assert len(scheduler.plan(0.0).pieces) == MAX_PIECES
    plan = scheduler.plan(0.0)
    assert (len(plan.decodes), len(plan.pieces)) == (8, 4)


def test_slots_bound_what_runs_and_the_queue_keeps_its_order():
    scheduler = Scheduler(scheduler_limits(num_slots=2))
    for name in "abc":
        scheduler.add(request(name, 2))
    plan = scheduler.plan(0.0)
    assert names(scheduler.running) == ["a", "b"] and names(scheduler.waiting) == ["c"]
    read(scheduler, plan, ended=("a",))
    assert names(scheduler.plan(1.5).admitted) == ["c"]
    assert scheduler.by_id["c"].first_scheduled == 1.5


def test_nothing_is_planned_past_the_output_limit():
    """Overlapped: the last token is in flight, so the next step has nothing for the sequence."""
    scheduler = Scheduler(scheduler_limits())
    scheduler.add(request("a", 2, output=2))
    assert scheduler.plan(0.0).pieces
    assert scheduler.plan(0.0).decodes
    assert scheduler.plan(0.0) is None


def test_nobody_overtakes_a_prompt_that_waits_for_pages():
    scheduler = Scheduler(scheduler_limits(num_slots=4, chunk=16, pages=(7,)))
    scheduler.add(request("a", 12))
    read(scheduler, scheduler.plan(0.0))
    scheduler.add(request("large", 16))
    scheduler.add(request("small", 1))
    assert not scheduler.plan(0.0).pieces
    assert names(scheduler.waiting) == ["large", "small"]


def test_the_newest_sequence_is_preempted_and_waits_in_front():
    scheduler = Scheduler(scheduler_limits(num_slots=3, chunk=16, page_size=4, pages=(7,)))
    for name, prompt in (("a", 7), ("b", 7)):
        scheduler.add(request(name, prompt, output=12))
    scheduler.add(request("c", 7))
    read(scheduler, scheduler.plan(0.0))  # a and b hold 2 pages each; c needs 2 and one to spare
    assert names(scheduler.waiting) == ["c"]
    for _ in range(2):  # tokens 8 and 9: both grow to 3 pages, and the pool is full
        read(scheduler, scheduler.plan(0.0))
    assert scheduler.allocators[0].num_free == 0
    for _ in range(3):
        plan = scheduler.plan(0.0)
        read(scheduler, plan)
    plan = scheduler.plan(0.0)
    assert names(plan.decodes) == ["a"] and scheduler.preemptions == 1
    victim = scheduler.by_id["b"]
    assert scheduler.waiting.head() is victim and len(scheduler.waiting) == 2
    assert victim.slot == NO_SLOT and victim.pages == []
    read(scheduler, plan, ended=("a",))
    plan = scheduler.plan(0.0)
    assert pieces(plan)[0] == ("b", 8, 5, True), "two of its three pages were still cached"
    assert victim.first_scheduled == 0.0


def test_pages_come_back_once_the_last_step_that_may_write_them_was_read():
    scheduler = Scheduler(scheduler_limits())
    scheduler.add(request("a", 5, output=9))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.finish(scheduler.by_id["a"])  # cancelled with two steps on their way
    allocator = scheduler.allocators[0]
    assert sorted(scheduler._free_slots) == [0, 1, 2, 3] and allocator.num_used == 2
    read(scheduler, first)
    assert allocator.num_used == 2
    read(scheduler, second)
    assert allocator.num_used == 0


def test_each_sequence_gets_its_pages_back_after_its_own_last_step():
    """Read together, the one whose last step is later is listed first: it delays no other."""
    scheduler = Scheduler(scheduler_limits(num_slots=2))
    scheduler.add(request("goes on", 4, output=9))
    scheduler.add(request("at its limit", 4, output=1))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert names(second.decodes) == ["goes on"]
    read(scheduler, first, ended=("goes on", "at its limit"))
    assert scheduler.allocators[0].num_used == 2, "only the pages that the second step may write"
    read(scheduler, second)
    assert scheduler.allocators[0].num_used == 0


def test_who_is_at_its_limit_leaves_its_slot_before_its_last_token_is_read():
    scheduler = Scheduler(scheduler_limits(num_slots=1, page_size=4, pages=(6,)))
    for name, output in (("a", 2), ("b", 3)):
        scheduler.add(request(name, 4, output))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert names(first.admitted) == ["a"] and names(second.decodes) == ["a"]
    third = scheduler.plan(0.0)  # the step of a's last token is not read yet
    assert names(third.admitted) == ["b"] and third.pieces[0].sequence.slot == 0
    assert names(scheduler.leaving) == ["a"] and scheduler.allocators[0].num_used == 3
    scheduler.check_invariants()
    read(scheduler, first)
    read(scheduler, second, ended=("a",))
    assert not scheduler.leaving and scheduler.allocators[0].num_used == 1
    read(scheduler, third)
    scheduler.finish(scheduler.by_id["b"])


def test_who_has_left_its_slot_can_be_cancelled():
    scheduler = Scheduler(scheduler_limits(num_slots=1, page_size=4, pages=(6,)))
    scheduler.add(request("a", 4, 1))
    first = scheduler.plan(0.0)
    assert scheduler.plan(0.0) is None and names(scheduler.leaving) == ["a"]
    scheduler.finish(scheduler.by_id["a"])
    scheduler.check_invariants()
    assert scheduler.allocators[0].num_used == 1, "the step may still write it"
    read(scheduler, first)
    assert scheduler.allocators[0].num_used == 0 and not scheduler.by_id


def test_nobody_is_preempted_for_pages_that_a_leaving_sequence_brings_back():
    scheduler = Scheduler(scheduler_limits(num_slots=2, chunk=16, page_size=4, pages=(4,)))
    scheduler.add(request("a", 4, output=8))
    scheduler.add(request("b", 3, output=2))
    plans = [scheduler.plan(0.0) for _ in range(5)]
    assert names(plans[0].admitted) == ["a", "b"] and names(plans[4].decodes) == ["a"]
    assert scheduler.plan(0.0) is None, "a needs a third page, and b's is on its way"
    assert scheduler.preemptions == 0
    read(scheduler, plans[0])
    read(scheduler, plans[1], ended=("b",))
    assert names(scheduler.plan(0.0).decodes) == ["a"]


def test_a_sequence_without_a_page_sits_out_while_pages_are_on_their_way():
    scheduler = Scheduler(scheduler_limits(num_slots=3, chunk=16, page_size=4, pages=(4,)))
    scheduler.add(request("a", 4, output=8))
    scheduler.add(request("b", 3, output=8))
    first = scheduler.plan(0.0)
    assert names(first.admitted) == ["a", "b"]
    second = scheduler.plan(0.0)
    assert names(second.decodes) == ["a", "b"]  # a has the third page now
    scheduler.finish(scheduler.by_id["b"])
    read(scheduler, first)
    third = [scheduler.plan(0.0) for _ in range(3)]
    assert all(names(plan.decodes) == ["a"] for plan in third)
    assert scheduler.plan(0.0) is None, "b's page is not back yet, and nobody is preempted"
    assert scheduler.preemptions == 0
    read(scheduler, second)
    assert names(scheduler.plan(0.0).decodes) == ["a"]


@pytest.mark.parametrize("output", [2, 9], ids=["its last token", "its last place on a page"])
def test_a_row_held_back_after_its_step_was_planned_gets_another_turn_and_nothing_else(output):
    scheduler = Scheduler(scheduler_limits(num_slots=1, page_size=4))
    scheduler.add(request("a", 3, output))
    read(scheduler, scheduler.plan(0.0))
    assert names(scheduler.plan(0.0).decodes) == ["a"]
    scheduler.by_id["a"].num_computed_tokens -= 1
    plan = scheduler.plan(0.0)
    assert names(plan.decodes) == ["a"] and not plan.deltas
    scheduler.check_invariants()
    plan = scheduler.plan(0.0)
    if output == 2:
        assert plan is None and names(scheduler.leaving) == ["a"]
    else:
        assert [delta[:3] for delta in plan.deltas] == [(0, 0, 1)]
    scheduler.check_invariants()


def test_two_groups_grow_together():
    scheduler = Scheduler(scheduler_limits(pages=(9, 20)))
    scheduler.add(request("a", 4, output=12))
    plans = [scheduler.plan(0.0) for _ in range(6)]
    entries = [delta for plan in plans for delta in plan.deltas]
    assert [(group, slot, index) for group, slot, index, _ in entries] == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 0, 2),
        (1, 0, 2),
    ]
    scheduler.check_invariants()


def test_expired_names_each_late_sequence_once():
    scheduler = Scheduler(scheduler_limits())
    for name, deadline in (("a", 3.0), ("b", 1.0), ("c", None), ("d", 2.0)):
        scheduler.add(request(name, 2, deadline=deadline))
    scheduler.finish(scheduler.by_id["d"])
    assert names(scheduler.deadlines.expired(0.5)) == []
    assert names(scheduler.deadlines.expired(2.5)) == ["b"]
    assert names(scheduler.deadlines.expired(3.0)) == ["a"]
    assert names(scheduler.deadlines.expired(9.0)) == []


def test_far_deadlines_of_ended_requests_do_not_pile_up():
    scheduler = Scheduler(scheduler_limits())
    scheduler.add(request("stays", 2, deadline=5e5))
    for i in range(2000):
        scheduler.add(request(f"{i}", 2, deadline=1e6 - i))
        scheduler.finish(scheduler.by_id[f"{i}"])
    assert len(scheduler.deadlines._heap) < 100
    assert names(scheduler.deadlines.expired(1e5)) == []
    assert names(scheduler.deadlines.expired(1e6)) == ["stays"]


@pytest.mark.parametrize("damage", ["slot", "page", "lost"])
def test_check_invariants_notices(damage):
    scheduler = Scheduler(scheduler_limits())
    scheduler.add(request("a", 5))
    scheduler.plan(0.0)
    scheduler.check_invariants()
    if damage == "slot":
        scheduler._free_slots.append(scheduler.running[0].slot)
    elif damage == "page":
        scheduler.running[0].pages[0].pop()
    else:
        scheduler.running.pop()
    with pytest.raises(AssertionError):
        scheduler.check_invariants()
