"""`bench ladder`: what each way of scheduling is worth, on one load and one set of programs.

The rungs are the engine's own switches. Everything arrives at the start; TTFT counts from there.

    one         a request is sent when the one before it ended
    static      a batch of all slots is sent when the batch before it ended, and keeps its size
                until its longest request ends; a step computes prompts or outputs, never both
    continuous  all is sent; whoever ends leaves its slot to the next; steps as before
    chunked     prompts are computed beside the streams that decode, in the same steps
    prefix      pages of prompts that begin alike are shared

Above those, with an engine of its own: weights in a kind (`w8a8-hl`), KV pages of a dtype
(`kv-int8`), or both (`w8a8-hl+kv-int8`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.drive import Progress, Timeline, drive_feed
from jaxinfer.bench.feeds import Waves
from jaxinfer.bench.stats import MedianInterval, median_interval, paired_ratio, summarise
from jaxinfer.bench.variants import StepLog, running_as
from jaxinfer.bench.workload import WorkItem
from jaxinfer.engine import Engine
from jaxinfer.page_dtypes import PAGE_NAMES, page_dtype
from jaxinfer.policy import SchedulerPolicy
from jaxinfer.quantization.kinds import KINDS

_APART = SchedulerPolicy(prefix_cache=False, separate_phases=True)


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run the load. `wave`: how many requests are sent at a time; `quantization` and
    `kv_dtype`: None where they are as the ladder's engine has them.
    """

    name: str
    title: str
    policy: SchedulerPolicy
    wave: str = "all"  # "one", "slots" or "all"
    full_batch: bool = False
    quantization: str | None = None
    kv_dtype: str | None = None

    @property
    def changes(self) -> dict[str, str]:
        """Fields of `EngineConfig` that differ from the ladder's."""
        fields = {"quantization": self.quantization, "kv_dtype": self.kv_dtype}
        return {name: value for name, value in fields.items() if value is not None}

    def wave_size(self, items: int, slots: int) -> int:
        return {"one": 1, "slots": slots, "all": items}[self.wave]


LADDER = (
    Rung("one", "one request at a time", _APART, "one"),
    Rung("static", "static batching", _APART, "slots", full_batch=True),
    Rung("continuous", "continuous batching", _APART),
    Rung("chunked", "+ chunked prefill", SchedulerPolicy(prefix_cache=False)),
    Rung("prefix", "+ prefix cache", SchedulerPolicy()),
)


@dataclass(slots=True)
class Runs:
    """What the rounds of one rung brought."""

    rates: list[float] = field(default_factory=list)  # output tokens a second, by round
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # of steps without prompts, by round
    prompt_seconds: list[float] = field(default_factory=list)  # of all others
    full_step_seconds: list[float] = field(default_factory=list)  # of one with most slots alive
    decode_steps: int = 0
    prompt_steps: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0

    def add(self, run: Timeline, log: StepLog, preemptions: int) -> None:
        self.rates.append(run.output_tokens / run.elapsed)
        self.ttfts += run.ttfts(since_start=True)
        self.tpots += run.tpots
        self.decode_seconds.append(sum(step.seconds for step in log.decode_steps))
        self.prompt_seconds.append(sum(step.seconds for step in log.prompt_steps))
        most = max((step.decodes for step in log.decode_steps), default=0)
        full = [step.seconds for step in log.decode_steps if step.decodes == most]
        self.full_step_seconds.append(sum(full) / max(len(full), 1))
        self.decode_steps, self.prompt_steps = len(log.decode_steps), len(log.prompt_steps)
        self.prefill_tokens = log.prefill_tokens
        self.preemptions = preemptions


def rungs_named(names: Sequence[str]) -> list[Rung]:
    """The rungs of these names: the ladder's own in its order, then those of kinds of weights and
    pages. Raises ValueError for an unknown one.
    """
    known = [rung.name for rung in LADDER]
    quantised = [_quantised_rung(name) for name in dict.fromkeys(names) if name not in known]
    return [*(rung for rung in LADDER if rung.name in names), *quantised]


def _quantised_rung(name: str) -> Rung:
    """KIND, kv-DTYPE or KIND+kv-DTYPE on top of all ways of scheduling."""
    kind, _, pages = name.rpartition("+")
    if not pages.startswith("kv-"):
        kind, pages = name, ""
    try:
        dtype = page_dtype(pages.removeprefix("kv-")) if pages else None
    except ValueError:
        dtype = None
    if (kind and kind not in KINDS) or (pages and dtype is None):
        raise ValueError(
            f"--rungs {name!r}: choose among {', '.join(rung.name for rung in LADDER)}, a kind of "
            f"weights ({', '.join(KINDS)}), kv- and a dtype of pages ({', '.join(PAGE_NAMES)}), or "
            "both as KIND+kv-DTYPE"
        )
    said = [f"weights {kind}" if kind else "", f"KV {dtype}" if dtype else ""]
    title = "+ " + ", ".join(filter(None, said))
    return Rung(name, title, SchedulerPolicy(), quantization=kind or None, kv_dtype=dtype)


