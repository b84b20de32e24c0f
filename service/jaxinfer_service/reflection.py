"""Reflection under both of its names: tools ask for v1 first, and the library has v1alpha alone.

Their messages are the same on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxinfer_service.lasting import Reflection

SERVICE_NAME = reflection.SERVICE_NAME
_NEWER = "grpc.reflection.v1.ServerReflection"


def enable_reflection(
    services: Sequence[str], server: grpc.aio.Server, stopped: asyncio.Event
) -> None:
    """Let clients ask the server what these services are, until it has `stopped`."""
    method = grpc.stream_stream_rpc_method_handler(
        Reflection(services, stopped).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, handlers) for name in (_NEWER, SERVICE_NAME)]
    )
