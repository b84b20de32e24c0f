"""The clients by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from fake_engine import ScriptedEngine, echo, forever, limits
from jaxinfer_service import client as module
from jaxinfer_service import model, servicer
from jaxinfer_service.client import Asked, AsyncClient, Client, generate_request
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2_grpc
from jaxinfer_service.server import Server, ServerConfig
from serving import PATIENCE_S, in_loop, opened, server_thread, serving, until, wait_until

from jaxinfer.request import EngineStoppedError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LONG = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
Code = grpc.StatusCode


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_waiting_lasts_longer_than_a_first_start(client):
    assert inspect.signature(client.wait_ready).parameters["timeout"].default >= 600


def test_waiting_in_vain_ends_in_time_and_says_what_was_heard():
    with Client("127.0.0.1:1") as client, pytest.raises(TimeoutError, match="UNAVAILABLE"):
        client.wait_ready(0.3)


def test_it_imports_no_jax():
    code = (
        "import sys, jaxinfer_service.client; "
        "assert not {'jax', 'jaxlib', 'torch', 'orbax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_the_wire_has_can_be_asked_by_name():
    of_call = {*pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    of_call -= {
        "model",
        "sampling",
        *(f.name for f in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields),
    }
    assert {*Asked.__annotations__} == {*pb.Sampling.DESCRIPTOR.fields_by_name} | of_call
    request = generate_request([1, 2], "m", priority=-3, tenant="t", cache_salt="s", top_k=4)
    assert (request.priority, request.tenant, request.cache_salt) == (-3, "t", "s")
    assert request.sampling.top_k == 4 and [*request.token_ids.ids] == [1, 2]
    assert not generate_request("x").HasField("priority")
    with pytest.raises(ValueError, match="temprature"):
        generate_request("x", temprature=1)


# -- trying again ----------------------------------------------------------------------------------


class Moody(inference_pb2_grpc.InferenceServicer):
    """Fails as it is told, call after call, then answers."""

    def __init__(self, *failures, pushback=None):
        self.failures, self.pushback, self.calls = [*failures], pushback, 0

    def _fail(self, context):
        self.calls += 1
        if not self.failures:
            return
        if self.pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", str(self.pushback)),))
        context.abort(self.failures.pop(0), "not now")

    def Generate(self, request, context):
        self._fail(context)
        return pb.GenerateResponse(text="here")

    def GenerateStream(self, request, context):
        if self.calls == 0:  # begins, then fails
            self.calls += 1
            yield pb.GenerateChunk(text="he")
            context.abort(Code.UNAVAILABLE, "gone")
        self._fail(context)
        yield pb.GenerateChunk(text="here")


@contextlib.contextmanager
def moody(*failures, **how):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service = Moody(*failures, **how)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def ask(address, kind, **how):
    """The code with which a call ends, or its text."""
    try:
        if kind is Client:
            with Client(address, **how) as client:
                return client.generate("x").text

        async def call():
            async with AsyncClient(address, api_key="k", **how) as client:
                return (await client.generate("x")).text

        return asyncio.run(call())
    except grpc.RpcError as error:
        return error.code()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("failures", "retries", "expected", "calls"),
    [
        ([Code.UNAVAILABLE, Code.UNAVAILABLE], 3, "here", 3),
        ([Code.RESOURCE_EXHAUSTED], 1, "here", 2),
        ([Code.UNAVAILABLE] * 9, 2, Code.UNAVAILABLE, 3),
        ([Code.UNAVAILABLE], 0, Code.UNAVAILABLE, 1),
        ([Code.INVALID_ARGUMENT], 3, Code.INVALID_ARGUMENT, 1),
        ([Code.INTERNAL], 3, Code.INTERNAL, 1),
        ([Code.DEADLINE_EXCEEDED], 3, Code.DEADLINE_EXCEEDED, 1),
        ([Code.ABORTED], 3, Code.ABORTED, 1),
    ],
)
def test_only_what_nobody_works_on_is_tried_again(kind, failures, retries, expected, calls):
    with moody(*failures) as (service, address):
        assert ask(address, kind, retries=retries) == expected
    assert service.calls == calls


def test_a_server_says_when_and_whether_to_try_again():
    with moody(Code.RESOURCE_EXHAUSTED, pushback=-1) as (service, address):
        assert ask(address, Client) is Code.RESOURCE_EXHAUSTED and service.calls == 1
    with moody(Code.RESOURCE_EXHAUSTED, pushback=50) as (service, address):
        assert ask(address, Client) == "here" and service.calls == 2


def test_an_answer_that_has_begun_is_not_begun_again():
    with moody() as (service, address), Client(address) as client:
        texts = []
        with pytest.raises(grpc.RpcError) as caught:
            texts.extend(chunk.text for chunk in client.stream("x"))
        assert caught.value.code() is Code.UNAVAILABLE and service.calls == 1


def chunks_of(client, prompt):
    return [chunk.text for chunk in client.stream(prompt, max_new_tokens=1)]


@pytest.mark.parametrize(
    ("prompt", "call"),
    [
        ("x", lambda client, prompt: [client.generate(prompt, max_new_tokens=1).text]),
        ("x", chunks_of),
        ("x" * 300_000, chunks_of),  # gRPC keeps 256 KiB of a call, unless told otherwise
    ],
    ids=["generate", "stream", "long prompt"],
)
def test_our_server_leaves_a_refused_call_free_to_be_tried_again(monkeypatch, prompt, call):
    """What it sends along, such as the call's id, must not begin the answer."""
    refusals, leave = [], threading.Event()

    def loaded(served):
        try:
            return model.loaded(served)
        except EngineStoppedError:
            refusals.append(served)
            leave.set()
            raise

    monkeypatch.setattr(servicer, "loaded", loaded)
    size = 1 << 19
    engine = ScriptedEngine(
        echo, limits(max_model_len=size, kv_tokens=size, max_queued_tokens=size)
    )
    server = Server(ServerConfig(port=0), lambda: leave.wait(PATIENCE_S) and opened(engine))

    async def serve():
        task = asyncio.create_task(server.run(on_signals=False))
        await until(lambda: server.port)
        try:
            with Client(f"127.0.0.1:{server.port}") as client:
                return await asyncio.to_thread(call, client, prompt)
        finally:
            server.shut_down()
            leave.set()
            await task

    assert "".join(asyncio.run(serve())) == "x" and refusals


