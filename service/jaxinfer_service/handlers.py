"""How the services take calls: bytes in, parsed in the handler, and errors as statuses.

gRPC itself would answer undecodable bytes with INTERNAL. Handlers raise; `status.abort` turns what
they raise into a status. A cancelled call cancels its handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from jaxinfer_service import status, wire
from jaxinfer_service.end_log import log_left

Context = grpc.aio.ServicerContext

Method = Callable[[bytes, Context], Awaitable[Any]]


def wrapped(handler: Any, around: Callable[[Method], Method]) -> grpc.RpcMethodHandler:
    """A handler of ours whose method is called through another one."""
    make, method = (
        (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
        if handler.response_streaming
        else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
    )
    return make(around(method), handler.request_deserializer, handler.response_serializer)


def unary(
    kind: type[Message], method: Callable[[Any, Context], Awaitable[Message]]
) -> grpc.RpcMethodHandler:
    """A method that answers with one message, from one that returns it."""

    async def call(data: bytes, context: Context) -> bytes:
        try:
            response = await method(wire.parse(kind, data), context)
            return response.SerializeToString()
        except asyncio.CancelledError:
            log_left()
            raise
        except Exception as error:
            await status.abort(context, error)
            raise  # not reached: abort raises

    return grpc.unary_unary_rpc_method_handler(call)


def streaming(
    kind: type[Message], method: Callable[[Any, Context], Awaitable[None]]
) -> grpc.RpcMethodHandler:
    """A method that answers with a stream, from one that writes to its context."""

    async def call(data: bytes, context: Context) -> None:
        try:
            await method(wire.parse(kind, data), context)
        except asyncio.CancelledError:
            log_left()
            raise
        except Exception as error:
            await status.abort(context, error)

    return grpc.unary_stream_rpc_method_handler(
        call, response_serializer=lambda message: message.SerializeToString()
    )
