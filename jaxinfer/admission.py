"""What is kept free for others when a sequence wants a slot and pages. Host only."""

from __future__ import annotations

from collections.abc import Sequence as Row

from jaxinfer.config import MOST_RESERVED
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy, ThrashGuard
from jaxinfer.sequence import Sequence
from jaxinfer.sequence_pages import SequencePages


class Admission:
    """The rules by which a waiting sequence may run beside those in `running`, which somebody
    else keeps, the most urgent first."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: SchedulerPolicy,
        pages: SequencePages,
        thrash: ThrashGuard,
        running: Row[Sequence],
    ):
        self._policy, self._pages, self._thrash = policy, pages, thrash
        self._running = running
        self.saves_for: int | None = None  # level of one that waits for pages on their way
        # The batch class always has a slot, else it would never run.
        self._batch_slots = max(1, int(limits.num_slots * (1 - policy.interactive_reserve)))

    def allows(self, sequence: Sequence, whole: int, found: list[list[int]]) -> bool:
        """Whether there are pages for it, which fills `whole` a group, of which `found` are cached,
        and a slot for its class."""
        if self.class_is_full(sequence):
            return False
        return max(self.lacking(sequence, whole, found)) <= 0

    def lacking(self, sequence: Sequence, whole: int, found: list[list[int]]) -> list[int]:
        """Pages short by group beside what stays free for others. None above 0: they are there."""
        return self._pages.lacking(whole, found, self._reserve(sequence))

    def who_gives_pages(self, head: Sequence, leaving: bool) -> tuple[bool, list[Sequence]]:
        """Whether a waiting sequence lacks pages that are not on their way, and which less urgent
        ones must give up theirs for it, the last first: none if all of them would not do.

        `leaving`: some ended whose pages come back. While it waits for such, `saves_from` others.
        """
        whole, found = self._pages.wanted(head)
        short = self.lacking(head, whole, found)
        if max(short) <= 0:
            return False, []
        if leaving or self._pages.come_back(short):
            self.saves_for = head.level
            return False, []
        victims = [s for s in reversed(self._running) if s.level > head.level]
        return True, victims[: self._pages.how_many_give(victims, whole, found, short)]

    def saves_from(self, prompt: Sequence) -> bool:
        """Whether pages on their way are for somebody more urgent than a prompt in progress, which
        would take them again and again."""
        return self.saves_for is not None and prompt.level > self.saves_for

    def _reserve(self, sequence: Sequence) -> float:
        """The part of the pool that stays free for others. Who is more urgent than somebody that
        runs has those pages to grow into."""
        if not self._running:
            return 0.0
        first = self._running[-1].level > sequence.level
        reserved = 0.0 if first else self._policy.watermark + self._thrash.extra
        if sequence.level >= self._policy.batch_priority:
            reserved += self._policy.interactive_reserve
        return min(reserved, MOST_RESERVED)

    def class_is_full(self, sequence: Sequence) -> bool:
        """Whether the batch class, if the sequence is of it, has all the slots that it may have."""
        return sequence.level >= self._policy.batch_priority and self.batch_slots_left() <= 0

    def batch_slots_left(self) -> int:
        """Slots that the batch class may take besides those it has, also by having risen."""
        first = self._policy.batch_priority
        running = sum(s.request.scheduling.priority >= first for s in self._running)
        return self._batch_slots - running
