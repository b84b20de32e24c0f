"""Counts what JAX compiles after the engine was ready: that must stay 0.

It listens to JAX's own process-wide events, so a program nobody knew of is counted too.
"""

from __future__ import annotations

import jax

_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompiledAfterReadyError(RuntimeError):
    """JAX traced or compiled something while serving, and the guard is on."""


class CompileWatch:
    """`ready()` starts the count; `guard` turns the first event after it into an error."""

    def __init__(self, guard: bool = False):
        self.compiles_after_ready = 0
        self.guard = guard
        self._armed = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def ready(self) -> None:
        """Everything a request can reach is compiled from here on. The count begins at 0."""
        self._armed, self.compiles_after_ready = True, 0

    def close(self) -> None:
        """Stop listening."""
        self._armed = False
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not self._armed or event not in _COMPILE_EVENTS:
            return
        self.compiles_after_ready += 1
        if self.guard:
            raise CompiledAfterReadyError(f"{event} after ready ({kwargs})")
