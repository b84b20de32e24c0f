"""What holds between the parts of a scheduler after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxinfer.chunk_turns import ChunkTurns
from jaxinfer.decoding import Decoding, urgency
from jaxinfer.sequence import NO_SLOT

if TYPE_CHECKING:
    from jaxinfer.scheduler import Scheduler


def check_scheduler(
    scheduler: Scheduler, free_slots: list[int], decoding: Decoding, turns: ChunkTurns
) -> None:
    """AssertionError unless slots, pages and queues account for each other exactly."""
    waiting = [*scheduler.waiting, *scheduler.waiting.held]
    slots = [sequence.slot for sequence in scheduler.running]
    assert sorted(slots + free_slots) == list(range(scheduler.limits.num_slots)), "slots"
    assert all(sequence.slot == NO_SLOT for sequence in waiting), "a waiting slot"
    assert all(sequence.slot == NO_SLOT for sequence in scheduler.leaving), "a slot that was left"
    assert scheduler.running == sorted(scheduler.running, key=urgency), "running is out of order"
    decoding.check_invariants(scheduler.running)
    turns.check_invariants(scheduler.running)
    holding = [*scheduler.running, *scheduler.leaving]
    known = {id(s) for s in holding} | {id(s) for s in waiting}
    assert known == {id(s) for s in scheduler.by_id.values()}, "a sequence is lost or unknown"
    assert len(known) == len(holding) + len(waiting), "a sequence is in two places"
    scheduler.waiting.check_invariants()
    scheduler.pages.check_invariants(holding, waiting)
