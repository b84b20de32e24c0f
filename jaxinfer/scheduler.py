"""Decides what each step does. Host only: plain Python, no clock of its own, no JAX.

There is no prefill mode and decode mode. Every step takes all sequences that can decode one more
token, then fills what is left of the chunk budget with prompt tokens: of sequences already
admitted and of waiting ones while slots and pages last, the most urgent first. When a decoding
sequence needs a page and none is available, the least urgent, latest admitted one is preempted: it
gives up its pages and waits in front of its peers, to be recomputed or to get its pages back from
host memory. The same happens when somebody more urgent finds no room. Steps are planned before the
previous one was read, so tokens in flight are counted, not known.

Where programs do not agree to the last bit (determinism "fixed"), prompts and outputs are computed
by different steps always, and a preempted sequence is computed again from its prompt.
"""

from __future__ import annotations

import bisect
from collections import deque

from jaxinfer.admission import Admission
from jaxinfer.chunk_turns import ChunkTurns
from jaxinfer.deadlines import Deadlines, check_in_time
from jaxinfer.decoding import Decoding, urgency
from jaxinfer.load import KEPT_RECORDS, StepRecord
from jaxinfer.pace import Pace, StepWatch
from jaxinfer.page_allocator import PageAllocator
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy, ThrashGuard
from jaxinfer.prefix_cache import namespace_key
from jaxinfer.request import Request
from jaxinfer.scheduler_check import check_scheduler
from jaxinfer.sequence import NO_SLOT, NOT_WAITING, Sequence
from jaxinfer.sequence_pages import PageMove, SequencePages
from jaxinfer.step_plan import MAX_PIECES, Piece, StepPlan
from jaxinfer.waiting_queue import WaitingQueue


