"""Calls of gRPC's own services that last as long as their clients like: watches of health, and
reflection. They end when the server stops, which would otherwise wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection


class StoppedError(Exception):
    """The server has stopped."""


async def unless_stopped(coroutine: Coroutine[Any, Any, Any], stopped: asyncio.Event) -> Any:
    """What a coroutine gives. Raises StoppedError once `stopped` is set."""
    work, stop = asyncio.ensure_future(coroutine), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise StoppedError
        return work.result()
    finally:
        work.cancel()
        stop.cancel()


class Health(health.aio.HealthServicer):
    """grpc.health.v1."""

    def __init__(self, stopped: asyncio.Event):
        super().__init__()
        self._stopped = stopped

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Tell the state, and each change of it."""
        try:
            await unless_stopped(super().Watch(request, context), self._stopped)
        except StoppedError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has stopped")


class Reflection(reflection.aio.ReflectionServicer):
    """grpc.reflection.v1alpha and v1."""

    def __init__(self, service_names: Any, stopped: asyncio.Event):
        super().__init__(service_names)
        self._stopped = stopped

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Answer each request."""
        async for answer in super().ServerReflectionInfo(self._until(requests), context):
            yield answer

    async def _until(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                yield await unless_stopped(anext(requests), self._stopped)  # type: ignore[arg-type]
            except (StopAsyncIteration, StoppedError):
                return
