"""Whose prompt goes on in a step's chunk. Host only.

By urgency, then by who was served least; of one tenant, a prompt in progress before one that waits.
However many tenants come, a prompt in progress waits for a few chunks of theirs in a row at most.
"""

from __future__ import annotations

from collections import deque

from jaxinfer.sequence import Sequence
from jaxinfer.waiting_queue import Running, WaitingQueue

MOST_PASSED_OVER = 8  # chunks in a row that only begin prompts while others could go on


class ChunkTurns:
    """Turns between prompts in progress and those in `waiting`, which somebody else keeps."""

    def __init__(self, waiting: WaitingQueue):
        self._waiting = waiting
        self._prompts: dict[Sequence, None] = {}  # in progress
        self._passed_over = 0  # chunks in a row

    def add(self, sequence: Sequence) -> None:
        """A sequence was admitted that has a part of its prompt to compute."""
        self._prompts[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Its prompt is computed, or it gave up its slot."""
        del self._prompts[sequence]

    def in_progress(self) -> deque[Sequence]:
        """Sequences with a part of their prompts to compute, in order of their turns."""
        served = self._waiting.service
        return deque(sorted(self._prompts, key=lambda s: (s.level, served(s), s.order)))

    def check_invariants(self, running: Running) -> None:
        """AssertionError unless it has those of `running` that have prompts to compute."""
        assert self._prompts.keys() == {s for s in running if s.prefilling}, "prompts in progress"

    def goes_on(self, admitted: Sequence, head: Sequence) -> bool:
        """Whether an admitted sequence goes on before a waiting one begins."""
        if admitted.level != head.level or self._passed_over >= MOST_PASSED_OVER:
            return admitted.level <= head.level
        return self._waiting.service(admitted) <= self._waiting.service(head)

    def chunk_planned(self, before: int, after: int) -> None:
        """Of the sequences in progress, so many had not gone on before and after a chunk."""
        self._passed_over = self._passed_over + 1 if 0 < before == after else 0
