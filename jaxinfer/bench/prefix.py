"""`bench prefix`: what the prefix cache saves, on and off in turns in one run.

Loads:

    shared     requests with one long prefix and a question of their own, all at once
    guide      three questions behind a system prompt of 200 tokens, 50 tokens each
    chat       conversations side by side; every prompt repeats all that was said before
    sharegpt   conversations whose messages have the lengths of real chats
    unrelated  single requests of such lengths that share nothing: what the cache costs then
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.bench.drive import Progress, Timeline, drive_feed
from jaxinfer.bench.feeds import Chats, Feed, Waves
from jaxinfer.bench.ladder import interval_entry, with_shared_prefix
from jaxinfer.bench.stats import median_interval, paired_ratio, summarise
from jaxinfer.bench.variants import StepLog, running_as
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.engine import Engine
from jaxinfer.policy import SchedulerPolicy

LOADS = ("shared", "guide", "chat", "sharegpt", "unrelated")
GUIDE = (3, 200, 50)  # questions, tokens of the system prompt, tokens of a question


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are, in tokens but for counts; `scale` multiplies real chats' lengths."""

    num_prompts: int = 64
    prefix_len: int = 1000
    question_len: int = 32
    output_len: int = 16
    num_chats: int = 8
    turns: int = 8
    turn_len: int = 48
    scale: float = 0.125


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, made afresh for each run; `shared`: the prefix all its requests have."""

    name: str
    feed: Callable[[], Feed]
    shared: int = 0


@dataclass(slots=True)
class Side:
    """The rounds of a load with the cache on, or off."""

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    mean_ttfts: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    prefill_tokens: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def add(self, run: Timeline, log: StepLog, engine: Engine) -> None:
        ttfts, scheduler = run.ttfts(), engine.scheduler
        self.seconds.append(run.elapsed)
        self.rates.append(run.output_tokens / run.elapsed)
        self.mean_ttfts.append(sum(ttfts) / len(ttfts))
        self.ttfts += ttfts
        self.prefill_tokens = log.prefill_tokens
        self.queries, self.hits = scheduler.prefix_queries, scheduler.prefix_hits
        self.preemptions = scheduler.preemptions

    def entry(self) -> dict[str, Any]:
        return {
            "seconds": median_interval(self.seconds).median,
            "output_tokens_per_second": median_interval(self.rates).median,
            "ttft_ms": summarise([1e3 * s for s in self.ttfts]),
            "prefill_tokens": self.prefill_tokens,
            "prefix_queries": self.queries,
            "prefix_hits": self.hits,
            "preemptions": self.preemptions,
        }


def make_load(name: str, sizes: Sizes, vocab_size: int, max_tokens: int, seed: int) -> Load:
    """The load of that name. Raises ValueError if it is none, or does not fit the model."""
    if name == "shared":
        lengths = (sizes.num_prompts, sizes.prefix_len, sizes.question_len, sizes.output_len)
        items = _behind_prefix(*lengths, vocab_size, max_tokens, seed)
        return Load(name, lambda: Waves(items, len(items)), sizes.prefix_len)
    if name == "guide":
        items = _behind_prefix(*GUIDE, sizes.output_len, vocab_size, max_tokens, seed)
        return Load(name, lambda: Waves(items, len(items)), GUIDE[1])
    if name == "chat":
        turns = make_workload(
            "synthetic", sizes.num_chats * sizes.turns, sizes.turn_len, sizes.turn_len,
            vocab_size, max_tokens, seed,
        )  # fmt: skip
    elif name in ("sharegpt", "unrelated"):
        count = sizes.num_chats * sizes.turns
        turns = make_workload(
            "sharegpt", count, 0, 0, vocab_size, max_tokens, seed, scale=sizes.scale
        )
    else:
        raise ValueError(f"--loads {name!r}: choose among {', '.join(LOADS)}")
    if name == "unrelated":
        return Load(name, lambda: Waves(turns, len(turns)))
    chats = [
        _that_fits(turns[first : first + sizes.turns], max_tokens)
        for first in range(0, len(turns), sizes.turns)
    ]
    return Load(name, lambda: Chats(chats))


def _behind_prefix(
    count: int,
    prefix_len: int,
    question_len: int,
    output_len: int,
    vocab_size: int,
    max_tokens: int,
    seed: int,
) -> list[WorkItem]:
    left = max_tokens - prefix_len
    if left < question_len + output_len:
        raise ValueError(
            f"a prefix of {prefix_len}, a question of {question_len} and an answer of {output_len} "
            f"tokens are more than the {max_tokens} one sequence can have"
        )
    questions = make_workload(
        "synthetic", count, question_len, output_len, vocab_size, left, seed + 1
    )
    prefix = np.random.default_rng(seed).integers(0, vocab_size, prefix_len).tolist()
    return with_shared_prefix(questions, prefix)


def _that_fits(turns: Sequence[WorkItem], max_tokens: int) -> list[WorkItem]:
    """A conversation up to the turn with which it would be longer than one sequence can be."""
    kept, tokens = [], 0
    for turn in turns:
        tokens += len(turn.prompt) + turn.output_len
        if tokens > max_tokens:
            break
        kept.append(turn)
    return kept


def shared_hits(prompt_lens: Sequence[int], shared: int, page_size: int) -> int:
    """Prompt tokens found when all prompts begin with the same `shared` tokens and the first of
    them was computed: full pages, of which one token at least is left to compute."""
    return sum(min(shared, length - 1) // page_size * page_size for length in prompt_lens[1:])


def compare(
    engine: Engine, load: Load, rounds: int, progress: Progress | None = None
) -> dict[str, Any]:
    """The load with the cache off and on, in turns; ratios are off over on, round by round."""
    off, on = Side(), Side()
    for turn in range(rounds):
        sides = [(off, False), (on, True)]
        for side, cached in sides if turn % 2 == 0 else reversed(sides):
            with running_as(engine, SchedulerPolicy(prefix_cache=cached)) as log:
                run = drive_feed(engine, load.feed(), engine.limits.max_num_seqs, progress)
                side.add(run, log, engine)
    prompts = [len(item.prompt) for item in run.items]
    result = {
        "load": load.name,
        "num_requests": len(prompts),
        "prompt_tokens": sum(prompts),
        "off": off.entry(),
        "on": on.entry(),
        "hit_rate": on.hits / on.queries,
        "saved": 1 - on.prefill_tokens / off.prefill_tokens,
        "speedup": interval_entry(paired_ratio(off.seconds, on.seconds)),
        "ttft_speedup": interval_entry(paired_ratio(off.mean_ttfts, on.mean_ttfts)),
    }
    if load.shared:
        expected = shared_hits(prompts, load.shared, engine.scheduler.limits.page_size)
        result["saved_by_arithmetic"] = expected / sum(prompts)
    return result


def warm_up(engine: Engine, load: Load) -> None:
    """A few of its requests, short, not measured."""
    items = [WorkItem(item.prompt, min(item.output_len, 4)) for item in load.feed().due(())]
    few = items[: engine.limits.max_num_seqs]
    with running_as(engine, SchedulerPolicy()):
        drive_feed(engine, Waves(few, len(few)), len(few))
