"""`bench throughput` and `bench latency`: the engine alone, without a server or text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.bench.drive import Progress, decode_rate, drive, full_decode_steps
from jaxinfer.bench.workload import WorkItem
from jaxinfer.engine import Engine

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def throughput(
    engine: Engine,
    items: Sequence[WorkItem],
    concurrency: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """All items at once, `concurrency` running at a time. Rates are tokens (requests) a second."""
    warm_up(engine, items[0])
    run = drive(engine, items, concurrency, progress)
    total = run.prompt_tokens + run.output_tokens
    return {
        "num_requests": len(items),
        "concurrency": run.streams,
        "elapsed_time": run.elapsed,
        "total_num_tokens": total,
        "total_input_tokens": run.prompt_tokens,
        "total_output_tokens": run.output_tokens,
        "requests_per_second": len(items) / run.elapsed,
        "tokens_per_second": total / run.elapsed,
        "prompt_tokens_per_second": run.prompt_tokens / run.elapsed,
        "output_tokens_per_second": run.output_tokens / run.elapsed,
        "prefill_tokens_per_second": run.prefill_rate,
        "decode_tokens_per_second": decode_rate(run.marks, run.streams),
        "full_decode_steps": len(full_decode_steps(run.marks, run.streams)),
        "num_steps": len(run.marks),
    }


def latency(
    engine: Engine,
    items: Sequence[WorkItem],
    num_iters: int,
    num_iters_warmup: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Seconds one batch of all items takes from submission to its last token, `num_iters` times."""
    if num_iters < 1:
        raise ValueError(f"--num-iters is {num_iters}; it must be at least 1")
    seconds = []
    for i in range(num_iters_warmup + num_iters):
        elapsed = drive(engine, items, len(items)).elapsed
        if i >= num_iters_warmup:
            seconds.append(elapsed)
        if progress:
            progress("batches", i + 1, num_iters_warmup + num_iters)
    return {
        "batch_size": len(items),
        "avg_latency": float(np.mean(seconds)),
        "percentiles": {str(p): float(np.percentile(seconds, p)) for p in LATENCY_PERCENTILES},
        "latencies": seconds,
    }


def warm_up(engine: Engine, item: WorkItem) -> None:
    """One request of the workload's own kind, not measured."""
    drive(engine, [WorkItem(item.prompt, min(item.output_len, 4))], 1)