@pytest.mark.parametrize("retries", [-1, 5])
def test_retries_are_bounded(retries):
    with pytest.raises(ValueError, match=f"retries is {retries}; gRPC makes 0 to 4"):
        Client("127.0.0.1:1", retries=retries)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"api_key": "ji-a\n"}, "api_key is no API key"),
        ({"api_key": "clé"}, "api_key is no API key"),
        ({"ca": "ca.pem"}, "has no tls://"),
        ({"target": "tls://127.0.0.1:1", "cert": "cert.pem"}, "needs both cert and key"),
    ],
)
def test_what_cannot_be_a_connection_is_refused_before_a_call(how, said):
    with pytest.raises(ValueError, match=said):
        Client(**{"target": "127.0.0.1:1"} | how)


# -- leaving, and many at once ---------------------------------------------------------------------


def test_leaving_the_loop_ends_the_request():
    engine = ScriptedEngine(forever, LONG)
    with server_thread(engine) as address, Client(address) as client:
        for chunk in client.stream("x"):
            assert chunk.request_id
            break
        asyncio.run(until(lambda: engine.counters.aborted == 1))


@in_loop
async def test_leaving_the_loop_ends_the_request_in_asyncio_too():
    engine = ScriptedEngine(forever, LONG)
    async with serving(engine) as (_, client):
        async for chunk in client.stream("x"):
            assert chunk.request_id
            break
        await until(lambda: engine.counters.aborted == 1)


MANY = limits(max_queued_requests=3)  # and two slots


def test_many_prompts_are_answered_in_order_so_many_at_a_time():
    prompts = [f"prompt {i}" for i in range(20)]
    with server_thread(ScriptedEngine(echo, MANY)) as address:
        with Client(address, retries=0) as client:
            answers = client.generate_all(prompts, concurrency=2)
            assert [answer.text for answer in answers] == prompts
            assert client.generate_all([]) == []

        async def all_of_them():
            async with AsyncClient(address, retries=0) as client:
                return await client.generate_all(iter(prompts), concurrency=2)

        assert [answer.text for answer in asyncio.run(all_of_them())] == prompts


