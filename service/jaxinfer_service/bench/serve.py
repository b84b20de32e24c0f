"""`jaxinfer bench serve`: load on a running server, over gRPC or over HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jaxinfer.bench import report, serve
from jaxinfer.bench.arrivals import arrival_times
from jaxinfer.bench.cli import (
    DatasetName,
    JsonTo,
    NumPrompts,
    Seed,
    SyntheticInputLen,
    SyntheticOutputLen,
    app,
    dataset_name,
    lengths,
)
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer_service.bench.doors import door

_MESSAGE_TIMES = ("ttft", "tpot", "itl", "e2el")


@app.command("serve")
def bench_serve(
    server: Annotated[
        str, typer.Option(help="HOST:PORT of its gRPC, or http://HOST:PORT of its HTTP.")
    ] = "localhost:50051",
    request_rate: Annotated[
        float, typer.Option(help="Requests a second that arrive; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="1: Poisson; less: bursts; more: regular; inf: fixed intervals."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests on their way at once; default: no limit.")
    ] = None,
    num_prompts: NumPrompts = 100,
    input_len: SyntheticInputLen = None,
    output_len: SyntheticOutputLen = None,
    dataset: DatasetName = "synthetic",
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts draw token ids below it.")] = 1000,
    max_model_len: Annotated[int, typer.Option(help="Chat-like lengths are cut to it.")] = 4096,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="METRIC:MILLISECONDS that good requests keep (ttft, tpot, e2el); repeat."
        ),
    ] = None,
    seed: Seed = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to serve.")] = 60.0,
    json_to: JsonTo = None,
) -> None:
    """Send requests to a running server and report their latencies and throughput."""
    try:
        limits = serve.parse_goodput([part for text in goodput or () for part in text.split(",")])
        sizes = (num_prompts, *lengths(dataset, input_len, output_len))
        items = make_workload(dataset_name(dataset), *sizes, vocab_size, max_model_len, seed)
        arrivals = arrival_times(num_prompts, request_rate, burstiness, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with report.progress_bar() as progress:
            records, duration = asyncio.run(
                _measure(server, items, arrivals, max_concurrency, wait, progress)
            )
    except ValueError as error:
        raise typer.BadParameter(f"--server: {error}") from error
    except (TimeoutError, ConnectionError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    metrics = serve.serve_metrics(records, duration, limits)
    result = {
        **report.host(),
        "backend": "openai" if server.startswith("http") else "grpc",
        "server": server,
        "num_prompts": num_prompts,
        "dataset": dataset,
        "seed": seed,
        "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "burstiness": burstiness if math.isfinite(burstiness) else "inf",
        "max_concurrency": max_concurrency,
        "goodput": limits,
        **metrics,
        **serve.details(records),
    }
    report.publish(f"Load on {server}", _rows(metrics), result, json_to)
    if metrics["failed"]:
        first = next(record.error for record in records if record.error)
        typer.echo(f"{metrics['failed']} requests failed, the first: {first}", err=True)
        raise typer.Exit(1)


async def _measure(
    server: str,
    items: Sequence[WorkItem],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    wait: float,
    progress: report.Report,
) -> tuple[list[serve.Record], float]:
    """Wait for the server, send one request to see that it answers, then all of them."""
    way = door(server)
    try:
        await way.wait_ready(wait)
        probe = await serve.send(way, items[0])
        if not probe.ok:
            raise ConnectionError(f"{server} did not answer a first request: {probe.error}")
        return await serve.run(
            way,
            items,
            arrivals,
            max_concurrency,
            lambda done, total: progress("requests", done, total),
        )
    finally:
        await way.close()


def _rows(metrics: dict[str, Any]) -> dict[str, Any]:
    """The table: totals and rates, then each latency's mean, median, p90 and p99."""
    rows: dict[str, Any] = {
        "requests completed / failed": f"{metrics['completed']} / {metrics['failed']}",
        "seconds": metrics["duration"],
        "requests / s": metrics["request_throughput"],
        "good requests / s": metrics["request_goodput"],
        "output tokens / s": metrics["output_throughput"],
        "all tokens / s": metrics["total_token_throughput"],
        "most requests at once": metrics["max_concurrent_requests"],
    }
    for name in _MESSAGE_TIMES:
        values = (metrics[f"{s}_{name}_ms"] for s in ("mean", "median", "p90", "p99"))
        rows[f"{name.upper()} ms: mean, median, p90, p99"] = ", ".join(map(report.text, values))
    return rows