class Scheduler:
    """Owns the waiting queue, the running sequences, the slots and the pages."""

    def __init__(self, limits: SchedulerLimits, policy: SchedulerPolicy | None = None):
        self.limits, self.policy = limits, policy or SchedulerPolicy()
        policy = self.policy
        self.pages = SequencePages(
            limits.num_pages,
            limits.page_size,
            policy.host_pages,
            limits.windows,
            publishes_outputs=not policy.separate_phases,  # they were computed by another program
        )
        self.waiting = WaitingQueue(
            policy.ageing, dict(policy.tenant_weights), policy.batch_priority
        )
        self.running: list[Sequence] = []  # most urgent first, then in order of arrival
        self.leaving: set[Sequence] = set()  # no slot any more: their last token is on its way
        self.by_id: dict[str, Sequence] = {}
        self.deadlines = Deadlines(self.by_id)
        self.pace = Pace(limits.chunk_tokens, policy.tpot_target, policy.separate_phases)
        self.thrash = ThrashGuard(limits.page_size)
        self._admission = Admission(limits, policy, self.pages, self.thrash, self.running)
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._page_outs: list[PageMove] = []  # to go out with the next step
        self._arrivals = self._step = self._recorded = 0
        self._chunk_was_last = False
        self._held_back: Sequence | None = None  # who was next and could not be admitted
        self._turns = ChunkTurns(self.waiting)
        self._watch = StepWatch(self.pace)
        self._decoding = Decoding(limits.page_size)

    @property
    def has_work(self) -> bool:
        return len(self.by_id) > len(self.waiting.held)  # those that are not held

    @property
    def allocators(self) -> list[PageAllocator]:
        return self.pages.allocators

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises ValueError if its id is in use, LateError if its first token is not to be expected
        before its deadline; then it is not queued.
        """
        if request.id in self.by_id:
            raise ValueError(f"request id {request.id!r} is already in use")
        scheduling = request.scheduling
        sequence = Sequence(request, tokens=list(request.prompt), level=scheduling.priority)
        sequence.order = self._arrivals = self._arrivals + 1
        if self.policy.prefix_cache:
            sequence.root = namespace_key(scheduling.tenant, scheduling.cache_salt)
        elif request.group:  # samples of one prompt share its pages anyway
            sequence.root = namespace_key(scheduling.tenant, scheduling.cache_salt, request.group)
        follows = request.group in self.by_id  # the first sample of its prompt was taken
        sequence.to_compute = self.pages.to_compute(sequence, follows)
        if request.deadline is not None and not follows:
            free = 0 if self._goes_after_held_back(sequence) else len(self._free_slots)
            check_in_time(sequence, self.waiting, self.running, free, self.pace)
        self.by_id[request.id] = sequence
        if request.deadline is not None:
            self.deadlines.add(request.id, request.deadline)
        self.waiting.push(sequence, request.arrival)
        return sequence

    def _goes_after_held_back(self, sequence: Sequence) -> bool:
        """Whether a slot that is free is not for it: somebody as urgent has no pages to take it."""
        held = self._held_back
        return held is not None and held.entry != NOT_WAITING and held.level <= sequence.level

    def finish(self, sequence: Sequence, failed: bool = False) -> None:
        """End a sequence. Its slot is free now, its pages once no step can write them."""
        sequence.finished = True
        del self.by_id[sequence.request.id]
        if sequence.slot != NO_SLOT:
            self._vacate(sequence)
        elif sequence in self.leaving:
            self.leaving.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.pages.forget_host(sequence)
            return
        self._watch.ended()
        if failed:
            self.pages.withdraw(sequence)
        else:
            self._publish_output(sequence)
        self.pages.release(sequence)

    def hold(self, sequence: Sequence, held: bool, now: float) -> None:
        """Set a sequence aside, without slot and pages, or let it go on, first of its peers."""
        if held == (sequence in self.waiting.held) or sequence in self.leaving:
            return
        if sequence.slot != NO_SLOT:
            self._give_up(sequence)
        else:
            self.waiting.remove(sequence)
        if held:
            self.waiting.held.add(sequence)
        else:
            self.waiting.push(sequence, now, preempted=True)

    def retire(self, plan: StepPlan) -> None:
        """A step was read: pages that only it or earlier ones could write come back."""
        self.pages.retire(plan.number)
        self._watch.read(plan, more=bool(self.by_id))

    def stop(self) -> None:
        """No step is on its way any more, whatever was planned."""
        self.pages.retire(self._step)

    # -- one step --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        self._watch.planning(now)
        self._leave()
        self._rise(now)
        plan = StepPlan(self._step)
        self._make_room(now)
        if not (self.policy.separate_phases and self._plan_chunk_alone(plan, now)):
            self._plan_decodes(plan, now)
            self._resume(plan, now)
            if not self.policy.separate_phases:
                self._plan_chunk(plan, now, self.pace.chunk_budget(len(plan.decodes)))
        if not plan.decodes and not plan.pieces:
            self._watch.idle()
            return None
        self._dispatch(plan)
        self._record(plan, now)
        return plan

    def _rise(self, now: float) -> None:
        """Who waited long enough rises; of the batch class, as many as may run at once."""
        reserved = self.policy.interactive_reserve > 0
        slots = self._admission.batch_slots_left() if reserved else None
        self.waiting.rise(now, self.running, slots)

    def _leave(self) -> None:
        """Who needs no further step makes room for the next one. Its pages stay until its last
        token is read: they are found by it."""
        for sequence in self._decoding.complete():
            self._vacate(sequence)
            self.leaving.add(sequence)

    def _dispatch(self, plan: StepPlan) -> None:
        self._decoding.step_planned(plan)
        plan.page_outs, self._page_outs = self._page_outs, []
        streams = len(plan.decodes) or sum(sequence.decodes for sequence in self.running)
        plan.expected = self.pace.expect(len(plan.decodes), plan.chunk_tokens, streams)
        plan.running = len(self.running)
        self.pages.step_planned()
        self._chunk_was_last = not plan.decodes
        self._step += 1

    def _record(self, plan: StepPlan, now: float) -> None:
        self.thrash.step()
        # Since the last record: also of plans that came to nothing.
        preempted, self._recorded = self.preemptions - self._recorded, self.preemptions
        self.records.append(
            StepRecord(
                plan.number, now, len(self.running), len(self.waiting), len(plan.decodes),
                plan.chunk_tokens, len(plan.admitted), preempted, *self.pages.count(),
            )
        )  # fmt: skip

    def _make_room(self, now: float) -> None:
        """Preempt less urgent sequences for waiting ones that lack a slot or pages, if all of them
        together have the pages that the first of these lacks."""
        head = self.waiting.head()
        if head is None or not self.running or self.running[-1].level <= head.level:
            return
        short, givers = self._who_gives_pages(head)
        if short and not givers:
            return
        while self.running and self.running[-1].level > head.level:
            urgent = self.waiting.more_urgent(self.running[-1].level)
            enough = len(self._free_slots) >= min(urgent, MAX_PIECES)
            if enough and not self._admission.class_is_full(head):
                break
            self._preempt(self.running[-1], now, for_pages=False)
        _, givers = self._who_gives_pages(head)
        for victim in givers:
            self._preempt(victim, now)

    def _who_gives_pages(self, head: Sequence) -> tuple[bool, list[Sequence]]:
        """Whether a waiting sequence lacks pages that are not on their way, and which less urgent
        ones must give up theirs for it, the last first: none if all of them would not do."""
        short = self._admission.lacking(head, self._pages_for(head), self._found_for(head))
        if short <= 0 or self._pages_on_their_way():
            return False, []
        victims = [s for s in reversed(self.running) if s.level > head.level]
        return True, victims[: self.pages.how_many_give(victims, short)]

    def _plan_decodes(self, plan: StepPlan, now: float) -> None:
        """All that can decode, most urgent first, and the pages they need for it."""
        full = self._decoding.full()
        room = min(self.pages.available, len(full))
        self._grow(full[:room], plan)
        for sequence in full[room:]:
            self._grow_under_pressure(sequence, plan, now)
        plan.decodes = self._decoding.ready()

    def _grow_under_pressure(self, sequence: Sequence, plan: StepPlan, now: float) -> None:
        """Preempt the last running sequences for a page, itself in the end. While pages are on
        their way it sits out instead."""
        while sequence.slot != NO_SLOT:
            if self.pages.available:
                self._grow([sequence], plan)
                return
            if self._pages_on_their_way():
                return
            self._preempt(self.running[-1], now)

    def _grow(self, sequences: list[Sequence], plan: StepPlan) -> None:
        """One page more in each group for decoding sequences whose pages are full."""
        self.pages.note_filled(sequences)
        plan.deltas += self.pages.grow(sequences)
        self._decoding.grown(sequences)
        self.waiting.charge(sequences, self.limits.page_size)

    def _plan_chunk_alone(self, plan: StepPlan, now: float) -> bool:
        """A step of prompts only, unless it is the turn of those that decode."""
        if self._chunk_was_last and self._decoding:
            return False
        self._plan_chunk(plan, now, self.pace.chunk_budget(len(self._decoding)))
        return bool(plan.pieces)

    def _plan_chunk(self, plan: StepPlan, now: float, budget: int) -> None:
        """Prompt tokens: by urgency, then by who was served least, those in progress first."""
        prefilling = self._turns.in_progress()
        begun, wanted = len(prefilling), bool(prefilling or self.waiting)
        blocked = False
        while budget > 0 and len(plan.pieces) < MAX_PIECES:
            head = None if blocked else self.waiting.head()
            if head is not None and not (prefilling and self._turns.goes_on(prefilling[0], head)):
                blocked = bool(head.host_pages) or not self._admit(head, plan, now)
                self._held_back = head if blocked else None
                if not blocked:
                    budget -= self._add_piece(head, budget, plan)
            elif prefilling:
                budget -= self._add_piece(prefilling.popleft(), budget, plan)
            else:
                break
        if plan.pieces:
            self._turns.chunk_planned(begun, len(prefilling))
        self.pace.note_chunk(wanted and not blocked, plan.chunk_tokens)

    def _resume(self, plan: StepPlan, now: float) -> None:
        """Sequences whose pages wait in host memory decode on, if it is their turn."""
        while len(plan.admitted) < MAX_PIECES and (head := self.waiting.head()) is not None:
            if not head.host_pages or not self._admit(head, plan, now):
                return
            plan.resumed.append(head)
            plan.decodes.append(head)

    def _admit(self, sequence: Sequence, plan: StepPlan, now: float) -> bool:
        """A slot and the pages of all it must compute, for a waiting sequence, or False."""
        if sequence.num_in_flight or not self._free_slots:
            return False  # preempted a moment ago, its last token is not known yet; or no room
        if self.policy.separate_phases and not sequence.host_pages:
            sequence.start_again()
        needed, found = self._pages_for(sequence), self._found_for(sequence)
        if not sequence.rules_are_known or not self._admission.allows(sequence, needed, found):
            return False
        self.waiting.remove(sequence)
        self.pages.give(sequence, needed, found)
        sequence.slot = self._free_slots.pop()
        sequence.prefill_target = len(sequence.tokens)
        sequence.num_computed_tokens = len(found[0]) * self.limits.page_size
        if sequence.host_pages:
            plan.page_ins += self.pages.restore(sequence)
            sequence.prefill_target = sequence.num_computed_tokens = len(sequence.tokens) - 1
            self.pages.trim(sequence, sequence.num_computed_tokens)
        if sequence.first_scheduled is None:
            self._count_hits(sequence)
            sequence.first_scheduled = now
        sequence.waited = now - sequence.entered
        sequence.tokens_then = len(sequence.tokens)
        bisect.insort(self.running, sequence, key=urgency)
        (self._turns if sequence.prefilling else self._decoding).add(sequence)
        plan.admitted.append(sequence)
        return True

    def _found_for(self, sequence: Sequence) -> list[list[int]]:
        if sequence.host_pages:  # what it computed itself comes back, to the last bit
            return [[] for _ in self.allocators]
        return self.pages.lookup(sequence)

    def _count_hits(self, sequence: Sequence) -> None:
        sequence.cached_tokens = sequence.num_computed_tokens
        if self.policy.prefix_cache:
            self.prefix_queries += sequence.prompt_len
            self.prefix_hits += sequence.cached_tokens

    def _add_piece(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """The next part of a prompt, at most `budget` tokens; returns its length."""
        start = sequence.num_computed_tokens
        length = min(budget, sequence.prefill_target - start)
        last = start + length == sequence.prefill_target
        plan.pieces.append(Piece(sequence, start, length, last, sequence.score(start + length)))
        sequence.num_computed_tokens += length
        self.waiting.charge([sequence], length)
        if last:
            self._turns.remove(sequence)
            self._decoding.add(sequence)
        sequence.last_step = plan.number
        # Found from now on: whoever finds these pages reads them in this step or in a later one,
        # and a step writes all its keys and values before it reads any.
        self.pages.publish(sequence, sequence.num_computed_tokens)
        self.pages.trim(sequence, start)
        return length

    # -- slots and pages ---------------------------------------------------------------------------

    def _pages_for(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self.limits.page_size)

    def _publish_output(self, sequence: Sequence) -> None:
        """What it has computed since its prompt, when it takes a page or gives them all up: who
        begins with a whole output comes later than that."""
        # Of a token that ended it nothing is computed, though a step for it may have been planned.
        known = len(sequence.tokens) - sequence.finished
        self.pages.publish(sequence, min(known, sequence.num_computed_tokens))

    def _pages_on_their_way(self) -> bool:
        """Whether a step in flight brings some back when it is read."""
        return self.pages.releases_pending or bool(self.leaving)

    def _preempt(self, sequence: Sequence, now: float, for_pages: bool = True) -> None:
        """Back to the front of its peers in the queue."""
        self.preemptions += 1
        sequence.preemptions += 1
        if sequence.preempted and for_pages:  # more free pages would not help who lost its slot
            done = len(sequence.tokens) + sequence.num_in_flight - sequence.tokens_then
            self.thrash.preempted_again(done)
        if not sequence.prefilling:
            self._page_outs += self.pages.offload(sequence)
        self._give_up(sequence)
        self.waiting.push(sequence, now, preempted=True)

    def _give_up(self, sequence: Sequence) -> None:
        """Its slot and pages, which the prefix cache may keep."""
        self._publish_output(sequence)
        self._vacate(sequence)
        self.pages.release(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Give up its slot."""
        self.running.remove(sequence)
        (self._turns if sequence.prefilling else self._decoding).remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT

    def check_invariants(self) -> None:
        """AssertionError unless slots, pages and queues account for each other exactly."""
        check_scheduler(self, self._free_slots, self._decoding, self._turns)
