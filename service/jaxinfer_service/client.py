"""A small client of jaxinfer.v1: needs grpc alone, no JAX.

    with Client("localhost:50051") as client:
        client.wait_ready()
        for chunk in client.stream("Once upon a time", temperature=0, max_new_tokens=50):
            print(chunk.text, end="", flush=True)

A prompt is a text, token ids, or chat messages ({"role": ..., "content": ...}); further keywords
are `priority`, `tenant`, `cache_salt` and the fields of the `Sampling` message. With `n` samples,
each chunk has its sample's `index`. `control` is the stub of jaxinfer.v1.Control. Calls raise
grpc.RpcError; `violations` reads its details. `AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from jaxinfer_service.channel import Connection
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2_grpc, inference_pb2_grpc
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

READY_SECONDS = 600.0  # a first start fetches, converts and compiles
_POLL_SECONDS = 0.2
_CHECK_SECONDS = 2.0  # a server that is compiling may take its time to answer


def generate_request(
    prompt: Prompt,
    model: str = "",
    *,
    priority: int | None = None,
    tenant: str = "",
    cache_salt: str = "",
    **sampling: Any,
) -> pb.GenerateRequest:
    """The message that asks for an answer to `prompt`."""
    request = pb.GenerateRequest(
        model=model,
        sampling=pb.Sampling(**sampling),
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def tokenize_request(prompt: Prompt, model: str = "", **options: Any) -> pb.TokenizeRequest:
    """The message that asks for the token ids of a text or chat messages."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt, **options)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt), **options)


def _chat(messages: Sequence[Any]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])


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
        self, prompt: Prompt, *, timeout: float | None = None, model: str = "", **sampling: Any
    ) -> pb.GenerateResponse:
        """The whole answer at once, within `timeout` seconds."""
        return self.stub.Generate(generate_request(prompt, model, **sampling), timeout=timeout)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, model: str = "", **sampling: Any
    ) -> Iterable[pb.GenerateChunk]:
        """The answer as it is made. The call has `cancel()`."""
        request = generate_request(prompt, model, **sampling)
        return self.stub.GenerateStream(request, timeout=timeout)

    def tokenize(self, prompt: Prompt, model: str = "", **options: Any) -> list[int]:
        return list(self.stub.Tokenize(tokenize_request(prompt, model, **options)).token_ids)

    def detokenize(self, ids: Iterable[int], model: str = "", **options: Any) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=ids, **options)
        return self.stub.Detokenize(request).text

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
        self, prompt: Prompt, *, timeout: float | None = None, model: str = "", **sampling: Any
    ) -> pb.GenerateResponse:
        """The whole answer at once, within `timeout` seconds."""
        request = generate_request(prompt, model, **sampling)
        return await self.stub.Generate(request, timeout=timeout)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, model: str = "", **sampling: Any
    ) -> AsyncIterable[pb.GenerateChunk]:
        """The answer as it is made. The call has `cancel()`."""
        request = generate_request(prompt, model, **sampling)
        return self.stub.GenerateStream(request, timeout=timeout)

    async def tokenize(self, prompt: Prompt, model: str = "", **options: Any) -> list[int]:
        answer = await self.stub.Tokenize(tokenize_request(prompt, model, **options))
        return list(answer.token_ids)

    async def detokenize(self, ids: Iterable[int], model: str = "", **options: Any) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=ids, **options)
        return (await self.stub.Detokenize(request)).text

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


def _said(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"
