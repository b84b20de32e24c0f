"""The Inference service: messages in, the front's streams out.

A cancelled call cancels its handler, which leaves its stream, which ends the request in the engine.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import Message

from jaxinfer.stream import Stream
from jaxinfer.text import Delta
from jaxinfer_service import status, wire
from jaxinfer_service.answer_size import aside, check_entries
from jaxinfer_service.end_log import log_end
from jaxinfer_service.handlers import Context, streaming, unary
from jaxinfer_service.model import ServedModel, loaded
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.tracing import names
from jaxinfer_service.tracing.current import note

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_FOREVER = 1e9  # seconds; what gRPC gives as the time remaining of a call without deadline is more


class InferenceService:
    """Answers the calls of jaxinfer.v1.Inference; UNAVAILABLE until `served` is set."""

    def __init__(self) -> None:
        self.served: ServedModel | None = None

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server registers."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Generate": unary(pb.GenerateRequest, self.generate),
                "GenerateStream": streaming(pb.GenerateRequest, self.generate_stream),
                "Tokenize": unary(pb.TokenizeRequest, self.tokenize),
                "Detokenize": unary(pb.DetokenizeRequest, self.detokenize),
            },
        )

    async def generate(self, request: pb.GenerateRequest, context: Context) -> Message:
        model = self._model(request.model)
        async with await self._submit(model, request, context) as stream:
            params = wire.params_of(request.sampling)
            with wire.named(request):
                count = check_entries([len(stream.prompt)], params, "stream them")
            samples = [Delta(index) for index in range(len(stream.samples))]
            async for delta in stream:
                status.check_finish(delta.finish)
                samples[delta.index].extend(delta)
        response = pb.GenerateResponse(request_id=stream.id, model=model.names[0])
        first, *more = samples
        wire.fill(response, first)
        if first.prompt_logprobs:
            lines = first.prompt_logprobs
            await aside(count, wire.fill_prompt, response, stream.prompt, 0, lines)
        for sample in more:
            wire.fill(response.more.add(), sample)
        generated = sum(len(sample.token_ids) for sample in samples)
        wire.fill_end(response, samples, len(stream.prompt), generated)
        log_end(stream, samples, generated)
        return response

    async def generate_stream(self, request: pb.GenerateRequest, context: Context) -> None:
        model = self._model(request.model)
        note(names.REQUEST_STREAM, True)
        generated, scored, ends = 0, 0, list[Delta]()
        async with await self._submit(model, request, context) as stream:
            chunk = pb.GenerateChunk(request_id=stream.id, model=model.names[0])
            async for delta in stream:
                status.check_finish(delta.finish)
                generated += len(delta.token_ids)
                for lines in wire.prompt_parts(delta):
                    wire.fill_prompt(chunk, stream.prompt, scored, lines)
                    scored += len(lines)
                    await context.write(chunk)
                    chunk = pb.GenerateChunk()
                if not (delta.token_ids or delta.finish):
                    continue
                chunk.index = delta.index
                wire.fill(chunk, delta)
                if delta.finish is not None:
                    ends.append(delta)
                    if len(ends) == len(stream.samples):
                        wire.fill_end(chunk, ends, len(stream.prompt), generated)
                        log_end(stream, ends, generated)
                await context.write(chunk)
                chunk = pb.GenerateChunk()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> Message:
        frontend = self._model(request.model).frontend
        special = wire.special_of(request)
        with wire.named(request):
            ids = await frontend.encode(wire.prompt_of(request), special)
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: pb.DetokenizeRequest, context: Context) -> Message:
        frontend = self._model(request.model).frontend
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return pb.DetokenizeResponse(text=await frontend.decode(request.token_ids, skip))

    def _model(self, name: str) -> ServedModel:
        model = loaded(self.served)
        note(names.REQUEST_MODEL, name or model.names[0])
        status.check_model(model.names, name)
        return model

    async def _submit(
        self, model: ServedModel, request: pb.GenerateRequest, context: Context
    ) -> Stream:
        timeout: float | None = context.time_remaining()
        if timeout is not None and timeout <= 0:
            raise status.DeadlineError("the deadline had passed when the call came")
        if timeout is not None and timeout > _FOREVER:
            timeout = None
        scheduling, special = wire.scheduling_of(request), wire.special_of(request)
        with wire.named(request):
            params = wire.held_params(request, model.opened.replies)
            prompt = wire.prompt_of(request, model.opened.replies)
            stream = await model.frontend.submit(prompt, params, timeout, scheduling, special)
        note(names.RESPONSE_ID, stream.id)
        return stream
