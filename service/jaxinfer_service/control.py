"""The Control service: what the server is, what its engine does, and ending a call or all of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from jaxinfer.expert_load import imbalance
from jaxinfer.quantization.kinds import NONE
from jaxinfer.text import TextProcessor
from jaxinfer.validation import Violations
from jaxinfer_service import status, version
from jaxinfer_service.handlers import Context, streaming, unary
from jaxinfer_service.live import INTERVAL, MAP_CELLS, LiveView, load_message
from jaxinfer_service.model import ServedModel, loaded
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Control"].full_name


class ControlService:
    """Answers the calls of jaxinfer.v1.Control; UNAVAILABLE until `served` is set.

    `drain` is what `Drain` calls, which is heard before, too.
    """

    def __init__(self, live: LiveView, drain: Callable[[], None]) -> None:
        self.served: ServedModel | None = None
        self._live, self._drain = live, drain

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "ServerInfo": unary(pb.ServerInfoRequest, self.server_info),
                "Load": unary(pb.LoadRequest, self.load),
                "WatchLoad": streaming(pb.WatchLoadRequest, self.watch_load),
                "Abort": unary(pb.AbortRequest, self.abort),
                "FlushPrefixCache": unary(pb.FlushPrefixCacheRequest, self.flush_prefix_cache),
                "Drain": unary(pb.DrainRequest, self.drain),
                "ExpertLoad": unary(pb.ExpertLoadRequest, self.expert_load),
            },
        )

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
            quantization=config.quantization or NONE,
            kv_dtype=config.pages,
        )

    async def load(self, request: pb.LoadRequest, context: Context) -> Message:
        return load_message(loaded(self.served))

    async def watch_load(self, request: pb.WatchLoadRequest, context: Context) -> None:
        model = loaded(self.served)
        interval = request.interval if request.HasField("interval") else INTERVAL
        cells = request.map_cells if request.HasField("map_cells") else MAP_CELLS
        async with contextlib.aclosing(self._live.updates(model, interval, cells)) as updates:
            async for message in updates:
                await context.write(message)

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

    async def flush_prefix_cache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> Message:
        loaded(self.served).frontend.flush_prefixes()
        return pb.FlushPrefixCacheResponse()

    async def drain(self, request: pb.DrainRequest, context: Context) -> Message:
        logger.info("asked to drain")
        self._drain()
        return pb.DrainResponse()

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
