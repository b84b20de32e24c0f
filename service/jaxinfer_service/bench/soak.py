"""`jaxinfer bench soak`: a server among clients that leave and dawdle: memory and counters."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from jaxinfer.bench import report
from jaxinfer.bench.cli import app
from jaxinfer.bench.options import EngineOptions, JsonTo, Seed
from jaxinfer.bench.setup import BenchEngine
from jaxinfer.option_groups import takes_groups
from jaxinfer_service.bench.own_server import OwnServer, own_server
from jaxinfer_service.client import AsyncClient
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2

_LEAVE_SECONDS = 60.0  # for requests that were left to be ended
_SAMPLES = 120  # of the memory, over the run


@app.command("soak")
@takes_groups
def soak(
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Argument(help="As for throughput; default: one that computes nothing.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 600.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at each door.")] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "--max-num-seqs", min=1, help="Slots.")
    ] = 16,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Serve clients that leave early, read slowly and ask badly; exit code 1 if counters do not
    balance."""
    bench = engine.start(model, 32, max_num_seqs=concurrency, prefix_cache=True)
    with report.progress_bar() as progress:
        result = asyncio.run(_soak(bench, seconds, clients, seed, progress))
    shown = {name: value for name, value in result.items() if name != "memory"}
    report.publish(
        f"Soak of {seconds:g} s",
        {name: _text(value) for name, value in shown.items()},
        {**report.environment(), **bench.describe(), "clients": clients, "seed": seed, **result},
        json_to,
    )
    if result["failed"] or not result["balanced"]:
        raise typer.Exit(1)


async def _soak(
    bench: BenchEngine, seconds: float, clients: int, seed: int, progress: report.Report
) -> dict[str, Any]:
    memory, stop = list[tuple[float, float]](), asyncio.Event()
    async with own_server(bench) as own:
        watching = asyncio.create_task(_watch(memory, seconds, stop, progress))
        how = {
            "seconds": seconds,
            "clients": clients,
            "seed": seed,
            "vocab_size": bench.engine.limits.vocab_size,
            "max_tokens": bench.engine.limits.max_tokens,
        }
        asked = await own.load(kind="unruly", servers=[*own.targets.values()], how=how)
        stop.set()
        await watching
        left = await _left(own)
    return {
        **asked,
        **left,
        "memory_mib": [memory[0][1], memory[-1][1]],
        "mib_a_minute": _slope(memory[len(memory) // 2 :]),
        "mib_a_minute_whole": _slope(memory),
        "memory": memory,
    }


async def _watch(
    memory: list[tuple[float, float]], seconds: float, stop: asyncio.Event, progress: report.Report
) -> None:
    """Note this process's resident memory, as (seconds, MiB)."""
    process, start = psutil.Process(), time.monotonic()
    while not stop.is_set():
        gone = time.monotonic() - start
        memory.append((gone, process.memory_info().rss / 2**20))
        progress("seconds", min(int(gone), int(seconds)), int(seconds))
        await asyncio.sleep(max(seconds / _SAMPLES, 0.1))


async def _left(own: OwnServer) -> dict[str, Any]:
    """What the server says of its requests once all clients have gone."""
    end = time.monotonic() + _LEAVE_SECONDS
    async with AsyncClient(own.targets["grpc"]) as client:
        while True:
            load = await client.control.Load(control_pb2.LoadRequest())
            if not (load.running or load.waiting) or time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
    counters = load.counters
    ended = counters.finished + counters.aborted + counters.refused
    return {
        "received": counters.received,
        "finished": counters.finished,
        "aborted": counters.aborted,
        "refused": counters.refused,
        "pages_used": load.pages.used,
        "balanced": counters.received == ended and not load.pages.used,
    }


def _slope(memory: list[tuple[float, float]]) -> float:
    """MiB a minute, by least squares."""
    if len(memory) < 2:
        return 0.0
    times, sizes = np.asarray(memory).T
    return float(np.polyfit(times, sizes, 1)[0] * 60)


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return " → ".join(map(report.text, value)) if isinstance(value, list) else value
