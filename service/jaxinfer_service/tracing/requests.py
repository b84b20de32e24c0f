"""A span for every prompt that was queued, with what became of it.

Times and tokens are those that the front notes anyway: nothing is done while tokens come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from jaxinfer.engine_link import Observer
from jaxinfer.request import FinishReason, Request, SamplingParams
from jaxinfer.stream import Sample, Stream
from jaxinfer_service.tracing import names

_ENDS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
_MOST = (1 << 63) - 1  # of a whole number that can be sent
_SECOND = 1_000_000_000  # nanoseconds


@dataclass(slots=True)
class _Open:
    """A span whose prompt has samples that run; `began` is its arrival in ns of the Unix epoch."""

    span: Span
    began: int
    ends: dict[int, FinishReason] = field(default_factory=dict)  # by sample

    def at(self, after: float) -> int:
        """So many seconds after the arrival."""
        return self.began + round(after * _SECOND)


class RequestSpans(Observer):
    """`shown` gives the text of a prompt that its span is to have; None: none has it."""

    def __init__(
        self,
        tracer: Tracer,
        model: str,
        shown: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tracer, self._model, self._shown, self._clock = tracer, model, shown, clock
        self._open: dict[str, _Open] = {}

    def submitted(self, stream: Stream) -> None:
        request = stream.samples[0].request
        began = time.time_ns() - round((self._clock() - request.arrival) * _SECOND)
        operation = "chat" if stream.chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}", kind=SpanKind.INTERNAL, start_time=began
        )
        if not span.is_recording():
            return
        span.set_attributes({names.OPERATION: operation, names.PROVIDER: "jaxinfer"})
        span.set_attributes(self._asked(stream, request))
        self._open[stream.id] = _Open(span, began)

    def _asked(self, stream: Stream, request: Request) -> dict[str, Any]:
        said = {
            names.REQUEST_MODEL: self._model,
            names.RESPONSE_MODEL: self._model,
            names.RESPONSE_ID: stream.id,
            names.MAX_TOKENS: request.max_new_tokens,
            names.SEED: request.seed,
            names.INPUT_TOKENS: len(request.prompt),
        }
        said |= _params(request.params)
        if request.scheduling.priority:
            said[names.PRIORITY] = request.scheduling.priority
        if request.scheduling.tenant:
            said[names.TENANT] = request.scheduling.tenant
        if self._shown is not None:
            said[names.PROMPT] = self._shown(request.prompt)
        return said

    def ended(self, sample: Sample, reason: FinishReason, now: float) -> None:
        stream = sample.stream
        if (found := self._open.get(stream.id)) is None:
            return
        found.ends[sample.output.index] = reason
        if len(found.ends) == len(stream.samples):
            del self._open[stream.id]
            _end(found, stream, now - sample.request.arrival)


def _params(params: SamplingParams) -> dict[str, Any]:
    """Those that are not at the value that asks for nothing; temperature and top_p always."""
    said: dict[str, Any] = {names.TEMPERATURE: params.temperature, names.TOP_P: params.top_p}
    more = {
        names.TOP_K: min(max(params.top_k, 0), _MOST),
        names.PRESENCE_PENALTY: params.presence_penalty,
        names.FREQUENCY_PENALTY: params.frequency_penalty,
        names.CHOICES: params.n if params.n > 1 else 0,
    }
    if params.structured is not None:
        said[names.OUTPUT_TYPE] = "json" if "json" in params.structured.kind else "text"
    return said | {name: value for name, value in more.items() if value}


def _end(found: _Open, stream: Stream, total: float) -> None:
    """`total` seconds after the arrival the last sample ended."""
    outputs = [sample.output for sample in stream.samples]
    queued = min((o.queued for o in outputs if o.queued is not None), default=None)
    first = min((o.first_token for o in outputs if o.first_token is not None), default=None)
    said: dict[str, Any] = {
        names.FINISH_REASONS: [_ENDS.get(r, r.value) for _, r in sorted(found.ends.items())],
        names.OUTPUT_TOKENS: sum(sample.generated for sample in stream.samples),
        names.CACHED_TOKENS: min(output.cached_tokens for output in outputs),
        names.PREEMPTIONS: sum(output.preemptions for output in outputs),
        names.WHOLE: total,
    }
    span = found.span
    if queued is not None:
        said |= {names.IN_QUEUE: queued, names.IN_MODEL: total - queued}
        span.add_event("scheduled", timestamp=found.at(queued))
    if queued is not None and first is not None:
        said |= {names.IN_PREFILL: first - queued, names.IN_DECODE: total - first}
        said |= {names.FIRST_TOKEN: first, names.FIRST_CHUNK: first}
        span.add_event("first_token", timestamp=found.at(first))
    failed = [reason for reason in found.ends.values() if reason not in _ENDS]
    if failed:
        said[names.ERROR] = failed[0].value
    if any(reason is not FinishReason.CANCELLED for reason in failed):
        span.set_status(Status(StatusCode.ERROR, failed[0].value))
    span.set_attributes(said)
    span.end(found.at(total))