def test_of_many_the_first_failure_is_raised():
    engine = ScriptedEngine(echo, MANY)
    with server_thread(engine) as address:
        with Client(address) as client:
            with pytest.raises(grpc.RpcError) as caught:
                client.generate_all(["a", "", "b"], concurrency=1)
            assert caught.value.code() is Code.INVALID_ARGUMENT
            with pytest.raises(ValueError, match="concurrency is 0"):
                client.generate_all(["a"], concurrency=0)

        async def fails():
            async with AsyncClient(address) as client:
                await client.generate_all(["a", "", *"bcd"], concurrency=2)

        with pytest.raises(grpc.RpcError) as caught:
            asyncio.run(fails())
        assert caught.value.code() is Code.INVALID_ARGUMENT
        asyncio.run(until(lambda: not engine.has_work))


def test_many_are_given_up_at_once():
    """By a failure and by Ctrl-C: what runs is cancelled, and nothing else begun."""
    engine = ScriptedEngine(forever, LONG)
    with server_thread(engine) as address, Client(address, api_key="k") as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.generate_all(["a", "", *"bcd"], concurrency=2)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        wait_until(lambda: engine.counters.aborted == 1)

        def interrupt():
            wait_until(lambda: engine.counters.received == 3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            client.generate_all("x" * 9, concurrency=2)
        wait_until(lambda: engine.counters.aborted == 3)
        assert engine.counters.received == 3 and not engine.has_work


# -- the examples ----------------------------------------------------------------------------------

ONLY = """
import importlib.metadata, importlib.util, re, sys
wanted, have = sys.argv[1:], {"jaxinfer"}
while wanted:
    name = re.sub("[-_.]+", "-", wanted.pop()).lower()
    if name not in have:
        have.add(name)
        needs = importlib.metadata.requires(name) or []
        wanted += [re.match("[A-Za-z0-9._-]+", n)[0] for n in needs if "extra ==" not in n]
of = importlib.metadata.packages_distributions()
class Absent:
    def find_spec(name, path=None, target=None):
        found = {re.sub("[-_.]+", "-", d).lower() for d in of.get(name.split(".")[0], ())}
        if found and not found & have:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent)
from jaxinfer_service.client import Client, violations
with Client("127.0.0.1:1", retries=0) as client:
    try:
        client.generate([{"role": "user", "content": "x"}])
    except Exception as error:
        assert violations(error) == {} and error.code().name == "UNAVAILABLE", error
"""


def test_the_client_needs_only_the_packages_that_its_example_names():
    said = (EXAMPLES / "many_prompts.py").read_text()
    packages = re.search("pip install (?!--no-deps)(.+)", said)[1]
    assert packages in (EXAMPLES.parent / "docs" / "serving.md").read_text()
    run_example(sys.executable, "-c", ONLY, *packages.split())


def run_example(*command, cwd=None):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_asks_many_at_once():
    with server_thread(ScriptedEngine(echo, LONG)) as address:
        out = run_example(sys.executable, EXAMPLES / "many_prompts.py", address)
    assert "What is 7 times 8?" in out and out.count("tokens") >= 5


@pytest.fixture(scope="module")
def node_modules():
    """The Node example with what it needs, installed once a machine."""
    from jaxinfer.paths import cache_dir

    if shutil.which("npm") is None:
        pytest.skip("no Node is installed")
    folder = cache_dir() / "node-example"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (EXAMPLES / "node").glob("*.*"):
        shutil.copy(file, folder)
    if not (folder / "node_modules").exists():
        done = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"],
            cwd=folder, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if done.returncode:
            shutil.rmtree(folder / "node_modules", ignore_errors=True)
            pytest.skip(f"npm could not install what the example needs: {done.stderr[-300:]}")
    return folder


def test_the_node_example_streams_a_chat(node_modules):
    proto = Path(module.__file__).parent / "pb"
    with server_thread(ScriptedEngine(echo, LONG)) as address:
        out = run_example("node", "chat.mjs", address, "héllo 😀", str(proto), cwd=node_modules)
    assert "user: héllo 😀" in out and "prompt tokens" in out
