"""Reflection under both of its names: tools ask for v1 first, and the library has v1alpha alone.

Their messages are the same on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_NAME = reflection.SERVICE_NAME
_NEWER = "grpc.reflection.v1.ServerReflection"


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let clients ask the server what these services are."""
    reflection.enable_server_reflection(services, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(service_names=services).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_NEWER, handlers),))
