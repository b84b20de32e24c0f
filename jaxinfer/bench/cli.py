"""`jaxinfer bench throughput | latency | steps`, and commands of `cli_scheduling` and `loading`.

`serve` is added where the transport is known.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxinfer.bench import report
from jaxinfer.bench.cli_scheduling import COMMANDS
from jaxinfer.bench.loading import load
from jaxinfer.bench.options import (
    Concurrency,
    DatasetName,
    EngineOptions,
    FakeModel,
    InputLen,
    JsonTo,
    Model,
    ModelUnlessFake,
    NumPrompts,
    OutputLen,
    PrefixCache,
    Seed,
    SyntheticInputLen,
    SyntheticOutputLen,
    dataset_name,
    lengths,
    one_model,
    with_context,
)
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.option_groups import takes_groups

__all__ = [  # for commands that are added elsewhere
    "DatasetName",
    "JsonTo",
    "Model",
    "NumPrompts",
    "Seed",
    "SyntheticInputLen",
    "SyntheticOutputLen",
    "app",
    "dataset_name",
    "lengths",
]

app = typer.Typer(
    no_args_is_help=True,
    help="Measure throughput, latency, steps, scheduling, loading, a server.",
)


@app.command()
@takes_groups
def throughput(
    model: Model,
    engine: EngineOptions,
    num_prompts: NumPrompts = 64,
    input_len: SyntheticInputLen = None,
    output_len: SyntheticOutputLen = None,
    concurrency: Concurrency = 32,
    dataset: DatasetName = "synthetic",
    prefix_cache: PrefixCache = False,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Run many requests through the engine, without a server: requests and tokens a second."""
    from jaxinfer.bench import offline

    prompt_len, new_len = lengths(dataset, input_len, output_len)
    bench = engine.start(model, max_num_seqs=concurrency, prefix_cache=prefix_cache)
    items = _workload(bench.engine, dataset, num_prompts, prompt_len, new_len, seed)
    with report.progress_bar() as progress:
        result = offline.throughput(bench.engine, items, concurrency, progress)
    report.publish(
        "Throughput, offline",
        {
            "requests / s": result["requests_per_second"],
            "prompt tokens / s": result["prompt_tokens_per_second"],
            "output tokens / s": result["output_tokens_per_second"],
            "decode tokens / s, all streams running": result["decode_tokens_per_second"],
            "prefill tokens / s, first wave": result["prefill_tokens_per_second"],
            "seconds": result["elapsed_time"],
        },
        with_context(result, bench, dataset=dataset, seed=seed),
        json_to,
    )


@app.command()
@takes_groups
def latency(
    model: Model,
    engine: EngineOptions,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of one batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    num_iters: Annotated[int, typer.Option(help="Batches to time.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before that.")] = 2,
    prefix_cache: PrefixCache = False,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Time one batch of requests from submission to its last token."""
    from jaxinfer.bench import offline

    bench = engine.start(model, max_num_seqs=batch_size, prefix_cache=prefix_cache)
    items = _workload(bench.engine, "synthetic", batch_size, input_len, output_len, seed)
    with report.progress_bar() as progress:
        try:
            result = offline.latency(bench.engine, items, num_iters, num_iters_warmup, progress)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    percentiles = result["percentiles"]
    report.publish(
        f"Latency of a batch of {batch_size}, seconds",
        {
            "mean": result["avg_latency"],
            **{f"p{p}": percentiles[p] for p in ("50", "90", "99")},
            "batches": len(result["latencies"]),
        },
        with_context(result, bench, dataset="synthetic", seed=seed),
        json_to,
    )


@app.command()
@takes_groups
def steps(
    engine: EngineOptions,
    model: ModelUnlessFake = None,
    fake_model: FakeModel = False,
    fake_layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Layers of the fake model: they set the number of arguments; default: 32."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests to run; default: one a slot.")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "--max-num-seqs", min=1, help="Default: 32; fake model: 256."
        ),
    ] = None,
    prefix_cache: PrefixCache = False,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Time steps: what the engine's thread does, and each program on the device."""
    from jaxinfer.bench.steps import steps_report

    one_model(model, fake_model)
    if fake_layers is not None and not fake_model:
        raise typer.BadParameter("--fake-layers is for --fake-model; leave it out")
    slots = concurrency or (256 if fake_model else 32)
    bench = engine.start(model, fake_layers or 32, max_num_seqs=slots, prefix_cache=prefix_cache)
    count = num_prompts or slots
    items = _workload(bench.engine, "synthetic", count, input_len, output_len, seed)
    with report.progress_bar() as progress:
        result = steps_report(bench.engine, items, min(slots, count), progress)
    report.publish(
        "Steps, milliseconds",
        _steps_rows(result),
        with_context(result, bench, dataset="synthetic", seed=seed),
        json_to,
    )


def _steps_rows(result: dict[str, Any]) -> dict[str, Any]:
    """The table of `steps`: the engine's thread first, then the programs, costliest first."""
    rows: dict[str, Any] = {"steps": result["num_steps"]}
    for name, title in (("host_all", "all steps"), ("host_decode", "full decode steps")):
        host = result[name]
        rows |= {
            f"{title}: wall, median": host["wall_ms"]["median"],
            f"{title}: engine thread's CPU, median": host["cpu_ms"]["median"],
            f"{title}: engine thread's CPU, mean": host["cpu_ms"]["mean"],
            f"{title}: CPU share of the wall clock": host["cpu_share"],
        }
    for name, program in result["programs"].items():
        rows[f"{name} (x{program['runs']}), median"] = program["median"]
    return rows


def _workload(
    engine: Any, dataset: str, num_prompts: int, input_len: int, output_len: int, seed: int
) -> list[WorkItem]:
    limits = engine.limits
    lengths = (num_prompts, input_len, output_len)
    try:
        return make_workload(
            dataset_name(dataset), *lengths, limits.vocab_size, limits.max_tokens, seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


for _command in (*COMMANDS, load):
    app.command()(_command)
