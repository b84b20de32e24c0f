"""The Inference service: messages in, the front's streams out.

Handlers receive bytes and parse them here, because gRPC itself would answer undecodable ones with
INTERNAL. They raise; `status.abort` turns what they raise into a status. A cancelled call cancels
its handler, which leaves its stream, which ends the request in the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from jaxinfer.frontend import Frontend, Stream
from jaxinfer.request import EngineStoppedError
from jaxinfer.text import Delta
from jaxinfer_service import status, wire
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_FOREVER = 1e9  # seconds; what gRPC gives as the time remaining of a call without deadline is more

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the service. Requests may call it by any of its names."""

    names: tuple[str, ...]
    frontend: Frontend


class InferenceService:
    """Answers the calls of jaxinfer.v1.Inference; UNAVAILABLE until `served` is set."""

    def __init__(self) -> None:
        self.served: ServedModel | None = None

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": _unary(pb.GenerateRequest, self.generate),
                "GenerateStream": _streaming(pb.GenerateRequest, self.generate_stream),
                "Tokenize": _unary(pb.TokenizeRequest, self.tokenize),
                "Detokenize": _unary(pb.DetokenizeRequest, self.detokenize),
            },
        )

    async def generate(self, request: pb.GenerateRequest, context: Context) -> Message:
        model = self._model(request.model)
        async with await self._submit(model, request, context) as stream:
            whole = await stream.collect()
        status.check_finish(whole.finish)
        response = pb.GenerateResponse(request_id=stream.request.id, model=model.names[0])
        wire.fill(response, whole)
        wire.fill_end(response, whole, len(stream.request.prompt), len(whole.token_ids))
        _log_end(stream, whole, len(whole.token_ids))
        return response

    async def generate_stream(self, request: pb.GenerateRequest, context: Context) -> None:
        model = self._model(request.model)
        generated = 0
        async with await self._submit(model, request, context) as stream:
            chunk = pb.GenerateChunk(request_id=stream.request.id, model=model.names[0])
            async for delta in stream:
                status.check_finish(delta.finish)
                generated += len(delta.token_ids)
                wire.fill(chunk, delta)
                if delta.finish is not None:
                    wire.fill_end(chunk, delta, len(stream.request.prompt), generated)
                    _log_end(stream, delta, generated)
                await context.write(chunk)
                chunk = pb.GenerateChunk()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> Message:
        frontend = self._model(request.model).frontend
        wire.check_tokenize(request)
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        with wire.named(request):
            ids = await frontend.encode(wire.prompt_of(request), special)
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: pb.DetokenizeRequest, context: Context) -> Message:
        frontend = self._model(request.model).frontend
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return pb.DetokenizeResponse(text=await frontend.decode(request.token_ids, skip))

    def _model(self, name: str) -> ServedModel:
        if self.served is None:
            raise EngineStoppedError("the server is loading its model")
        if name and name not in self.served.names:
            served = ", ".join(self.served.names)
            raise status.ModelNotFoundError(f"model {name!r} is not served here; {served} is")
        return self.served

    async def _submit(
        self, model: ServedModel, request: pb.GenerateRequest, context: Context
    ) -> Stream:
        timeout: float | None = context.time_remaining()
        if timeout is not None and timeout <= 0:
            raise status.DeadlineError("the deadline had passed when the call came")
        if timeout is not None and timeout > _FOREVER:
            timeout = None
        params = wire.params_of(request.sampling)
        with wire.named(request):
            return await model.frontend.submit(wire.prompt_of(request), params, timeout)


def _unary(
    kind: type[Message], method: Callable[[Any, Context], Awaitable[Message]]
) -> grpc.RpcMethodHandler:
    async def call(data: bytes, context: Context) -> bytes:
        try:
            response = await method(wire.parse(kind, data), context)
            return response.SerializeToString()
        except Exception as error:
            await status.abort(context, error)
            raise  # not reached: abort raises

    return grpc.unary_unary_rpc_method_handler(call)


def _streaming(
    kind: type[Message], method: Callable[[Any, Context], Awaitable[None]]
) -> grpc.RpcMethodHandler:
    async def call(data: bytes, context: Context) -> None:
        try:
            await method(wire.parse(kind, data), context)
        except Exception as error:
            await status.abort(context, error)

    return grpc.unary_stream_rpc_method_handler(
        call, response_serializer=lambda message: message.SerializeToString()
    )


def _log_end(stream: Stream, delta: Delta, generated: int) -> None:
    assert delta.finish is not None and delta.timing is not None
    logger.debug(
        "finished",
        extra={
            "request": stream.request.id,
            "reason": delta.finish.reason.value,
            "prompt_tokens": len(stream.request.prompt),
            "generated_tokens": generated,
            "seconds": round(delta.timing.total, 4),
        },
    )
