"""The server: one process, one model, gRPC and beside it HTTP.

Its life: bind the port (a taken port is an error before anything is loaded) · answer health checks
NOT_SERVING and calls UNAVAILABLE while the model loads in a thread · SERVING · on SIGTERM or SIGINT
drain: NOT_SERVING, waiting requests UNAVAILABLE, running ones finish · stop. A second signal ends
the drain at once. While the engine is dead or stalled, health is NOT_SERVING and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.types import ASGIApp

from jaxinfer.engine_link import Observer
from jaxinfer.frontend import Frontend
from jaxinfer_service import control, reflection, servicer
from jaxinfer_service.access import Access
from jaxinfer_service.call_headers import GrpcIds, HttpIds
from jaxinfer_service.channel import KEY_VARIABLE, TLS_SCHEME
from jaxinfer_service.control import ControlService
from jaxinfer_service.guard import GrpcGuard, HttpGuard
from jaxinfer_service.http.app import HttpFront
from jaxinfer_service.http.body import MOST_BYTES
from jaxinfer_service.http.origins import across_origins
from jaxinfer_service.http.server import HttpServer
from jaxinfer_service.lasting import Health
from jaxinfer_service.live import LiveView
from jaxinfer_service.metrics.histograms import Histograms
from jaxinfer_service.model import OpenedModel, ServedModel
from jaxinfer_service.prompt_log import PromptLog, beginnings
from jaxinfer_service.servicer import InferenceService
from jaxinfer_service.tls import Tls
from jaxinfer_service.tracing.calls import GrpcSpans, HttpSpans
from jaxinfer_service.tracing.requests import RequestSpans
from jaxinfer_service.tracing.setup import Tracing

logger = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent twin
    ("grpc.max_receive_message_length", MOST_BYTES),
    # A flood is answered by the queue's own refusals, not by gRPC dropping calls as CANCELLED.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ("grpc.server_max_unrequested_time_in_server", 600),  # seconds, 30 of which a flood may take
    # Clients may ping through a long silent prefill without being told to go away.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished is noticed within 40 s, and what it held is freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_SERVICES = (servicer.SERVICE_NAME, control.SERVICE_NAME)
CHECK_SECONDS = 0.25  # how often health looks at the engine
_HANDLERS_GRACE = 5.0  # seconds for handlers to write what the drain left them


class ListenError(RuntimeError):
    """The address cannot be listened on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and how to end.

    Attributes:
        host, port: port 0 takes a free one.
        http_port: of the OpenAI-compatible front, 0 for a free one; None for no such front.
        metrics_prefix: how the names of its metrics begin.
        access: who may call; its keys are read again on SIGHUP.
        tls: the certificate of both ports, read again on SIGHUP; None for neither.
        allowed_origins: of pages that may call over HTTP, as https://example.com; "*" is all.
        tracing: where spans of calls and requests go; None records none.
        log_prompts: characters of each prompt that the log has, and its span; None: no text at all.
        drain_timeout: seconds that running requests have to finish after SIGTERM.
        stall_limit: seconds without a step, while there is work, that count as a stall.
        failed_grace: seconds for which a server whose engine failed still says so before it ends.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    metrics_prefix: str = "jaxinfer"
    access: Access = field(default_factory=Access)
    tls: Tls | None = None
    allowed_origins: tuple[str, ...] = ()
    tracing: Tracing | None = None
    log_prompts: int | None = None
    drain_timeout: float = 30.0
    stall_limit: float = 60.0
    failed_grace: float = 5.0


class EngineFailedError(RuntimeError):
    """The engine ended by itself, and with it the server."""


