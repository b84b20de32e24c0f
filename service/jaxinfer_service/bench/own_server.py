"""The real server in this process, and the load on it in another: what it takes can be told apart.

Processor time is this process's: the engine and what is in front of it, not the clients. Requests
can also be given to the same engine past the server, as an offline engine has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.bench.setup import BenchEngine
from jaxinfer.bench.workload import WorkItem
from jaxinfer.engine import Engine
from jaxinfer.engine_link import EngineLink, OnEvents, OnStop
from jaxinfer.engine_thread import EngineThread
from jaxinfer.request import Command, SamplingParams, SequenceEvent, Submit
from jaxinfer.text import TextProcessor
from jaxinfer.validation import build_request
from jaxinfer_service.model import OpenedModel, keep_loaded
from jaxinfer_service.server import Server, ServerConfig

_LONGEST_LINE = 1 << 24  # bytes of an answer of the clients' process


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds: by the clock, of this process, and of what is in front of the engine (None where
    the system does not tell threads apart)."""

    wall: float
    process: float
    front: float | None


class Meter:
    """Measures what this process spends.

    The front's threads are the one that runs the event loop and those that came with the server,
    but for the engine's.
    """

    def __init__(self, before: set[int], engine: int):
        self._others = before - {threading.get_native_id()} | {engine}
        self._start = self._now()

    def _now(self) -> tuple[float, float, dict[int, float]]:
        threads = thread_seconds()
        front = {tid: seconds for tid, seconds in threads.items() if tid not in self._others}
        return time.perf_counter(), time.process_time(), front

    def spent(self) -> Spent:
        """Since it was made."""
        wall, process, front = self._now()
        began_wall, began_process, began_front = self._start
        gone = sum(s - began_front.get(tid, 0.0) for tid, s in front.items())
        return Spent(wall - began_wall, process - began_process, gone if front else None)


def thread_seconds() -> dict[int, float]:
    """Processor seconds of this process's threads by their native ids; {} where it is not Linux."""
    found = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(task.parent.name)] = int(task.read_text().split()[0]) / 1e9
    return found


class _Watched(EngineThread):
    """The engine's thread. `aside` takes the events if it is set, instead of the front.

    `ttfts`: once `time_firsts` was called, seconds from arrival to the first token, by prompt.
    """

    def __init__(self, engine: Engine, on_events: OnEvents, on_stop: OnStop):
        super().__init__(engine, self._sort, on_stop)
        self._late, self._held = 0, list[Submit]()  # those to come, and those that wait for them
        self._front = on_events
        self.aside: OnEvents | None = None
        self._arrived: dict[str, tuple[tuple[int, ...], float]] = {}  # prompt and time, by id
        self.ttfts: dict[tuple[int, ...], float] | None = None

    @property
    def native_id(self) -> int:
        return self._thread.native_id or 0

    def time_firsts(self) -> dict[tuple[int, ...], float]:
        """Begin anew, with what was sent since; the dict fills as first tokens come."""
        self._arrived, self.ttfts = {}, {}
        return self.ttfts

    def begin_together(self, count: int) -> None:
        """Let so many requests begin in one step, however they come: else the engine's work would
        depend on that too."""
        self._late, self._held = count, []

    def send(self, command: Command) -> None:
        if isinstance(command, Submit) and self.ttfts is not None:
            request = command.request
            self._arrived[request.id] = request.prompt, request.arrival
        if not (isinstance(command, Submit) and self._late):
            super().send(command)
            return
        self._held.append(command)
        self._late -= 1
        if not self._late:
            for waiting in self._held:
                super().send(waiting)

    def _sort(self, events: list[SequenceEvent]) -> None:
        ttfts = self.ttfts
        for event in events if ttfts is not None else ():
            if event.tokens and (arrived := self._arrived.pop(event.request_id, None)):
                assert ttfts is not None
                ttfts[arrived[0]] = event.time - arrived[1]
        (self.aside or self._front)(events)


class OwnServer:
    """See the module. Made by `own_server`, which ends it too."""

    def __init__(self, bench: BenchEngine, server: Server, clients: asyncio.subprocess.Process):
        self.server = server
        self.links: list[_Watched] = []  # the one, once the server has connected
        self._engine, self._clients, self._ids = bench.engine, clients, itertools.count(1)

    @property
    def link(self) -> _Watched:
        return self.links[0]

    @property
    def targets(self) -> dict[str, str]:
        """Where it listens, by the name of the door."""
        host = self.server.config.host
        return {
            "grpc": f"{host}:{self.server.port}",
            "http": f"http://{host}:{self.server.http_port}",
        }

    async def load(self, **job: Any) -> dict[str, Any]:
        """What the clients say of a job, which they begin at once: see `clients.py`.

        Raises RuntimeError if they ended instead.
        """
        stdin, stdout = self._clients.stdin, self._clients.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(job).encode() + b"\n")
        if not (line := await stdout.readline()):
            code = await self._clients.wait()
            raise RuntimeError(f"the clients ended with exit code {code}, see above")
        return json.loads(line)

    async def offline(self, items: Sequence[WorkItem]) -> None:
        """Run the same requests through the engine alone, all sent at once. Its clock is ours."""
        loop, done, left = asyncio.get_running_loop(), asyncio.Event(), len(items)

        def count(events: list[SequenceEvent]) -> None:
            nonlocal left
            left -= sum(event.finish is not None for event in events)
            if not left:
                loop.call_soon_threadsafe(done.set)

        self.link.aside = count
        for item in items:
            params = SamplingParams(
                temperature=0, max_new_tokens=item.output_len, ignore_eos=True, seed=0
            )
            name, now = f"offline-{next(self._ids)}", time.monotonic()
            request = build_request(item.prompt, params, self._engine.limits, (), name, now)
            self.link.send(Submit(request))
        await done.wait()
        self.link.aside = None


def opened(
    bench: BenchEngine, name: str, connect: Callable[[OnEvents, OnStop], EngineLink]
) -> OpenedModel:
    """A benchmark's engine as a server takes it, under that name."""
    defaults = bench.model.generation
    text = TextProcessor(
        bench.model.tokenizer, defaults.eos_ids, bench.engine.limits, defaults.sampling
    )
    return OpenedModel((name,), text, connect, bench.config)


@contextlib.asynccontextmanager
async def own_server(bench: BenchEngine) -> AsyncIterator[OwnServer]:
    """A server on this engine, and a process of clients, both ready."""
    keep_loaded()
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jaxinfer_service.bench.clients"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
    )
    server = Server(ServerConfig(port=0, http_port=0), lambda: model)
    own = OwnServer(bench, server, clients)

    def connect(on_events: OnEvents, on_stop: OnStop) -> EngineLink:
        own.links.append(_Watched(bench.engine, on_events, on_stop))
        return own.link

    model = opened(bench, "bench", connect)
    running = asyncio.create_task(server.run(on_signals=False))
    try:
        while not server.port and not running.done():
            await asyncio.sleep(0.01)
        if running.done():
            await running
        await own.load(kind="wait", servers=[*own.targets.values()])
        yield own
    except BaseException:  # an interruption, say: what they are doing is not waited for
        clients.kill()
        raise
    finally:
        assert clients.stdin is not None
        clients.stdin.close()
        await clients.wait()
        for _ in range(2):  # the second time says that nothing is to be drained
            server.shut_down()
        await running
