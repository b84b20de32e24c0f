"""`jaxinfer bench mock-server`: the real server over a device that only takes time.

On a device of its own, a model leaves the processor to the server and its clients. Here both would
share it, and a load generator would measure what it takes from the model itself. This one is for
comparing load generators, and for trying clients without a model.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.bench.cli import app
from jaxinfer.bench.options import EngineOptions
from jaxinfer.bench.setup import BenchEngine
from jaxinfer.engine_thread import EngineThread
from jaxinfer.option_groups import takes_groups
from jaxinfer.runner import StepResult, StepRunner
from jaxinfer.step_plan import StepPlan
from jaxinfer_service.bench.own_server import opened
from jaxinfer_service.cli import console
from jaxinfer_service.model import keep_loaded
from jaxinfer_service.server import Server, ServerConfig


@app.command("mock-server")
@takes_groups
def mock_server(
    engine: EngineOptions,
    step_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of each step.")] = 30.0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "--max-num-seqs", min=1, help="Slots.")
    ] = 16,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of gRPC; 0: a free one.")] = 50051,
    http_port: Annotated[int, typer.Option(help="Of HTTP; 0: a free one.")] = 8000,
    tokenizer_to: Annotated[
        Path | None, typer.Option(help="Write its tokenizer, whose tokens are bytes, to a folder.")
    ] = None,
) -> None:
    """Serve a model that computes nothing, in steps of a fixed time, until SIGTERM or Ctrl-C.

    Requests may call it `mock`. Every step takes as long, whatever is in it: the server, its
    scheduler and its programs are the real ones.
    """
    console.set_up_logging("info", "text")
    bench = engine.start(None, 1, max_num_seqs=concurrency, prefix_cache=False)
    if tokenizer_to is not None:
        bench.model.tokenizer.save(tokenizer_to)
    keep_loaded()
    try:
        asyncio.run(paced(bench, step_ms / 1e3, ServerConfig(host, port, http_port)).run())
    except (RuntimeError, OSError) as error:
        console.fail(error)


def paced(bench: BenchEngine, step_seconds: float, config: ServerConfig) -> Server:
    """A server of the model `mock` on this engine, whose device is slowed down to that."""
    bench.engine.runner = Paced(bench.engine.runner, step_seconds)
    model = opened(bench, "mock", lambda *calls: EngineThread(bench.engine, *calls))
    return Server(config, lambda: model)


class Paced:
    """A runner whose device takes `seconds` for a step, one step after the other."""

    def __init__(self, runner: StepRunner, seconds: float):
        self._runner, self._seconds, self._free_at = runner, seconds, 0.0

    def dispatch(self, plan: StepPlan) -> tuple[Any, float]:
        self._free_at = max(self._free_at, time.monotonic()) + self._seconds
        return self._runner.dispatch(plan), self._free_at

    def collect(self, handle: tuple[Any, float]) -> StepResult:
        dispatched, done_at = handle
        result = self._runner.collect(dispatched)
        time.sleep(max(0.0, done_at - time.monotonic()))
        return result
