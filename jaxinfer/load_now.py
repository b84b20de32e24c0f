"""The load of an engine at this moment."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxinfer.load import Load

if TYPE_CHECKING:
    from jaxinfer.engine import Engine


def load_of(engine: Engine) -> Load:
    """All of it but the latencies. To be called on the engine's thread."""
    scheduler, unread, counters = engine.scheduler, engine.unread, engine.counters
    return Load(
        slots=engine.limits.max_num_seqs,
        running=len(scheduler.running) + len(scheduler.leaving),
        waiting=len(scheduler.waiting) + len(unread) + len(scheduler.waiting.held),
        waiting_tokens=scheduler.waiting.tokens + unread.tokens,
        deferred=len(unread) + len(scheduler.waiting.passed),
        preempted=scheduler.waiting.preempted,
        held=len(scheduler.waiting.held),
        pages=scheduler.pages.count(),
        page_size=scheduler.limits.page_size,
        counters=dataclasses.replace(counters, by_reason=dict(counters.by_reason)),
    )