class Server:
    """Serves what `open_model` gives; `open_model` runs in a thread once the port is bound."""

    def __init__(self, config: ServerConfig, open_model: Callable[[], OpenedModel]):
        self.config = config
        self.port = self.http_port = 0  # the real ones, once bound
        self._open_model = open_model
        self._service = InferenceService()
        self._live = LiveView()
        self._control = ControlService(self._live, self.drain)
        self._http = HttpFront(config.metrics_prefix, self._live)
        self._stopped = asyncio.Event()
        self._health = Health(self._stopped)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    def shut_down(self) -> None:
        """Drain and stop; the second time, stop at once. What the signals call."""
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    def drain(self) -> None:
        """Drain and stop. What `Control.Drain` calls."""
        self._stopping.set()

    def reload(self) -> None:
        """Read the keys and the certificate again. What SIGHUP calls."""
        self.config.access.reload()
        if self.config.tls is not None:
            self.config.tls.reload()

    async def run(self, on_signals: bool = True) -> bool:
        """Serve until shut down. Returns whether the model was loaded by then.

        Raises ListenError, what `open_model` raises, or EngineFailedError; then nothing is left
        running.
        """
        if on_signals:  # before anybody can see that it is there
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.shut_down)
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        check_listen(self.config.host, self.config.port)  # if both are taken, this one is named
        http = self._bind_http()
        try:
            server = self._bind()
        except ListenError:
            if http is not None:
                await http.stop()
            raise
        await self._set_health(serving=False)
        await server.start()
        if http is not None:
            http.start()
        try:
            opened = await self._load()
            if opened is None:
                return False
            await self._serve(opened)
            return True
        finally:
            await self._set_health(serving=False)
            self._stopped.set()
            hurry = self._hurry.is_set()
            if http is not None:
                await http.stop(hurry)
            await server.stop(0 if hurry else _HANDLERS_GRACE)
            if self.config.tracing is not None:
                await self.config.tracing.close()

    def _bind_http(self) -> HttpServer | None:
        if self.config.http_port is None:
            return None
        listener = listen(self.config.host, self.config.http_port, "--http-port")
        app: ASGIApp = HttpIds(HttpGuard(self._http.app, self.config.access))
        if self.config.tracing is not None:
            app = HttpSpans(app, self.config.tracing.tracer)
        if self.config.allowed_origins:
            app = across_origins(app, self.config.allowed_origins)
        http = HttpServer(app, listener, self.config.tls)
        self.http_port = http.port
        return http

    def _bind(self) -> grpc.aio.Server:
        host, port = self.config.host, self.config.port
        passed = [GrpcIds(), GrpcGuard(self.config.access)]
        if self.config.tracing is not None:
            passed.insert(0, GrpcSpans(self.config.tracing.tracer))
        server = grpc.aio.server(options=_OPTIONS, interceptors=passed)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self.config.tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.config.tls.credentials())
        except RuntimeError as error:  # taken since it was checked
            raise ListenError(f"cannot listen on {address}: {error}") from error
        server.add_generic_rpc_handlers((self._service.handler(), self._control.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_reflection(names, server, self._stopped)
        return server

    async def _load(self) -> OpenedModel | None:
        """Open the model in a thread that a shutdown need not wait for; None after a shutdown."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[OpenedModel] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: Any) -> None:
            if not opened.done():
                setter(value)

        def load() -> None:
            setter: Callable[[Any], None]
            value: Any
            try:
                setter, value = opened.set_result, self._open_model()
            except BaseException as error:
                setter, value = opened.set_exception, error
            with contextlib.suppress(RuntimeError):  # the server has gone meanwhile
                loop.call_soon_threadsafe(settle, setter, value)

        threading.Thread(target=load, name="jaxinfer-load", daemon=True).start()
        await _first(opened, self._stopping.wait())
        return opened.result() if opened.done() else None

    async def _serve(self, opened: OpenedModel) -> None:
        histograms = Histograms(opened.text.limits.max_model_len)
        frontend = Frontend(
            opened.text,
            opened.connect,
            self.config.stall_limit,
            observers=[histograms, *self._tellers(opened)],
        )
        frontend.start()
        served = ServedModel(opened, frontend, histograms)
        self._service.served = self._control.served = served
        self._http.serve(served)
        watch = asyncio.create_task(self._watch(served))
        try:
            await self._stopping.wait()
            logger.info("draining", extra={"timeout": self.config.drain_timeout})
        finally:
            watch.cancel()
            await self._set_health(serving=False)
        await _first(frontend.drain(self.config.drain_timeout), self._hurry.wait())
        await asyncio.to_thread(frontend.stop)
        self._live.close()
        logger.info("stopped", extra=dataclasses.asdict(frontend.counters))
        if frontend.failure:
            raise EngineFailedError(f"the server has stopped because {frontend.failure}")

    def _tellers(self, opened: OpenedModel) -> Iterator[Observer]:
        """Who tells of single requests."""
        most, shown = self.config.log_prompts, None
        if most is not None:
            shown = beginnings(opened.text, most)
            yield PromptLog(shown)
        if self.config.tracing is not None:
            yield RequestSpans(self.config.tracing.tracer, opened.names[0], shown)

    async def _watch(self, served: ServedModel) -> None:
        """Keep health true to the engine's state, and count its steps while it remembers them."""
        before: str | None = None
        while True:
            reason = served.frontend.check()
            served.histograms.steps([*served.frontend.engine.records])
            if reason != before:
                await self._set_health(serving=not reason)
                if reason:
                    logger.error("not serving: %s", reason)
                else:
                    logger.info("serving", extra=self._where())
                    if before is None:
                        logger.info("to try it: %s", self._example())
            before = reason
            if served.frontend.failure:  # nothing will come of it any more; let that be seen
                await asyncio.sleep(self.config.failed_grace)
                self._stopping.set()
                return
            await asyncio.sleep(min(CHECK_SECONDS, self.config.stall_limit / 4))

    def _example(self) -> str:
        """A command that asks this server, from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        key = f"{KEY_VARIABLE}=KEY " if self.config.access.path is not None else ""
        return f"{key}jaxinfer chat --server {TLS_SCHEME if self.config.tls else ''}{address}"

    def _where(self) -> dict[str, Any]:
        where = {"host": self.config.host, "port": self.port}
        return where if self.config.http_port is None else where | {"http_port": self.http_port}

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", *_SERVICES):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


async def _first(*awaitables: Any) -> None:
    """Wait for the first of these; what is unfinished then is cancelled, but for futures."""
    tasks = [a if isinstance(a, asyncio.Future) else asyncio.create_task(a) for a in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if isinstance(task, asyncio.Task):
            task.cancel()


def check_listen(host: str, port: int) -> None:
    """Raise ListenError if the address cannot be listened on, saying what to do."""
    listen(host, port).close()


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that listens there. Raises ListenError saying what to do, with `option`."""
    try:
        # With its protocol named: asyncio then sends small messages on its connections at once.
        *how, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(*how)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        advice = _advice(number, error, option)
        raise ListenError(f"cannot listen on {host}:{port}: {advice}") from error
    return listener


def _advice(number: int | None, error: Exception, option: str) -> str:
    if number == errno.EADDRINUSE:
        return f"the port is in use; stop what uses it or choose another {option}"
    if number == errno.EACCES:
        return f"this user may not use ports below 1024; choose another {option}"
    if number == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "this machine has no such address; choose another --host"
    return str(error)
