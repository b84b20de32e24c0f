"""The server's life: loading, health, reflection, draining, a dead and a stalled engine."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import LONG, ScriptedEngine, balanced, echo, forever, limits, says
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from jaxinfer_service import server as server_module
from jaxinfer_service.access import Access, make_key
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.server import Server, ServerConfig
from jaxinfer_service.servicer import SERVICE_NAME
from serving import PATIENCE_S, in_loop, opened, refused, serving, until, until_unhealthy

Code = grpc.StatusCode


@in_loop
async def test_health_reflection_and_calls_while_loading():
    loaded = asyncio.Event()
    loop = asyncio.get_running_loop()
    engine = ScriptedEngine()

    def slow_open():
        asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result()
        return opened(engine)

    server = Server(ServerConfig(port=0), slow_open)
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    async with AsyncClient(f"127.0.0.1:{server.port}", retries=0) as client:
        assert not await client.is_serving(PATIENCE_S)
        error = await refused(client.generate("x"))
        assert error.code() is Code.UNAVAILABLE and "loading" in error.details()
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            services = [s.name for s in answer.list_services_response.service]
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(services)
        loaded.set()
        await client.wait_ready(PATIENCE_S)
        assert (await client.generate("x")).text == "x"
    server.shut_down()
    assert await task is True


@in_loop
async def test_a_model_that_fails_to_load_leaves_nothing_running():
    def broken():
        raise ValueError("tensor x is missing")

    server = Server(ServerConfig(port=0), broken)
    with pytest.raises(ValueError, match="tensor x is missing"):
        await server.run(on_signals=False)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)


@in_loop
async def test_draining_with_50_running_and_20_waiting():
    engine = ScriptedEngine(says("a" * 40), limits(max_num_seqs=50, max_queued_requests=100), 0.05)
    async with serving(engine, drain_timeout=PATIENCE_S) as (server, client):
        engine.gate.clear()  # or the first end before the last are there
        streams = [client.stream("x") for _ in range(70)]

        async def consume(stream):
            return "".join([chunk.text async for chunk in stream])

        tasks = [asyncio.create_task(consume(stream)) for stream in streams]
        frontend = server._service.served.frontend
        await until(lambda: len(frontend._streams) == 70)
        engine.gate.set()
        await until(lambda: sum(s.started for s in frontend._streams.values()) == 50)
        server.shut_down()
        await asyncio.sleep(0)
        results = asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine.waiting)
        await until_unhealthy(client)
        late = await refused(client.generate("x"))
        assert late.code() is Code.UNAVAILABLE
        answers = await results
    ended = [a for a in answers if a == "a" * 40]
    refused_ones = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
    assert len(ended) == 50 and len(refused_ones) == 20
    assert {e.code() for e in refused_ones} == {Code.UNAVAILABLE}
    assert balanced(frontend.counters, engine) and not engine.has_work


@in_loop
async def test_a_dead_engine_is_unavailable_and_unhealthy_and_says_why():
    engine = ScriptedEngine(forever, LONG)
    async with serving(engine) as (_, client):
        engine.gate.clear()
        call = asyncio.create_task(client.generate("x"))
        await until(lambda: engine.has_work)
        engine.fail_with = MemoryError("the device is gone")
        engine.gate.set()
        error = await refused(call)
        assert error.code() is Code.UNAVAILABLE and "the device is gone" in error.details()
        assert "the device is gone" in (await refused(client.generate("x"))).details()
        await until_unhealthy(client)


@in_loop
async def test_a_stalled_engine_is_unhealthy_until_it_moves(caplog):
    caplog.set_level("INFO")
    engine = ScriptedEngine(echo)
    async with serving(engine, stall_limit=2.0) as (_, client):
        engine.gate.clear()
        error = await refused(client.generate("x"))
        assert error.code() is Code.UNAVAILABLE and "stalls" in error.details()
        await until_unhealthy(client)
        engine.gate.set()
        await client.wait_ready(PATIENCE_S)
        assert (await client.generate("x")).text == "x"
    assert caplog.messages.count("serving") == 2
    assert sum("to try it" in message for message in caplog.messages) == 1


@in_loop
async def test_the_log_has_a_line_to_try(tmp_path, caplog):
    caplog.set_level("INFO")
    engine = ScriptedEngine(echo)
    async with serving(engine, host="0.0.0.0") as (server, _):
        line = f"to try it: jaxinfer chat --server 127.0.0.1:{server.port}"
        await until(lambda: line in caplog.messages)
    key, digest = make_key()
    (tmp_path / "keys").write_text(f"keys: [{{name: a, sha256: {digest}}}]")
    access = Access(tmp_path / "keys")
    async with serving(engine, client={"api_key": key}, access=access) as (server, _):
        line = f"to try it: JAXINFER_API_KEY=KEY jaxinfer chat --server 127.0.0.1:{server.port}"
        await until(lambda: line in caplog.messages)


@in_loop
async def test_who_only_watches_does_not_keep_the_server(monkeypatch):
    monkeypatch.setattr(server_module, "_HANDLERS_GRACE", 100 * PATIENCE_S)
    async with serving(ScriptedEngine(echo)) as (server, client):
        health = client._health.Watch(health_pb2.HealthCheckRequest())
        serving_status = health_pb2.HealthCheckResponse
        assert (await health.read()).status == serving_status.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await reflection.read()).list_services_response.service
        server.shut_down()
        assert (await health.read()).status == serving_status.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="the server has stopped"):
            await health.read()
        assert await reflection.read() is grpc.aio.EOF
