"""`jaxinfer bench ladder | prefix | pages | scheduler`: what the scheduler's ways are worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from jaxinfer.bench import report
from jaxinfer.bench.options import (
    Concurrency,
    DatasetName,
    EngineOptions,
    JsonTo,
    LengthScale,
    Model,
    NumPrompts,
    PageSize,
    Rounds,
    Seed,
    SyntheticInputLen,
    SyntheticOutputLen,
    dataset_name,
    lengths,
    with_context,
)
from jaxinfer.bench.report import Report
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.option_groups import takes_groups

PrefixLen = Annotated[
    int, typer.Option(min=0, help="Tokens that all prompts begin with, besides their own.")
]


@takes_groups
def ladder(
    model: Model,
    engine: EngineOptions,
    num_prompts: NumPrompts = 128,
    concurrency: Concurrency = 8,
    dataset: DatasetName = "sharegpt",
    input_len: SyntheticInputLen = None,
    output_len: SyntheticOutputLen = None,
    length_scale: LengthScale = 0.125,
    prefix_len: PrefixLen = 128,
    rungs: Annotated[
        str,
        typer.Option(
            help="Which rungs, by their names; the first is the base of all ratios. A kind of "
            "weights, kv-DTYPE or KIND+kv-DTYPE is a rung too, such as w8a8-hl+kv-int8."
        ),
    ] = "one,static,continuous,chunked,prefix",
    rounds: Rounds = 3,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """One load run one by one, in static and in continuous batches, with chunks, with sharing, and
    with weights and KV pages of fewer bytes."""
    from jaxinfer.bench import ladder as bench_ladder

    sizes = lengths(dataset, input_len, output_len)
    try:
        chosen = bench_ladder.rungs_named(rungs.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    bench = engine.start(model, max_num_seqs=concurrency)
    items = _behind_prefix(
        bench.engine.limits, dataset, num_prompts, sizes, prefix_len, length_scale, seed
    )
    with report.progress_bar() as progress:
        others = {}
        for rung in chosen:
            if rung.changes:
                others[rung.name] = _changed(bench, rung.changes, progress).engine
        for each in (bench.engine, *others.values()):
            each.compiles.ready()  # those of the later ones were no harm to the earlier
        result = bench_ladder.ladder(bench.engine, items, chosen, rounds, progress, others)
    context = {"dataset": dataset, "length_scale": length_scale, "prefix_len": prefix_len}
    report.grid(
        f"Ladder: {num_prompts} requests, {concurrency} slots",
        ("", "output tok/s", "ratio", "TTFT ms, median", "p99", "TPOT ms, median", "p99"),
        [_rung_row(rung) for rung in result["rungs"]],
        json_to,
    )
    if result["batching"]:
        report.grid("Continuous against static", (), _batching_rows(result["batching"]), json_to)
    report.write_json(with_context(result, bench, seed=seed, **context), json_to)


def _changed(bench: Any, changes: dict[str, str], progress: Report) -> Any:
    """`start_changed`, whose errors end the command in one line."""
    from jaxinfer.bench.setup import start_changed

    try:
        return start_changed(bench, changes, progress)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _behind_prefix(
    limits: Any,
    dataset: str,
    count: int,
    sizes: tuple[int, int],
    prefix_len: int,
    scale: float,
    seed: int,
) -> list[WorkItem]:
    from jaxinfer.bench.ladder import with_shared_prefix

    left = limits.max_tokens - prefix_len
    try:
        if left < 2:
            raise ValueError(
                f"--prefix-len is {prefix_len}; one sequence can have {limits.max_tokens} tokens"
            )
        items = make_workload(
            dataset_name(dataset), count, *sizes, limits.vocab_size, left, seed, scale
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    prefix = np.random.default_rng(seed + 1).integers(0, limits.vocab_size, prefix_len)
    return with_shared_prefix(items, prefix.tolist())


def _rung_row(rung: dict[str, Any]) -> tuple[Any, ...]:
    ttft, tpot = rung["ttft_ms"], rung["tpot_ms"]
    rate, ratio = rung["output_tokens_per_second"], report.interval(rung["ratio_to_first"])
    return rung["title"], rate, ratio, ttft["median"], ttft["p99"], tpot["median"], tpot["p99"]


def _batching_rows(found: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("bound: batches of (longest x slots) / all lengths", found["bound"]),
        ("decode steps, static / continuous", found["decode_steps_ratio"]),
        ("  of the bound", f"{found['decode_steps_fraction']:.1%}"),
        ("their seconds, static / continuous", report.interval(found["decode_seconds_ratio"])),
        ("bound of the seconds: steps with all slots alive", found["bound_seconds"]),
        ("  of this bound", f"{found['decode_seconds_fraction']:.1%}"),
        ("output tok/s, continuous / static", report.interval(found["throughput_ratio"])),
    ]


@takes_groups
def prefix(
    model: Model,
    engine: EngineOptions,
    loads: Annotated[
        str, typer.Option(help="Which loads; see the documentation.")
    ] = "shared,guide,chat,sharegpt,unrelated",
    num_prompts: NumPrompts = 64,
    concurrency: Concurrency = 16,
    prefix_len: PrefixLen = 1000,
    question_len: Annotated[int, typer.Option(min=1, help="Prompt tokens after it.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens of those requests.")] = 16,
    chats: Annotated[int, typer.Option(min=1, help="Conversations side by side.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Messages of the user in each.")] = 8,
    turn_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a message and of an answer.")
    ] = 48,
    length_scale: LengthScale = 0.125,
    rounds: Rounds = 3,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Loads whose prompts begin alike, with the prefix cache on and off in turns."""
    from jaxinfer.bench import prefix as bench_prefix

    bench = engine.start(model, max_num_seqs=concurrency)
    sizes = bench_prefix.Sizes(
        num_prompts, prefix_len, question_len, output_len, chats, turns, turn_len, length_scale
    )
    limits = bench.engine.limits
    arguments = (sizes, limits.vocab_size, limits.max_tokens, seed)
    try:
        chosen = [bench_prefix.make_load(name, *arguments) for name in loads.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with report.progress_bar() as progress:
        bench_prefix.warm_up(bench.engine, chosen[0])
        found = [bench_prefix.compare(bench.engine, load, rounds, progress) for load in chosen]
    for result in found:
        report.grid(
            f"{result['load']}: {result['num_requests']} requests",
            ("", "cache off", "cache on", "off / on"),
            _load_rows(result),
            json_to,
        )
    report.write_json(with_context({"loads": found}, bench, seed=seed, rounds=rounds), json_to)


def _load_rows(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    off, on = result["off"], result["on"]
    rows = [
        ("seconds", off["seconds"], on["seconds"], report.interval(result["speedup"])),
        (
            "TTFT ms, mean", off["ttft_ms"]["mean"], on["ttft_ms"]["mean"],
            report.interval(result["ttft_speedup"]),
        ),
        ("TTFT ms, p99", off["ttft_ms"]["p99"], on["ttft_ms"]["p99"], ""),
        ("output tok/s", off["output_tokens_per_second"], on["output_tokens_per_second"], ""),
        ("prompt tokens computed", off["prefill_tokens"], on["prefill_tokens"], ""),
        ("hit rate", "", f"{result['hit_rate']:.1%}", ""),
        ("prompt tokens saved", "", f"{result['saved']:.2%}", ""),
    ]  # fmt: skip
    if "saved_by_arithmetic" in result:
        rows.append(("  by arithmetic", "", f"{result['saved_by_arithmetic']:.2%}", ""))
    return rows


def pages(
    model: Annotated[str, typer.Argument(help="Whose KV pool it is; only its headers are read.")],
    kv_cache_memory: Annotated[int, typer.Option(help="Bytes of the KV pool.")] = 2 << 30,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Of keys and values; default: as the weights are served.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Prompt + output tokens of one sequence; default: the model's."),
    ] = None,
    page_size: PageSize = 64,
    num_prompts: NumPrompts = 2000,
    dataset: DatasetName = "sharegpt",
    input_len: SyntheticInputLen = None,
    output_len: SyntheticOutputLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Slots; enough that they are not the limit.")
    ] = 1024,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens one step may prefill.")
    ] = 2048,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """How many requests run at once in the same memory: paged, and reserved whole."""
    from jaxinfer.bench import pages as bench_pages

    sizes = lengths(dataset, input_len, output_len)
    try:
        memory = _memory(
            model, kv_cache_memory, kv_cache_dtype, page_size, max_model_len, max_num_seqs,
            max_num_batched_tokens,
        )  # fmt: skip
        items = make_workload(
            dataset_name(dataset), num_prompts, *sizes, 1 << 15, memory.max_model_len, seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with report.progress_bar() as progress:
        ways = bench_pages.compare_reservations(memory, items, progress)
    report.grid(
        f"Requests at once in {memory.tokens} tokens of KV pool, "
        f"{memory.max_model_len} at most for one",
        ("", "mean at once", "most", "paged / this", "steps / paged", "preemptions"),
        [
            (w["way"], w["mean_at_once"], w["most_at_once"], w["paged_to_this"],
             w["steps_to_paged"], w["preemptions"])
            for w in ways
        ],
        json_to,
    )  # fmt: skip
    result = {
        **report.host(), "model": model, "kv_tokens": memory.tokens, "page_size": page_size,
        "max_model_len": memory.max_model_len, "num_prompts": num_prompts, "seed": seed,
        "dataset": dataset, "groups": memory.groups, "ways": ways,
    }  # fmt: skip
    report.write_json(result, json_to)


def _memory(
    model: str,
    pool_bytes: int,
    dtype: str | None,
    page_size: int,
    max_model_len: int | None,
    num_slots: int,
    chunk_tokens: int,
) -> Any:
    """The pool's geometry. Raises ValueError if it holds no sequence of full length."""
    from jaxinfer.bench.pages import Memory
    from jaxinfer.checkpoints.inspection import inspect_checkpoint
    from jaxinfer.demo import DEMO, demo_checkpoint
    from jaxinfer.kv_pool import kv_groups, pages_that_fit
    from jaxinfer.page_dtypes import page_dtype

    info = inspect_checkpoint(demo_checkpoint() if model == DEMO else model)
    longest = max_model_len or info.config.max_position
    kept_in = page_dtype(dtype) or info.dtype
    page_bytes = info.kv_bytes_per_token(kept_in) * page_size
    tokens = pool_bytes // page_bytes * page_size
    if tokens < longest:
        raise ValueError(
            f"--kv-cache-memory {pool_bytes} holds {tokens} tokens, --max-model-len is {longest}; "
            "give more memory or a shorter length"
        )
    kv = kv_groups(info.config, 1, page_size, kept_in)
    pages = pages_that_fit(kv, pool_bytes, num_slots, longest, chunk_tokens)
    windows = [group.window for group in kv]
    groups = tuple(zip(pages, windows)) if any(windows) else ()
    return Memory(tokens, page_size, longest, num_slots, chunk_tokens, groups)


def scheduler(
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Slots.")] = 256,
    waiting: Annotated[
        str, typer.Option(help="Requests in the queue, one run for each length given.")
    ] = "2000,20000",
    pages: Annotated[int, typer.Option(min=2, help="Pages of the KV pool.")] = 50_000,
    page_size: PageSize = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens one step may prefill.")
    ] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 1000,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before that.")] = 1000,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """What deciding a step costs the host, with long queues and no device."""
    from jaxinfer.bench.scheduler_cost import scheduler_times
    from jaxinfer.policy import SchedulerLimits, SchedulerPolicy

    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, page_size, (pages,))
    try:
        queues = [int(length) for length in waiting.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--waiting {waiting!r}: write numbers, as 2000,20000") from error
    with report.progress_bar() as progress:
        runs = [
            scheduler_times(limits, SchedulerPolicy(), queue, warm_up, steps, seed, progress)
            for queue in queues
        ]
    report.grid(
        f"Scheduler, milliseconds at {max_num_seqs} slots",
        ("", *(f"{run['waiting']:,} waiting" for run in runs)),
        _cost_rows(runs),
        json_to,
    )
    sizes = {"slots": max_num_seqs, "pages": pages, "page_size": page_size, "seed": seed}
    report.write_json({**report.host(), **sizes, "runs": runs}, json_to)


def _cost_rows(runs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [("rows that decode, mean", *(run["rows"] for run in runs))]
    parts = {
        "step_ms": "a step", "plan_ms": "  plan", "read_ms": "  read", "add_ms": "a request added",
    }  # fmt: skip
    for part, title in parts.items():
        for statistic in ("median", "p99"):
            rows.append((f"{title}, {statistic}", *(run[part][statistic] for run in runs)))
    return rows


COMMANDS: tuple[Callable[..., None], ...] = (ladder, prefix, pages, scheduler)
