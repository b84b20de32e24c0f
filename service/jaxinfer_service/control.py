"""The Control service: what the server is, what its engine does, and ending a call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

import grpc
from google.protobuf.message import Message

from jaxinfer.expert_load import imbalance
from jaxinfer.load import Load, Percentiles, StepRecord
from jaxinfer.request import Counters, EngineStoppedError, QueueFullError
from jaxinfer.text import TextProcessor
from jaxinfer.validation import Violations
from jaxinfer_service import status, version
from jaxinfer_service.handlers import Context, streaming, unary
from jaxinfer_service.model import ServedModel, loaded
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Control"].full_name

INTERVAL, MIN_INTERVAL, MAX_INTERVAL = 1.0, 0.1, 60.0  # seconds between messages of WatchLoad
MAP_CELLS, MAX_MAP_CELLS = 256, 4096
MAX_STEPS = 1000  # step records of one message
MAX_WATCHERS = 8  # each takes some milliseconds of the event loop at every interval

_COUNTERS = tuple(pb.Counters.DESCRIPTOR.fields_by_name)


class ControlService:
    """Answers the calls of jaxinfer.v1.Control; UNAVAILABLE until `served` is set."""

    def __init__(self) -> None:
        self.served: ServedModel | None = None
        self._closed = asyncio.Event()
        self._watchers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "ServerInfo": unary(pb.ServerInfoRequest, self.server_info),
                "Load": unary(pb.LoadRequest, self.load),
                "WatchLoad": streaming(pb.WatchLoadRequest, self.watch_load),
                "Abort": unary(pb.AbortRequest, self.abort),
                "ExpertLoad": unary(pb.ExpertLoadRequest, self.expert_load),
            },
        )

    def close(self) -> None:
        """End what watches: the server has stopped."""
        self._closed.set()

    async def server_info(self, request: pb.ServerInfoRequest, context: Context) -> Message:
        model = loaded(self.served)
        config, limits = model.opened.config, model.opened.text.limits
        load = model.frontend.engine.load()
        return pb.ServerInfoResponse(
            version=version(),
            model_names=model.names,
            dtype=config.dtype,
            tensor_parallel_size=config.tensor_parallel_size,
            slots=load.slots,
            max_model_len=limits.max_model_len,
            chunk_tokens=config.max_num_batched_tokens,
            page_size=load.page_size,
            pages=sum(load.pages),
            kv_capacity_tokens=limits.kv_tokens,
            kv_offload_bytes=config.kv_offload_bytes,
            prefix_cache=config.prefix_cache,
            deterministic=config.deterministic,
            determinism=model.opened.determinism,
            preset=model.opened.preset,
            tpot_target_ms=config.tpot_target_ms,
            max_queued_requests=limits.max_queued_requests,
            max_queued_tokens=limits.max_queued_tokens,
            uptime=model.frontend.uptime,
            generation=_generation(model.opened.text),
        )

    async def load(self, request: pb.LoadRequest, context: Context) -> Message:
        return _load(loaded(self.served))

    async def watch_load(self, request: pb.WatchLoadRequest, context: Context) -> None:
        model = loaded(self.served)
        interval = request.interval if request.HasField("interval") else INTERVAL
        cells = request.map_cells if request.HasField("map_cells") else MAP_CELLS
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
            await self._watch(model, interval, cells, context)
        finally:
            self._watchers -= 1

    async def _watch(
        self, model: ServedModel, interval: float, cells: int, context: Context
    ) -> None:
        last = _last_before(model, interval)
        while not self._closed.is_set():
            message = _load_since(model, last, cells)
            if message.steps:
                last = message.steps[-1].step
            await context.write(message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), interval)
        raise EngineStoppedError("the server has stopped")

    async def abort(self, request: pb.AbortRequest, context: Context) -> Message:
        model = loaded(self.served)
        found = Violations()
        if not request.request_id:
            found.add("request_id", "is empty; give the id of a call, as in its first answer")
        found.raise_if_any()
        if not model.frontend.abort(request.request_id):
            raise status.CallNotFoundError(
                f"no call with the id {request.request_id!r} runs or waits; it may have ended"
            )
        return pb.AbortResponse()

    async def expert_load(self, request: pb.ExpertLoadRequest, context: Context) -> Message:
        model = loaded(self.served)
        load, time = model.frontend.engine.experts, model.frontend.uptime
        if load is None:
            return pb.ExpertLoadResponse(time=time)
        return pb.ExpertLoadResponse(
            time=time,
            experts=load.tokens.shape[1],
            experts_per_token=load.top_k,
            layers=[
                pb.LayerExperts(layer=layer, tokens=tokens.tolist(), imbalance=imbalance(tokens))
                for layer, tokens in zip(load.layers, load.tokens, strict=True)
            ],
        )


def _generation(text: TextProcessor) -> pb.GenerationDefaults:
    sampling = text.sampling
    return pb.GenerationDefaults(
        eos_token_ids=text.eos_ids,
        max_length=sampling.max_length,
        not_honoured=sampling.not_honoured,
        **sampling.fields,
    )


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
        load=_load(model),
        steps=[_step(record, model.frontend.started_at) for record in steps[-MAX_STEPS:]],
        steps_left_out=max(0, len(steps) - MAX_STEPS),
        page_maps=[pb.PageMap(pages=len(g), cells=page_map(g, cells)) for g in states],
    )


def steps_after(records: Sequence[StepRecord], step: int) -> list[StepRecord]:
    """The records of the steps after this one, the oldest first."""
    newer = itertools.takewhile(lambda record: record.step > step, reversed(records))
    return [*newer][::-1]


def page_map(states: bytes, cells: int) -> bytes:
    """A byte a cell, at most `cells` of them: the state that most of its pages have."""
    size = -(-len(states) // cells)
    spans = (states[start : start + size] for start in range(0, len(states), size))
    return bytes(max((1, 2, 0), key=span.count) for span in spans)


def _load(model: ServedModel) -> pb.LoadResponse:
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
