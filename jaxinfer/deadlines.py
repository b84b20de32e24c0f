"""Which requests are past their deadline, or will be. Host only; time is an input."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from collections.abc import Sequence as Row

from jaxinfer.pace import Pace
from jaxinfer.request import LateError
from jaxinfer.sequence import Sequence
from jaxinfer.sizes import seconds_text
from jaxinfer.waiting_queue import WaitingQueue


class Deadlines:
    """The deadlines of the sequences in `by_id`, which somebody else keeps."""

    def __init__(self, by_id: Mapping[str, Sequence]):
        self._by_id = by_id
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(self._by_id) + 64:
            self._forget_ended()

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, each named once."""
        late: dict[str, Sequence] = {}
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            sequence = self._by_id.get(request_id)
            # An id may be in use again, by a request with another deadline or none.
            deadline = None if sequence is None else sequence.request.deadline
            if sequence is not None and deadline is not None and deadline <= now:
                late[request_id] = sequence
        return list(late.values())

    def _forget_ended(self) -> None:
        """Entries of ended requests stay until their deadline; far ones must not pile up."""
        known = ((id_, sequence.request.deadline) for id_, sequence in self._by_id.items())
        self._heap = sorted((late, id_) for id_, late in known if late is not None)


def check_in_time(
    sequence: Sequence,
    waiting: WaitingQueue,
    running: Row[Sequence],
    free_slots: int,
    pace: Pace,
) -> None:
    """Raise LateError if a sequence that comes now cannot expect its first token in time.

    `running` are in order of urgency. How long outputs may get plays no part.
    """
    request = sequence.request
    assert request.deadline is not None
    before, ahead = waiting.ahead_of(sequence, running)
    ahead += sequence.to_compute
    ends = before + 1 - free_slots
    if running and running[-1].level > sequence.level:
        ends = 0  # it takes the slot of somebody less urgent
    expected = pace.first_token_in(ahead, max(0.0, ends), len(running))
    if request.arrival + expected > request.deadline:
        raise LateError(
            f"the first token is expected in {seconds_text(expected)}, past the deadline in "
            f"{seconds_text(request.deadline - request.arrival)}; give more time or retry when "
            "load is lower"
        )
