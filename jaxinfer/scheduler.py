"""Decides what each step does. Host only: plain Python, no clock of its own, no JAX.

There is no prefill mode and decode mode. Every step takes all sequences that can decode one more
token, then fills what is left of the chunk budget with prompt tokens: of sequences already
admitted, in order of admission, and of waiting ones while slots and pages last. When a decoding
sequence needs a page and none is free, the latest admitted one is preempted: its pages go back and
it waits in front of the queue to be recomputed. Steps are planned before the previous one was
read, so tokens in flight are counted, not known, and pages come back only once the last step that
may write them was read.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from jaxinfer.page_allocator import PageAllocator
from jaxinfer.request import Request
from jaxinfer.sequence import NO_SLOT, Sequence
from jaxinfer.step_plan import MAX_PIECES, Piece, StepPlan


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and the pool can hold."""

    num_slots: int
    chunk_tokens: int
    page_size: int
    num_pages: tuple[int, ...]  # by KV group, the null page included


class Scheduler:
    """Owns the waiting queue, the running sequences, the slots and the page allocators."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.allocators = [PageAllocator(n) for n in limits.num_pages]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.by_id: dict[str, Sequence] = {}
        self.preemptions = 0
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._deadlines: list[tuple[float, str]] = []
        self._releases: list[tuple[int, list[list[int]]]] = []  # last step, pages
        self._step = 0
        self._retired = -1  # the last step that was read

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its id is in use."""
        if request.id in self.by_id:
            raise ValueError(f"request id {request.id!r} is already in use")
        sequence = Sequence(request, tokens=list(request.prompt))
        self.by_id[request.id] = sequence
        self.waiting.append(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
            if len(self._deadlines) > 2 * len(self.by_id) + 64:
                self._forget_ended_deadlines()

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, each named once."""
        late: dict[str, Sequence] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            sequence = self.by_id.get(request_id)
            # An id may be in use again, by a request with another deadline or none.
            deadline = None if sequence is None else sequence.request.deadline
            if sequence is not None and deadline is not None and deadline <= now:
                late[request_id] = sequence
        return list(late.values())

    def _forget_ended_deadlines(self) -> None:
        """Entries of ended requests stay until their deadline; far ones must not pile up."""
        known = ((id_, sequence.request.deadline) for id_, sequence in self.by_id.items())
        self._deadlines = sorted((late, id_) for id_, late in known if late is not None)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence. Its slot is free now, its pages once no step can write them."""
        sequence.finished = True
        del self.by_id[sequence.request.id]
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence)

    def retire(self, step: int) -> None:
        """Step number `step` was read: pages that only it or earlier ones could write come back."""
        self._retired = step
        for last_step, pages in self._releases:
            if last_step <= step:
                self._give_back(pages)
        self._releases = [release for release in self._releases if release[0] > step]

    # -- one step --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        plan = StepPlan(self._step)
        self._plan_decodes(plan)
        self._plan_chunk(plan, now)
        if not plan.decodes and not plan.pieces:
            return None
        for sequence in plan.decodes:
            sequence.num_computed_tokens += 1
            sequence.num_in_flight += 1
            sequence.last_step = plan.number
        self._step += 1
        return plan

    def _plan_decodes(self, plan: StepPlan) -> None:
        page_size = self.limits.page_size
        for sequence in list(self.running):
            if sequence.slot == NO_SLOT or not sequence.decodes:
                continue  # preempted by an earlier turn of this loop, prefilling, or at its limit
            full = sequence.num_computed_tokens == len(sequence.pages[0]) * page_size
            if not full or self._grow(sequence, plan):
                plan.decodes.append(sequence)

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """One more page for a decoding sequence. False: none is free, it sits this step out.

        Preempts the latest admitted sequences, itself the last, unless pages are on their way.
        """
        while any(allocator.num_free == 0 for allocator in self.allocators):
            if self._releases:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._extend(sequence, 1)
        self._map(sequence, len(sequence.pages[0]), plan)
        return True

    def _plan_chunk(self, plan: StepPlan, now: float) -> None:
        budget = self.limits.chunk_tokens
        for sequence in self.running:
            if budget == 0 or len(plan.pieces) == MAX_PIECES:
                return
            if sequence.prefilling:
                budget -= self._add_piece(sequence, budget, plan)
        while self.waiting and budget and len(plan.pieces) < MAX_PIECES:
            if not self._admit(self.waiting[0], plan, now):
                return
            budget -= self._add_piece(self.waiting.popleft(), budget, plan)

    def _admit(self, sequence: Sequence, plan: StepPlan, now: float) -> bool:
        """A slot and the pages of all it must prefill, for a waiting sequence, or False."""
        if sequence.num_in_flight:
            return False  # preempted a moment ago: its last token is not known yet
        needed = -(-len(sequence.tokens) // self.limits.page_size)
        # One page more than needed: the first decode must not preempt what was just admitted.
        spare = needed + (1 if self.running else 0)
        if not self._free_slots or any(a.num_free < spare for a in self.allocators):
            return False
        sequence.slot = self._free_slots.pop()
        sequence.pages = [[] for _ in self.allocators]
        sequence.num_mapped = [0] * len(self.allocators)
        sequence.num_computed_tokens = 0
        sequence.prefill_target = len(sequence.tokens)
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
        self._extend(sequence, needed)
        self.running.append(sequence)
        plan.admitted.append(sequence)
        return True

    def _add_piece(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """The next part of a prompt, at most `budget` tokens; returns its length."""
        start = sequence.num_computed_tokens
        length = min(budget, sequence.prefill_target - start)
        last = start + length == sequence.prefill_target
        plan.pieces.append(Piece(sequence, start, length, last))
        self._map(sequence, -(-(start + length) // self.limits.page_size), plan)
        sequence.num_computed_tokens += length
        sequence.num_in_flight += last
        sequence.last_step = plan.number
        return length

    # -- slots and pages ---------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, count: int) -> None:
        for pages, allocator in zip(sequence.pages, self.allocators):
            pages.extend(allocator.allocate(count))

    def _map(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Tell the device of the sequence's first `count` pages."""
        for group, pages in enumerate(sequence.pages):
            for index in range(sequence.num_mapped[group], count):
                plan.deltas.append((group, sequence.slot, index, pages[index]))
            sequence.num_mapped[group] = max(sequence.num_mapped[group], count)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; it will be recomputed from its tokens."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.last_step <= self._retired:
            self._give_back(sequence.pages)
        else:
            self._releases.append((sequence.last_step, sequence.pages))
        sequence.pages = []

    def check_invariants(self) -> None:
        """AssertionError unless slots, pages and queues account for each other exactly."""
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.num_slots)), "slots"
        assert all(sequence.slot == NO_SLOT for sequence in self.waiting), "a waiting slot"
        known = {id(s) for s in self.running} | {id(s) for s in self.waiting}
        assert known == {id(s) for s in self.by_id.values()}, "a sequence is lost or unknown"
        for group, allocator in enumerate(self.allocators):
            allocator.check_invariants()
            held = [page for s in self.running for page in s.pages[group]]
            held += [page for _, pages in self._releases for page in pages[group]]
            assert len(held) == len(set(held)) == allocator.num_used, "pages leaked or shared"

    def _give_back(self, pages: list[list[int]]) -> None:
        for allocator, group in zip(self.allocators, pages):
            allocator.free(group)
