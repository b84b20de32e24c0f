"""Sequences that are set aside for slow readers, and those that wait for their grammars."""

from __future__ import annotations

import pytest
from test_preemption import HIGH, LOW, harness

from jaxinfer.request import FinishReason


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [{}, {"separate_phases": True}, {"host_pages": (40,)}])
def test_who_is_held_leaves_its_place_to_others_and_goes_on_where_it_was(overlap, policy):
    run = harness(101, overlap, slots=1, **policy)
    slow = run.submit([1] * 10, 30)
    for _ in range(8):
        run.step()
    run.hold(slow, True)
    run.hold(slow, True)
    fast = run.submit([2] * 10, 5)
    while run.engine.has_work:
        run.step()
    before = [*run.outputs[slow]]
    assert fast in run.ends and slow not in run.ends and 0 < len(before) < 30
    assert all(allocator.num_used == 0 for allocator in run.scheduler.allocators)
    load = run.engine.load()
    assert (load.running, load.waiting, load.held) == (0, 1, 1)
    assert run.engine.counters.preemptions == 0 and run.step() == []
    run.hold(slow, False)
    run.hold(slow, False)
    run.hold("nobody", True)
    run.drain()
    assert run.outputs[slow][: len(before)] == before


def test_who_is_held_can_be_ended_and_who_waits_can_be_held():
    run = harness(101, slots=1)
    names = [run.submit([n] * 8, 20) for n in range(3)]
    for _ in range(5):
        run.step()
    run.hold(names[0], True)
    run.hold(names[2], True)  # it waits
    run.cancel(names[0])
    run.step()
    assert not run.scheduler.by_id[names[1]].finished
    run.hold(names[2], False)
    run.drain()
    late = run.submit([5] * 8, 20, timeout=8.0)
    for _ in range(4):
        run.step()
    run.hold(late, True)
    for _ in range(6):
        run.step()
    assert run.ends[late] is FinishReason.DEADLINE


class Rules:
    """Of a grammar whose process is away, until `are_known`."""

    are_known = False

    def follow(self, output):
        pass

    def forget(self):
        pass


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_waits_behind_who_waits_for_its_grammar(overlap):
    """It had a slot before, so it is first of its peers."""
    run = harness(101, overlap, slots=1)
    constrained = run.submit([1] * 4, 30, scheduling=LOW)
    for _ in range(5):
        run.step()
    rules = run.scheduler.by_id[constrained].rules = Rules()
    urgent = run.submit([2] * 4, 3, scheduling=HIGH)
    others = [run.submit([3 + n] * 4, 5, scheduling=LOW) for n in range(2)]
    for _ in range(40):
        run.step()
    assert {urgent, *others} == set(run.ends) and run.engine.load().waiting == 1
    assert run.engine.has_work and run.scheduler.plan(run.now) is None
    rules.are_known = True
    run.drain()
    assert constrained in run.ends


def test_who_was_passed_over_can_be_ended():
    run = harness(101, slots=1)
    constrained = run.submit([1] * 4, 30, scheduling=LOW)
    for _ in range(5):
        run.step()
    run.scheduler.by_id[constrained].rules = Rules()
    run.submit([2] * 4, 3, scheduling=HIGH)
    for _ in range(10):
        run.step()
    run.cancel(constrained)
    run.step()
    run.drain()
