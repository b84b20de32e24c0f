"""A small client of jaxinfer.v1: needs grpc alone, no JAX.

    with Client("localhost:50051") as client:
        client.wait_ready()
        for chunk in client.stream("Once upon a time", temperature=0, max_new_tokens=50):
            print(chunk.text, end="", flush=True)

A prompt is a text, token ids, or chat messages ({"role": ..., "content": ...}), or what
`chat_prompt.chat` makes of messages and tools; further keywords are those of `Asked`. With `n`
samples, each chunk has its sample's `index`. Leaving the loop over a stream ends the request on the
server. `generate_all` asks many prompts, so many at a time. Calls that a server could not take are
tried again (`Connection`); those that fail raise grpc.RpcError, whose details `violations` reads.
`control` is the stub of jaxinfer.v1.Control. Where the caller has a current span of OpenTelemetry,
calls carry its `traceparent`. `AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from jaxinfer_service import chat_prompt
from jaxinfer_service.channel import Connection
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2_grpc, inference_pb2_grpc
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.tracing.current import carried

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | pb.Chat
_OF_REQUEST = ("priority", "tenant", "cache_salt", "add_special_tokens")

READY_SECONDS = 600.0  # a first start fetches, converts and compiles
_POLL_SECONDS = 0.2
_CHECK_SECONDS = 2.0  # a server that is compiling may take its time to answer
CONCURRENCY = 32  # calls of `generate_all` at a time


Structured = Mapping[str, Any] | pb.StructuredOutput
"""One of json_schema (a mapping, or JSON text), json_object (True), regex, choice and grammar."""


class Asked(TypedDict, total=False):
    """What a call may ask besides its prompt: fields of `GenerateRequest` and of `Sampling`.

    The engine's `SamplingParams` and `Scheduling` say what they mean; what is left out is the
    model's own default.
    """

    priority: int
    tenant: str
    cache_salt: str
    add_special_tokens: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: int
    skip_special_tokens: bool
    n: int
    prompt_logprobs: int
    truncate_prompt_tokens: int
    min_tokens: int
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    structured: Structured


def generate_request(prompt: Prompt, model: str = "", **asked: Unpack[Asked]) -> pb.GenerateRequest:
    """The message that asks for an answer to `prompt`. Raises ValueError for unknown fields."""
    fields: dict[str, Any] = dict(asked)
    own = {name: fields.pop(name) for name in _OF_REQUEST if name in fields}
    if isinstance(form := fields.get("structured"), Mapping):
        fields["structured"] = _structured(**form)
    request = pb.GenerateRequest(model=model, sampling=pb.Sampling(**fields), **own)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.Chat) or (prompt and isinstance(prompt[0], Mapping)):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def _structured(
    json_schema: Mapping[str, Any] | str | None = None,
    choice: Sequence[str] | None = None,
    **others: Any,
) -> pb.StructuredOutput:
    """The message of a mapping with one form; a schema may be one itself."""
    if json_schema is not None and not isinstance(json_schema, str):
        json_schema = json.dumps(json_schema, ensure_ascii=False)
    texts = None if choice is None else pb.Choice(texts=choice)
    return pb.StructuredOutput(json_schema=json_schema, choice=texts, **others)


def tokenize_request(prompt: Prompt, model: str = "", **options: Any) -> pb.TokenizeRequest:
    """The message that asks for the token ids of a text or chat messages."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt, **options)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt), **options)


def _chat(prompt: Any) -> pb.Chat:
    return prompt if isinstance(prompt, pb.Chat) else chat_prompt.chat(prompt)


