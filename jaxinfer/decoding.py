"""Who decodes in a step, and who needs a look before it goes on. Host only.

Most sequences need nothing for their next token: they have a page for it and are not complete. How
far that holds is known beforehand (`Sequence.decode_until`), so a step counts on who decodes, and
decisions are made only for those that came to that point: with full slots one in `page_size`.
"""

from __future__ import annotations

import bisect
import operator

from jaxinfer.sequence import Sequence
from jaxinfer.step_plan import StepPlan

urgency = operator.attrgetter("level", "order")  # of those that run, the lower the sooner


class Decoding:
    """The running sequences that are past their prompts."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._streams: list[Sequence] = []  # most urgent first, then in order of arrival
        self._due: dict[Sequence, None] = {}  # of these, whose pages are full or who is complete

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, sequence: Sequence) -> None:
        """A sequence has its prompt behind it, or came back with all that it had computed."""
        bisect.insort(self._streams, sequence, key=urgency)
        room = len(sequence.pages[0]) * self._page_size
        sequence.decode_until = min(room, sequence.most_tokens - 1)
        if sequence.num_computed_tokens >= sequence.decode_until:
            self._due[sequence] = None

    def grown(self, sequences: list[Sequence]) -> None:
        """Those that were full have one page more."""
        for sequence in sequences:
            room, most = sequence.decode_until + self._page_size, sequence.most_tokens - 1
            sequence.decode_until = room if room < most else most
            del self._due[sequence]

    def remove(self, sequence: Sequence) -> None:
        """It gave up its slot."""
        self._streams.remove(sequence)
        self._due.pop(sequence, None)
        sequence.decode_until = 0

    def complete(self) -> list[Sequence]:
        """Those whose last token is computed by steps that were planned."""
        self._look_again()
        return [s for s in self._due if s.num_computed_tokens >= s.most_tokens - 1]

    def _look_again(self) -> None:
        """Who was held back after its step had been planned did not come as far as it was to."""
        for sequence in [s for s in self._due if s.num_computed_tokens < s.decode_until]:
            del self._due[sequence]

    def full(self) -> list[Sequence]:
        """Those that need a page before they go on, most urgent first."""
        return sorted(self._due, key=urgency)

    def ready(self) -> list[Sequence]:
        """All others, most urgent first: they decode in the next step."""
        due = self._due  # they have their pages by now, unless there are none
        return [s for s in self._streams if s not in due] if due else self._streams.copy()

    def step_planned(self, plan: StepPlan) -> None:
        """A step computes a token more of its decodes. One turn a row: keep it lean."""
        number = plan.number
        for sequence in plan.decodes:
            computed = sequence.num_computed_tokens = sequence.num_computed_tokens + 1
            sequence.last_step = number
            if computed >= sequence.decode_until:
                self._due[sequence] = None

    def check_invariants(self, running: list[Sequence]) -> None:
        """AssertionError unless it has those of `running` that are past their prompts, in order,
        and knows who of them can go on."""
        past = [sequence for sequence in running if not sequence.prefilling]
        assert self._streams == past, "not those past their prompts"
        due = {s for s in past if s.num_computed_tokens >= s.decode_until}
        assert due <= self._due.keys() <= set(past), "who needs a look"
