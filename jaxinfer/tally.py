"""What an engine counts: requests by how they ended, and the latencies of the last of them."""

from __future__ import annotations

from collections import deque

from jaxinfer.load import KEPT_LATENCIES, Percentiles
from jaxinfer.request import Counters, FinishReason
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import Sequence

_FINISHED = (
    FinishReason.EOS,
    FinishReason.STOP_ID,
    FinishReason.STOP_STRING,
    FinishReason.LENGTH,
)


class Tally:
    """Of one engine, which counts tokens and what came by itself."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._ttft: deque[float] = deque(maxlen=KEPT_LATENCIES)
        self._tpot: deque[float] = deque(maxlen=KEPT_LATENCIES)

    def refused(self, reason: FinishReason) -> None:
        """A request was never queued."""
        self.counters.refused += 1
        self._count(reason)

    def ended(self, reason: FinishReason) -> None:
        """A request that was taken has ended."""
        if reason in _FINISHED:
            self.counters.finished += 1
        else:
            self.counters.aborted += 1
        self._count(reason)

    def _count(self, reason: FinishReason) -> None:
        by_reason = self.counters.by_reason
        by_reason[reason.value] = by_reason.get(reason.value, 0) + 1

    def first_token(self, sequence: Sequence, now: float) -> None:
        """It is there."""
        sequence.first_token = now
        self._ttft.append(now - sequence.request.arrival)

    def last_token(self, sequence: Sequence, now: float) -> None:
        """No more will come; there may have been none."""
        later_tokens = len(sequence.tokens) - sequence.prompt_len - 1
        if sequence.first_token is not None and later_tokens > 0:
            self._tpot.append((now - sequence.first_token) / later_tokens)

    def decisions(self, scheduler: Scheduler) -> None:
        """Take over what the scheduler counts."""
        counters = self.counters
        counters.preemptions, counters.thrashes = scheduler.preemptions, scheduler.thrash.count
        counters.prefix_queries = scheduler.prefix_queries
        counters.prefix_hits = scheduler.prefix_hits

    def latencies(self) -> tuple[Percentiles, Percentiles]:
        """Of the times to a first token, and between tokens. May be asked from any thread."""
        return Percentiles.of([*self._ttft]), Percentiles.of([*self._tpot])
