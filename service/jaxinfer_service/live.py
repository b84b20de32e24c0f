"""What the engine is doing, as messages: once, or again and again for those who watch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

from jaxinfer.load import Load, Percentiles, SlotRow, StepRecord
from jaxinfer.request import Counters, EngineStoppedError, QueueFullError
from jaxinfer.validation import Violations
from jaxinfer_service.model import ServedModel
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

INTERVAL, MIN_INTERVAL, MAX_INTERVAL = 1.0, 0.1, 60.0  # seconds between messages of a watch
MAP_CELLS, MAX_MAP_CELLS = 256, 4096
MAX_STEPS = 1000  # step records of one message
MAX_WATCHERS = 8  # each takes some milliseconds of the event loop at every interval

_COUNTERS = tuple(pb.Counters.DESCRIPTOR.fields_by_name)


class LiveView:
    """Shows watchers the load, over gRPC and over HTTP; so many of them together."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._watchers = 0

    def close(self) -> None:
        """End what watches: the server has stopped."""
        self._closed.set()

    async def updates(
        self, model: ServedModel, interval: float, cells: int
    ) -> AsyncGenerator[pb.WatchLoadResponse]:
        """A message at once and then every `interval` seconds, with page maps of so many cells.

        Raises RequestError, QueueFullError for one watcher too many, and EngineStoppedError when
        the server has stopped.
        """
        found = Violations()
        found.number("interval", interval, MIN_INTERVAL, MAX_INTERVAL)
        found.integer("map_cells", cells, 0, MAX_MAP_CELLS)
        found.raise_if_any()
        if self._watchers == MAX_WATCHERS:
            raise QueueFullError(
                f"{MAX_WATCHERS} callers watch already, which is the limit; call Load instead, or "
                "retry once one has left",
                interval,
            )
        self._watchers += 1
        try:
            last = _last_before(model, interval)
            while not self._closed.is_set():
                message = _load_since(model, last, cells)
                if message.steps:
                    last = message.steps[-1].step
                yield message
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), interval)
        finally:
            self._watchers -= 1
        raise EngineStoppedError("the server has stopped")


def _last_before(model: ServedModel, interval: float) -> int:
    """The last step before the interval that ends now; -1 for none."""
    start = model.frontend.started_at + model.frontend.uptime - interval
    records = [*model.frontend.engine.records]  # a copy, because the engine goes on
    return next((record.step for record in reversed(records) if record.time < start), -1)


def _load_since(model: ServedModel, step: int, cells: int) -> pb.WatchLoadResponse:
    """The load, the steps after this one, and maps of so many cells."""
    steps = steps_after([*model.frontend.engine.records], step)
    states = model.frontend.engine.page_states() if cells else []
    return pb.WatchLoadResponse(
        load=load_message(model),
        steps=[_step(record, model.frontend.started_at) for record in steps[-MAX_STEPS:]],
        steps_left_out=max(0, len(steps) - MAX_STEPS),
        page_maps=[pb.PageMap(pages=len(g), cells=page_map(g, cells)) for g in states],
        rows=[_row(row) for row in model.frontend.engine.slot_rows()],
    )


def steps_after(records: Sequence[StepRecord], step: int) -> list[StepRecord]:
    """The records of the steps after this one, the oldest first."""
    newer = itertools.takewhile(lambda record: record.step > step, reversed(records))
    return [*newer][::-1]


def page_map(states: bytes, cells: int) -> bytes:
    """A byte a cell, at most `cells` of them: the state that most of its pages have."""
    size = -(-len(states) // cells)
    spans = (states[start : start + size] for start in range(0, len(states), size))
    return bytes(max((1, 3, 2, 0), key=span.count) for span in spans)


def load_message(model: ServedModel) -> pb.LoadResponse:
    """The load at this moment."""
    load: Load = model.frontend.load()
    return pb.LoadResponse(
        time=model.frontend.uptime,
        slots=load.slots,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        pages=_pages(*load.pages),
        page_size=load.page_size,
        ttft=_percentiles(load.ttft),
        tpot=_percentiles(load.tpot),
        counters=_counters(load.counters),
    )


def _counters(counters: Counters) -> pb.Counters:
    return pb.Counters(**{name: getattr(counters, name) for name in _COUNTERS})


def _percentiles(values: Percentiles) -> pb.Percentiles:
    return pb.Percentiles(p50=values.p50, p90=values.p90, p99=values.p99)


def _pages(free: int, cached: int, used: int) -> pb.Pages:
    return pb.Pages(free=free, cached=cached, used=used)


def _step(record: StepRecord, began: float) -> pb.StepRecord:
    return pb.StepRecord(
        step=record.step,
        time=record.time - began,
        running=record.running,
        waiting=record.waiting,
        decodes=record.decodes,
        chunk_tokens=record.chunk_tokens,
        admitted=record.admitted,
        preempted=record.preempted,
        pages=_pages(record.free_pages, record.cached_pages, record.used_pages),
    )


def _row(row: SlotRow) -> pb.SlotRow:
    return pb.SlotRow(
        slot=row.slot,
        request_id=row.request_id,
        prompt_tokens=row.prompt,
        cached_tokens=row.cached,
        computed_tokens=row.computed,
        output_tokens=row.outputs,
        most_tokens=row.most,
    )
