"""Runs the real gRPC server over a scripted engine, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import threading
import time

import grpc
import pytest
from fake_engine import byte_tokenizer
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.server import EngineFailedError, OpenedModel, Server, ServerConfig

from jaxinfer.engine_thread import EngineThread
from jaxinfer.text import TextProcessor

TOKENIZER = byte_tokenizer()
PATIENCE_S = 120.0  # for what takes a moment, on a machine that is slow, loaded or stopped a while


def opened(engine, names=("fake",)) -> OpenedModel:
    return OpenedModel(
        names=names,
        text=TextProcessor(TOKENIZER, TOKENIZER.eos_ids, engine.limits),
        connect=lambda on_events, on_stop: EngineThread(engine, on_events, on_stop),
    )


@contextlib.asynccontextmanager
async def serving(engine, **config):
    """(server, client) over a scripted engine, once it is SERVING; `client`: how it connects."""
    async with serving_model(lambda: opened(engine), **config) as both:
        try:
            yield both
        finally:
            engine.gate.set()


@contextlib.asynccontextmanager
async def serving_model(open_model, client=None, **config):
    """(server, client) once it is SERVING."""
    scheme = "tls://" if config.get("tls") else ""
    server = Server(ServerConfig(port=0, **config), open_model)
    task = asyncio.create_task(server.run(on_signals=False))
    while not server.port:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    try:
        async with AsyncClient(
            f"{scheme}127.0.0.1:{server.port}", **{"retries": 0} | (client or {})
        ) as caller:
            await caller.wait_ready(600)
            yield server, caller
    finally:
        server.shut_down()
        server.shut_down()
        with contextlib.suppress(EngineFailedError):  # as some tests have it
            await task


async def refused(call) -> grpc.aio.AioRpcError:
    """The status with which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(condition, timeout=PATIENCE_S):
    """Wait for a condition that other tasks and threads bring about."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition, timeout=PATIENCE_S):
    """Wait, in a thread without an event loop, for what other threads and processes bring about."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


async def until_unhealthy(client):
    """Wait until the server says that it does not serve."""
    async with asyncio.timeout(PATIENCE_S):
        while await client.is_serving(PATIENCE_S):
            await asyncio.sleep(0.01)


def free_port() -> int:
    """A port that is free, and not of those that the system gives to connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def in_loop(test):
    """Make a coroutine function a test."""

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return wrapper


@contextlib.contextmanager
def server_thread(engine, door="port", **config):
    """The address of a server that runs in a thread, for clients that block; `door` http_port: of
    its HTTP front."""
    ready, stop = threading.Event(), []
    address = []

    async def run():
        async with serving(engine, **config) as (server, _):
            address.append(f"127.0.0.1:{getattr(server, door)}")
            leave = asyncio.Event()
            stop.append((asyncio.get_running_loop(), leave))
            ready.set()
            await leave.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(PATIENCE_S), "the server did not start"
    try:
        yield address[0]
    finally:
        loop, leave = stop[0]
        loop.call_soon_threadsafe(leave.set)
        thread.join(PATIENCE_S)