def with_shared_prefix(items: Sequence[WorkItem], prefix: Sequence[int]) -> list[WorkItem]:
    return [WorkItem((*prefix, *item.prompt), item.output_len) for item in items]


def ladder(
    engine: Engine,
    items: Sequence[WorkItem],
    rungs: Sequence[Rung],
    rounds: int,
    progress: Progress | None = None,
    others: Mapping[str, Engine] | None = None,
) -> dict[str, Any]:
    """Every rung in every round, in turn; the first of `rungs` is what the others are set against.

    `others` are engines, with as many slots, of rungs that are not run by `engine`, by name. Raises
    RuntimeError if a request fails.
    """
    engines = {rung: (others or {}).get(rung.name, engine) for rung in rungs}
    slots = engine.limits.max_num_seqs
    runs = {rung: Runs() for rung in rungs}
    warm = [WorkItem(item.prompt, min(item.output_len, 4)) for item in items[:slots]]
    for rung in rungs:
        _run(engines[rung], rung, warm, Runs())
    for turn in range(rounds):
        first = turn % len(rungs)
        for rung in [*rungs[first:], *rungs[:first]]:
            _run(engines[rung], rung, items, runs[rung], progress)
    base = runs[rungs[0]]
    lengths = [item.output_len - 1 for item in items]  # the first token comes with the prompt
    return {
        "num_requests": len(items),
        "slots": slots,
        "rounds": rounds,
        "prompt_tokens": sum(len(item.prompt) for item in items),
        "output_tokens": sum(item.output_len for item in items),
        "rungs": [_entry(rung, runs[rung], base) for rung in rungs],
        "batching": _batching({rung.name: run for rung, run in runs.items()}, lengths, slots),
    }


def _run(
    engine: Engine,
    rung: Rung,
    items: Sequence[WorkItem],
    runs: Runs,
    progress: Progress | None = None,
) -> None:
    slots = engine.limits.max_num_seqs
    with running_as(engine, rung.policy, rung.full_batch) as log:
        feed = Waves(items, rung.wave_size(len(items), slots))
        run = drive_feed(engine, feed, slots, progress)
        runs.add(run, log, engine.scheduler.preemptions)


def _entry(rung: Rung, runs: Runs, base: Runs) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "title": rung.title,
        "output_tokens_per_second": median_interval(runs.rates).median,
        "ratio_to_first": interval_entry(paired_ratio(runs.rates, base.rates)),
        "ttft_ms": summarise([1e3 * s for s in runs.ttfts]),
        "tpot_ms": summarise([1e3 * s for s in runs.tpots]),
        "decode_steps": runs.decode_steps,
        "decode_seconds": runs.decode_seconds,
        "prompt_steps": runs.prompt_steps,
        "prompt_seconds": runs.prompt_seconds,
        "prefill_tokens": runs.prefill_tokens,
        "preemptions": runs.preemptions,
        "rates": runs.rates,
    }


def interval_entry(interval: MedianInterval) -> dict[str, float]:
    """For the JSON of a result."""
    return {"median": interval.median, "low": interval.low, "high": interval.high}


def static_bound(lengths: Sequence[int], slots: int) -> float:
    """How much less decoding is left when no slot waits for the longest of its batch.

    Sum over the batches of (longest x slots), over the sum of the lengths.
    """
    batches = itertools.batched(lengths, slots)
    return sum(max(batch) * slots for batch in batches) / sum(lengths)


def _batching(runs: dict[str, Runs], lengths: Sequence[int], slots: int) -> dict[str, Any] | None:
    """Continuous against static: decode steps and their seconds, beside the bound of each.

    A step costs less where fewer slots are alive, which static batching gains by. So the bound in
    seconds is what it took, over as many steps as the lengths fill, each with all slots alive.
    """
    if not {"static", "continuous"} <= runs.keys() or sum(lengths) == 0:
        return None
    static, continuous = runs["static"], runs["continuous"]
    bound = static_bound(lengths, slots)
    steps = static.decode_steps / continuous.decode_steps
    seconds = paired_ratio(static.decode_seconds, continuous.decode_seconds)
    full = [step * sum(lengths) / slots for step in continuous.full_step_seconds]
    return {
        "bound": bound,
        "decode_steps_ratio": steps,
        "decode_steps_fraction": steps / bound,
        "decode_seconds_ratio": interval_entry(seconds),
        "bound_seconds": paired_ratio(static.decode_seconds, full).median,
        "decode_seconds_fraction": paired_ratio(full, continuous.decode_seconds).median,
        "throughput_ratio": interval_entry(paired_ratio(continuous.rates, static.rates)),
    }
