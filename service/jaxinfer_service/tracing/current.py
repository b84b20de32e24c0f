"""The trace that the code at hand is a part of, be it a server's or a caller's.

Uses OpenTelemetry's API alone, which does nothing where nobody records spans.
"""

from __future__ import annotations

from opentelemetry import propagate, trace

MOST_CHARACTERS = 256  # of a value that a caller chose


def carried() -> tuple[tuple[str, str], ...]:
    """The metadata by which a call continues the caller's trace; none where it has no span."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ()
    found: dict[str, str] = {}
    propagate.inject(found)
    return tuple(found.items())


def trace_id() -> str:
    """Of the current span, as `traceparent` has it; "" without one."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def note(name: str, value: str | bool) -> None:
    """Say something about the current call, in the words of `names`."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute(name, clean(value) if isinstance(value, str) else value)


def clean(text: str) -> str:
    """Of what was sent, what can be: bounded, and without halves of surrogate pairs."""
    return text[:MOST_CHARACTERS].encode(errors="backslashreplace").decode()
