"""`jaxinfer bench throughput | latency | steps`. `serve` is added where the transport is known."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxinfer.bench import report
from jaxinfer.bench.workload import DATASETS, Dataset, WorkItem, make_workload

app = typer.Typer(no_args_is_help=True, help="Measure throughput, latency, steps, and a server.")

Model = Annotated[
    str, typer.Argument(help="An Orbax or Hugging Face folder, a .gguf file, or `demo`.")
]
Dtype = Annotated[str | None, typer.Option(help="Weights and activations; default: as stored.")]
NumPrompts = Annotated[int, typer.Option(help="Requests to run.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens of a request.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens of a request.")]
SyntheticInputLen = Annotated[
    int | None, typer.Option(help="Prompt tokens of a synthetic request; default: 128.")
]
SyntheticOutputLen = Annotated[
    int | None, typer.Option(help="Output tokens of a synthetic request; default: 64.")
]
DatasetName = Annotated[
    str, typer.Option(help=f"{' or '.join(DATASETS)}: fixed lengths, or lengths as in real chats.")
]
Seed = Annotated[int, typer.Option(help="Prompts, lengths and arrivals follow from it.")]
JsonTo = Annotated[str | None, typer.Option("--json", help="Write JSON to a file; -: to stdout.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Prompt + output tokens of one sequence; default: the model's.")
]
ChunkTokens = Annotated[int, typer.Option(help="Prompt tokens one step may prefill.")]
PoolBytes = Annotated[
    int | None, typer.Option(help="Bytes of the KV pool; default: as for serving.")
]


@app.command()
def throughput(
    model: Model,
    num_prompts: NumPrompts = 64,
    input_len: SyntheticInputLen = None,
    output_len: SyntheticOutputLen = None,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", "--max-num-seqs", min=1, help="Requests that run at once."),
    ] = 32,
    dataset: DatasetName = "synthetic",
    seed: Seed = 0,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: ChunkTokens = 512,
    kv_cache_memory: PoolBytes = None,
    json_to: JsonTo = None,
) -> None:
    """Run many requests through the engine, without a server: requests and tokens a second."""
    from jaxinfer.bench import offline

    prompt_len, new_len = lengths(dataset, input_len, output_len)
    bench = _start(
        model,
        0,
        dtype,
        max_num_seqs=concurrency,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_pool_bytes=kv_cache_memory,
    )
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
        _with_context(result, bench, dataset, seed),
        json_to,
    )


@app.command()
def latency(
    model: Model,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of one batch.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    num_iters: Annotated[int, typer.Option(help="Batches to time.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before that.")] = 2,
    seed: Seed = 0,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: ChunkTokens = 512,
    kv_cache_memory: PoolBytes = None,
    json_to: JsonTo = None,
) -> None:
    """Time one batch of requests from submission to its last token."""
    from jaxinfer.bench import offline

    bench = _start(
        model,
        0,
        dtype,
        max_num_seqs=batch_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_pool_bytes=kv_cache_memory,
    )
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
        _with_context(result, bench, "synthetic", seed),
        json_to,
    )


@app.command()
def steps(
    model: Annotated[
        str | None, typer.Argument(help="As for throughput; leave out with --fake-model.")
    ] = None,
    fake_model: Annotated[
        bool,
        typer.Option("--fake-model", help="A model that computes nothing: the host's cost alone."),
    ] = False,
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
    seed: Seed = 0,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: ChunkTokens = 512,
    kv_cache_memory: PoolBytes = None,
    json_to: JsonTo = None,
) -> None:
    """Time steps: what the engine's thread does, and each program on the device."""
    from jaxinfer.bench.steps import steps_report

    if (model is None) != fake_model:
        raise typer.BadParameter("name a MODEL, or give --fake-model instead of one")
    if fake_layers is not None and not fake_model:
        raise typer.BadParameter("--fake-layers is for --fake-model; leave it out")
    if dtype is not None and fake_model:
        raise typer.BadParameter("--dtype is for a MODEL: the fake one computes nothing")
    slots = concurrency or (256 if fake_model else 32)
    bench = _start(
        model,
        fake_layers or 32,
        dtype,
        max_num_seqs=slots,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_pool_bytes=kv_cache_memory,
    )
    count = num_prompts or slots
    items = _workload(bench.engine, "synthetic", count, input_len, output_len, seed)
    with report.progress_bar() as progress:
        result = steps_report(bench.engine, items, min(slots, count), progress)
    report.publish(
        "Steps, milliseconds",
        _steps_rows(result),
        _with_context(result, bench, "synthetic", seed),
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


def _start(model: str | None, fake_layers: int, dtype: str | None, **config: Any) -> Any:
    """The engine of a model, or of the fake one. Errors of the command line end in one line."""
    from jaxinfer.bench import setup
    from jaxinfer.config import EngineConfig

    with report.progress_bar() as progress:
        try:
            if model is None:
                return setup.start_fake(fake_layers, EngineConfig(**config), progress)
            return setup.start(model, EngineConfig(**config), dtype, progress)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


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


def lengths(dataset: str, input_len: int | None, output_len: int | None) -> tuple[int, int]:
    """The lengths of synthetic requests. Raises typer.BadParameter for others with lengths."""
    if dataset != "synthetic" and (input_len, output_len) != (None, None):
        raise typer.BadParameter(
            f"--input-len and --output-len are for --dataset synthetic; {dataset} draws its own"
        )
    return 128 if input_len is None else input_len, 64 if output_len is None else output_len


def dataset_name(name: str) -> Dataset:
    """The data set of that name. Raises typer.BadParameter naming the known ones."""
    for known in DATASETS:
        if name == known:
            return known
    raise typer.BadParameter(f"--dataset {name!r} is not one of {', '.join(DATASETS)}")


def _with_context(result: dict[str, Any], bench: Any, dataset: str, seed: int) -> dict[str, Any]:
    """The result with what it was measured on and how."""
    return {
        **report.environment(),
        **bench.describe(),
        "dataset": dataset,
        "seed": seed,
        **result,
    }
