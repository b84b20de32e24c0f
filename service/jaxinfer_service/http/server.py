"""Runs the HTTP front on the event loop of the gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from jaxinfer_service.tls import Tls

GRACE = 5  # seconds for answers that are being written when the server stops


class _Quiet(uvicorn.Server):
    """Leaves the process's signals to the server that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """An app on a socket that is bound already."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: Tls | None = None):
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE,
            server_header=False,
            **(tls.for_http() if tls else {}),
        )
        self._server, self._listener = _Quiet(config), listener
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer from now on."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))

    async def stop(self, hurry: bool = False) -> None:
        """Take no more connections, and let what is being answered end."""
        self._server.should_exit, self._server.force_exit = True, hurry
        if self._task is not None:
            await self._task
        self._listener.close()
