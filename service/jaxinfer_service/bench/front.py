"""`jaxinfer bench front`: what a server adds to its engine, in turns with the engine alone."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from jaxinfer.bench import report
from jaxinfer.bench.cli import app
from jaxinfer.bench.options import (
    EngineOptions,
    FakeModel,
    JsonTo,
    ModelUnlessFake,
    Rounds,
    Seed,
    one_model,
)
from jaxinfer.bench.stats import median_interval, paired_ratio, summarise
from jaxinfer.option_groups import takes_groups
from jaxinfer_service.bench.clients import prompts
from jaxinfer_service.bench.own_server import Meter, OwnServer, Spent, own_server, thread_seconds

OFFLINE, WAYS = "offline", ("offline", "grpc", "http")


@dataclass(slots=True)
class Cell:
    """What so many streams at once took by one way, a value a round (TTFTs: a value a request).

    Processor time is microseconds a token, TTFT milliseconds that a client waited longer than the
    engine took.
    """

    streams: int
    tokens_per_second: list[float] = field(default_factory=list)
    process_us: list[float] = field(default_factory=list)
    front_us: list[float] = field(default_factory=list)
    front_share: list[float] = field(default_factory=list)
    messages_per_second: list[float] = field(default_factory=list)
    tokens_per_message: list[float] = field(default_factory=list)
    added_ttft_ms: list[float] = field(default_factory=list)

    def enter(self, tokens: int, spent: Spent) -> None:
        self.tokens_per_second.append(tokens / spent.wall)
        self.process_us.append(spent.process / tokens * 1e6)
        if spent.front is not None:
            self.front_us.append(spent.front / tokens * 1e6)
            self.front_share.append(spent.front / spent.process)

    def enter_messages(self, tokens: int, messages: int, spent: Spent) -> None:
        self.messages_per_second.append(messages / spent.wall)
        self.tokens_per_message.append(tokens / messages)


Cells = dict[int, dict[str, Cell]]


@app.command("front")
@takes_groups
def front(
    engine: EngineOptions,
    model: ModelUnlessFake = None,
    fake_model: FakeModel = False,
    streams: Annotated[str, typer.Option(help="Requests at once, several numbers.")] = "1,16,64",
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of a request.")] = 64,
    rounds: Rounds = 10,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Compare a server's processor time, speed and TTFT with its engine alone, by both doors.

    Requests that come at once begin in one step, so that the engine does the same by every way.
    """
    one_model(model, fake_model)
    numbers = _numbers(streams)
    bench = engine.start(model, 32, max_num_seqs=max(numbers), prefix_cache=False)
    lengths = {"input_len": input_len, "output_len": output_len}
    if input_len + output_len > bench.engine.limits.max_tokens:
        raise typer.BadParameter(
            f"--input-len {input_len} + --output-len {output_len}: one sequence can have "
            f"{bench.engine.limits.max_tokens} tokens"
        )
    with report.progress_bar() as progress:
        cells = asyncio.run(_measure(bench, numbers, lengths, rounds, seed, progress))
    _publish(cells, json_to)
    report.write_json(
        {
            **report.environment(),
            **bench.describe(),
            **lengths,
            "rounds": rounds,
            "seed": seed,
            "cells": [{"streams": n, "ways": _json(ways)} for n, ways in cells.items()],
        },
        json_to,
    )


def _numbers(streams: str) -> list[int]:
    try:
        numbers = [int(part) for part in streams.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"--streams {streams!r}: write numbers of 1 or more, as 1,16,64")
    return numbers


async def _measure(
    bench: Any,
    numbers: Sequence[int],
    lengths: dict[str, int],
    rounds: int,
    seed: int,
    progress: report.Report,
) -> Cells:
    """In every round each number of streams by every way, the order of ways turning; the first
    round is not entered: connections, threads and caches begin there."""
    cells = {n: {way: Cell(n) for way in WAYS} for n in numbers}
    engines_own = {*thread_seconds()}
    async with own_server(bench) as own:
        for turn in range(rounds + 1):
            for n in numbers:
                for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                    job = lengths | {
                        "plain": n,
                        "formed": 0,
                        "schema": None,
                        "vocab_size": bench.engine.limits.vocab_size,
                        "seed": zlib.crc32(f"{seed} {turn} {n} {way}".encode()),
                    }
                    cell = cells[n][way] if turn else Cell(n)
                    await _turn(own, way, job, Meter(engines_own, own.link.native_id), cell)
            progress("rounds", turn + 1, rounds + 1)
    return cells


async def _turn(own: OwnServer, way: str, job: dict[str, Any], meter: Meter, cell: Cell) -> None:
    items = prompts(job)
    tokens = sum(item.output_len for item in items)
    own.link.begin_together(len(items))
    if way == OFFLINE:
        await own.offline(items)
        cell.enter(tokens, meter.spent())
        return
    ttfts = own.link.time_firsts()
    records = (await own.load(kind="load", servers=[own.targets[way]], **job))["records"]
    spent = meter.spent()
    if failed := [record["error"] for record in records if "error" in record]:
        raise RuntimeError(f"{len(failed)} requests failed over {way}, the first: {failed[0]}")
    cell.enter(tokens, spent)
    cell.enter_messages(tokens, sum(record["messages"] for record in records), spent)
    for item, record in zip(items, records):
        cell.added_ttft_ms.append((record["ttft"] - ttfts[item.prompt]) * 1e3)


def _publish(cells: Cells, json_to: str | None) -> None:
    spent, seen = [], []
    for n, ways in cells.items():
        for way, cell in ways.items():
            offline, name = ways[OFFLINE], (str(n), way)
            spent.append(
                (
                    *(*name, _middle(cell.process_us)),
                    _ratio(cell.process_us, offline.process_us),
                    *(_middle(cell.front_us), _middle(cell.front_share)),
                )
            )
            ttft = summarise(cell.added_ttft_ms) if cell.added_ttft_ms else {}
            seen.append(
                (
                    *(*name, _middle(cell.tokens_per_second)),
                    _ratio(cell.tokens_per_second, offline.tokens_per_second),
                    *(_middle(cell.messages_per_second), _middle(cell.tokens_per_message)),
                    *(ttft.get("median"), ttft.get("p99")),
                )
            )
    beside = ("streams", "way", "µs/token", "to offline", "front's", "share")
    report.grid("Processor time of the server", beside, spent, json_to)
    speed = ("streams", "way", "tok/s", "to offline", "msg/s", "tok/msg")
    report.grid("What clients see", (*speed, "TTFT ms + p50", "p99"), seen, json_to)


def _middle(values: Sequence[float]) -> float | None:
    return median_interval(values).median if values else None


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    found = paired_ratio(ours, theirs)
    return report.interval({"median": found.median, "low": found.low, "high": found.high})


def _json(ways: dict[str, Cell]) -> dict[str, Any]:
    return {way: dataclasses.asdict(cell) for way, cell in ways.items()}
