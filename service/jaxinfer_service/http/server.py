"""Runs the HTTP front on the event loop of the gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jaxinfer_service.tls import Tls

GRACE = 5  # seconds for answers that are being written when the server stops
HEAD_SECONDS = 20.0  # for a request's line and headers to come
IDLE_SECONDS = 75  # between requests; load balancers keep connections for 60 and must not be late
# Of TCP, where the system has them: a client that vanished, rather than left, is noticed after 60 s
# of silence, and one that takes nothing of what is sent after 120.
_TCP = {"KEEPIDLE": 30, "KEEPINTVL": 10, "KEEPCNT": 3, "USER_TIMEOUT": 120_000}


class _Quiet(uvicorn.Server):
    """Leaves the process's signals to the server that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection whose request does not begin, or whose head does not end, in time.

    A body has its own time (`body.py`), and so has the wait for a further request (uvicorn).
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_nothing()
        elif self._late is None and self.timeout_keep_alive_task is None:
            self._expect_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(error)

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer:
    """An app on a socket that is bound already."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: Tls | None = None):
        self.port: int = listener.getsockname()[1]
        _watch_clients(listener)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            timeout_keep_alive=IDLE_SECONDS,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE,
            server_header=False,
            **(tls.for_http() if tls else {}),
        )
        if tls is not None:
            config.load()
            assert config.ssl is not None
            tls.keep_fresh(config.ssl)
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


def _watch_clients(listener: socket.socket) -> None:
    """Have the system look after those who connect: they inherit what is set here."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP.items():
        if option := getattr(socket, f"TCP_{name}", None):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
