"""`jaxinfer run-batch`: a file of requests, answered into another, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.option_groups import takes_groups
from jaxinfer_service.cli import console, engine_options, options, text_options
from jaxinfer_service.cli.serve import Source, open_model
from jaxinfer_service.command import unwinding

if TYPE_CHECKING:
    from jaxinfer_service.batch import Journal, Line
    from jaxinfer_service.model import OpenedModel

_AT_ONCE = 2  # requests asked for each slot: the next ones wait where the engine sees them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine(engine_options.PresetEngineOptions):
    """An engine that nobody waits at."""

    preset: engine_options.Preset = "batch"


@takes_groups
def run_batch(
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="One request a line, in OpenAI's batch format.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ],
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="For the answers; what it has is not asked again.",
            dir_okay=False,
            show_default=False,
        ),
    ],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="MODEL", help="As `serve` takes it, e.g. demo."),
    ],
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Names the requests may give it; repeatable."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests at a time. Default: two a slot."),
    ] = None,
    *,
    engine: _Engine,
    text: text_options.ReplyOptions,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Answer a file of requests. Interrupted, it goes on where it was when it is run again."""
    console.set_up_logging(log_level, log_format)
    from jaxinfer_service.batch import BatchError, Journal, read_requests

    try:
        lines = read_requests(requests)
        with Journal(answers, lines) as journal:
            if len(journal.answered) < len(lines):
                source = Source.of(model, served_model_name, engine, text)
                at_once = concurrency or _AT_ONCE * source.engine.max_num_seqs
                with unwinding(lambda: _state(journal, lines)):
                    opened = open_model(source)
                    asyncio.run(_run(opened, requests, lines, journal, at_once))
    except* (BatchError, ValueError, RuntimeError, OSError, MemoryError) as group:
        console.fail(_first(group))
    typer.echo(f"{_state(journal, lines)}, {journal.refused} of them with an error")
    if journal.refused:
        raise typer.Exit(1)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _state(journal: Journal, lines: list[Line]) -> str:
    return f"{len(journal.answered)} of {len(lines)} requests are answered"


async def _run(
    opened: OpenedModel, requests: Path, lines: list[Line], journal: Journal, concurrency: int
) -> None:
    from jaxinfer.frontend import Frontend
    from jaxinfer_service import batch
    from jaxinfer_service.http.app import HttpFront
    from jaxinfer_service.live import LiveView
    from jaxinfer_service.metrics.histograms import Histograms
    from jaxinfer_service.model import ServedModel

    histograms = Histograms(opened.text.limits.max_model_len)
    frontend = Frontend(opened.text, opened.connect, observers=[histograms])
    front = HttpFront("jaxinfer", LiveView())
    front.serve(ServedModel(opened, frontend, histograms))
    frontend.start()
    watch = asyncio.create_task(_watch(frontend.check))
    try:
        with console.progress() as progress:
            await batch.run(
                requests,
                lines,
                journal,
                batch.InProcess(front.app),
                concurrency,
                lambda done, total: progress("answering", done, total),
            )
    finally:
        watch.cancel()
        await asyncio.to_thread(frontend.stop)


async def _watch(check: Callable[[], str]) -> None:
    """End what is asked of an engine that failed or stalls."""
    while True:
        check()
        await asyncio.sleep(0.5)
