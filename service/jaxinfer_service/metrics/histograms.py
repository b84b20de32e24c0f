"""Times and sizes of requests, counted into vLLM's buckets as the requests go on and end."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from jaxinfer.engine_link import Observer
from jaxinfer.load import StepRecord
from jaxinfer.request import FinishReason
from jaxinfer.stream import Sample

FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
SAMPLES = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    ends = (lead * 10**power for power in itertools.count() for lead in (1, 2, 5))
    return tuple(itertools.takewhile(lambda end: end <= most, ends))


class Histogram:
    """Observations by bucket; `ends` are the buckets' inclusive upper ends, in order."""

    def __init__(self, ends: Sequence[float]):
        self.ends = ends
        self.counts = [0] * (len(ends) + 1)
        self.sum = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; None is none."""
        if value is not None:
            self.counts[bisect.bisect_left(self.ends, value)] += 1
            self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, observations up to it), as Prometheus has them."""
        ends = [*(str(float(end)) for end in self.ends), "+Inf"]
        return list(zip(ends, map(float, itertools.accumulate(self.counts))))


class Histograms(Observer):
    """All of them. What a request did not come to, a first token say, is not counted for it.

    `max_model_len` is the largest number of tokens of a request.
    """

    def __init__(self, max_model_len: int):
        tokens = token_buckets(max_model_len)
        self.first_token = Histogram(FIRST_TOKEN)
        self.between_tokens = Histogram(BETWEEN_TOKENS)
        self.mean_between_tokens = Histogram(BETWEEN_TOKENS)
        self.whole, self.queued = Histogram(REQUEST), Histogram(REQUEST)
        self.prefill, self.decode, self.computed = (Histogram(REQUEST) for _ in range(3))
        self.prompt, self.generated, self.limit = (Histogram(tokens) for _ in range(3))
        self.prompt_computed = Histogram(tokens)
        self.prompt_cached = 0  # prompt tokens that the prefix cache had
        self.samples = Histogram(SAMPLES)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.ends: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self._last_step = -1

    def token(self, since_last: float) -> None:
        """A stream had a token, so many seconds after the one before."""
        self.between_tokens.observe(since_last)

    def ended(self, sample: Sample, reason: FinishReason, now: float) -> None:
        """A sample ended, whatever the reason."""
        request, output = sample.request, sample.output
        total, first, queued = now - request.arrival, output.first_token, output.queued
        if reason is FinishReason.LATE:  # it was refused
            return
        self.ends[reason] += 1
        self.whole.observe(total)
        self.queued.observe(queued)
        self.first_token.observe(first)
        if queued is not None:
            self.computed.observe(total - queued)
        if queued is not None and first is not None:
            self.prefill.observe(first - queued)
        if first is not None:
            self.decode.observe(total - first)
            if sample.generated > 1:
                self.mean_between_tokens.observe((total - first) / (sample.generated - 1))
        self.prompt.observe(len(request.prompt))
        if queued is not None:
            self.prompt_computed.observe(len(request.prompt) - output.cached_tokens)
            self.prompt_cached += output.cached_tokens
        self.generated.observe(sample.generated)
        self.limit.observe(request.max_new_tokens)
        if not output.index:
            self.samples.observe(request.params.n)

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Count the steps that are newer than those counted before; the newest are the last.

        The engine keeps the records of its last steps alone, so this has to be called more often
        than those take, however seldom anybody scrapes.
        """
        new = itertools.takewhile(lambda r: r.step > self._last_step, reversed(records))
        newest = self._last_step
        for record in new:
            self.step_tokens.observe(record.decodes + record.chunk_tokens)
            newest = max(newest, record.step)
        self._last_step = newest