def violations(error: grpc.RpcError) -> dict[str, str]:
    """Field → what is wrong with it, of an INVALID_ARGUMENT error."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    found: dict[str, str] = {}
    for detail in status.details if status else ():
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found |= {v.field: v.description for v in bad.field_violations}
    return found


class Client:
    """Blocking calls to one server, e.g. "localhost:50051". A context manager.

    Keywords are the fields of `Connection`: `api_key`, and files for TLS.
    """

    def __init__(self, target: str, **how: Any):
        self.target = target
        self.channel = Connection(target, **how).channel()
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.control = control_pb2_grpc.ControlStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> pb.GenerateResponse:
        """The whole answer at once, within `timeout` seconds."""
        request = generate_request(prompt, model, **asked)
        return self.stub.Generate(request, timeout=timeout, metadata=carried())

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> Iterable[pb.GenerateChunk]:
        """The answer as it is made. The call has `cancel()`, which dropping it does too."""
        request = generate_request(prompt, model, **asked)
        return self.stub.GenerateStream(request, timeout=timeout, metadata=carried())

    def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> list[pb.GenerateResponse]:
        """The answers to all prompts in order, `concurrency` of them at a time.

        `timeout` is each call's, from when it begins. The first that fails is raised, and the
        others are cancelled, as all are by Ctrl-C.
        """
        places = threading.Semaphore(_positive(concurrency))
        calls: list[Any] = []
        failed: list[Any] = []

        def ended(call: Any) -> None:
            if call.code() is not grpc.StatusCode.OK:
                failed.append(call)
            places.release()

        try:
            for prompt in prompts:
                places.acquire()
                if failed:
                    break
                request = generate_request(prompt, model, **asked)
                ask: Any = self.stub.Generate
                calls.append(ask.future(request, timeout=timeout, metadata=carried()))
                calls[-1].add_done_callback(ended)
            for _ in range(concurrency):  # until all have ended
                if not failed:
                    places.acquire()
            return [call.result() for call in (*failed[:1], *calls)]
        finally:
            for call in calls:
                call.cancel()

    def tokenize(self, prompt: Prompt, model: str = "", **options: Any) -> list[int]:
        request = tokenize_request(prompt, model, **options)
        return list(self.stub.Tokenize(request, metadata=carried()).token_ids)

    def detokenize(self, ids: Iterable[int], model: str = "", **options: Any) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=ids, **options)
        return self.stub.Detokenize(request, metadata=carried()).text

    def is_serving(self, timeout: float = _CHECK_SECONDS) -> bool:
        """Whether the server says SERVING. Raises grpc.RpcError when it does not answer."""
        answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until the server says SERVING. Raises TimeoutError with what it said last."""
        end = time.monotonic() + timeout
        last = "nothing"
        while (left := end - time.monotonic()) > 0:
            try:
                if self.is_serving(min(left, _CHECK_SECONDS)):
                    return
                last = "NOT_SERVING"
            except grpc.RpcError as error:
                last = _said(error)
            time.sleep(min(_POLL_SECONDS, left))
        raise TimeoutError(f"{self.target} is not serving after {timeout:g} s; last: {last}")


class AsyncStream:
    """The chunks of a call, to be iterated over. Dropping it cancels the call, as `cancel` does:
    gRPC's own object would live on until the next collection of garbage."""

    def __init__(self, call: Any):
        self._call, self._chunks = call, aiter(call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateChunk:
        return await anext(self._chunks)

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._call.cancel()

    def cancel(self) -> bool:
        """End the call; False if it has ended."""
        return bool(self._call.cancel())


class AsyncClient:
    """As `Client`, for asyncio. An async context manager."""

    def __init__(self, target: str, **how: Any):
        self.target = target
        self.channel = Connection(target, **how).aio_channel()
        self.stub: Any = inference_pb2_grpc.InferenceStub(self.channel)
        self.control: Any = control_pb2_grpc.ControlStub(self.channel)
        self._health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> pb.GenerateResponse:
        """The whole answer at once, within `timeout` seconds."""
        request = generate_request(prompt, model, **asked)
        return await self.stub.Generate(request, timeout=timeout, metadata=carried())

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> AsyncStream:
        """The answer as it is made."""
        request = generate_request(prompt, model, **asked)
        call = self.stub.GenerateStream(request, timeout=timeout, metadata=carried())
        return AsyncStream(call)

    async def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        timeout: float | None = None,
        model: str = "",
        **asked: Unpack[Asked],
    ) -> list[pb.GenerateResponse]:
        """The answers to all prompts in order, `concurrency` of them at a time.

        `timeout` is each call's, from when it begins. The first that fails is raised, and the
        others are cancelled.
        """
        places = asyncio.Semaphore(_positive(concurrency))

        async def one(prompt: Prompt) -> pb.GenerateResponse:
            async with places:
                return await self.generate(prompt, timeout=timeout, model=model, **asked)

        calls = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def tokenize(self, prompt: Prompt, model: str = "", **options: Any) -> list[int]:
        request = tokenize_request(prompt, model, **options)
        return list((await self.stub.Tokenize(request, metadata=carried())).token_ids)

    async def detokenize(self, ids: Iterable[int], model: str = "", **options: Any) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=ids, **options)
        return (await self.stub.Detokenize(request, metadata=carried())).text

    async def is_serving(self, timeout: float = _CHECK_SECONDS) -> bool:
        """Whether the server says SERVING. Raises grpc.RpcError when it does not answer."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until the server says SERVING. Raises TimeoutError with what it said last."""
        end = time.monotonic() + timeout
        last = "nothing"
        while (left := end - time.monotonic()) > 0:
            try:
                if await self.is_serving(min(left, _CHECK_SECONDS)):
                    return
                last = "NOT_SERVING"
            except grpc.RpcError as error:
                last = _said(error)
            await asyncio.sleep(min(_POLL_SECONDS, left))
        raise TimeoutError(f"{self.target} is not serving after {timeout:g} s; last: {last}")


def _positive(concurrency: int) -> int:
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; at least one call has to run at a time")
    return concurrency


def _said(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"
