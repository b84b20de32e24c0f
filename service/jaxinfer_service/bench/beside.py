"""`jaxinfer bench beside`: what streams without rules lose by those that are held to a schema."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Annotated, Any

import typer

from jaxinfer.bench import report
from jaxinfer.bench.cli import app
from jaxinfer.bench.options import EngineOptions, JsonTo, Model, Rounds, Seed
from jaxinfer.bench.setup import BenchEngine
from jaxinfer.bench.stats import median_interval, paired_ratio
from jaxinfer.option_groups import takes_groups
from jaxinfer_service.bench.own_server import own_server

# Never complete within a benchmark, so that its streams are as long as the others.
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": _PERSON, "minItems": 1000})


@app.command("beside")
@takes_groups
def beside(
    model: Model,
    engine: EngineOptions,
    plain: Annotated[int, typer.Option(min=1, help="Streams without rules.")] = 8,
    formed: Annotated[int, typer.Option(min=1, help="Streams beside them.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 32,
    output_len: Annotated[int, typer.Option(min=2, help="Output tokens of a request.")] = 64,
    rounds: Rounds = 10,
    seed: Seed = 0,
    json_to: JsonTo = None,
) -> None:
    """Decode streams beside others that follow a JSON schema, in turns with beside plain ones."""
    bench = engine.start(model, max_num_seqs=plain + formed, prefix_cache=False)
    sizes = {"input_len": input_len, "output_len": output_len}
    with report.progress_bar() as progress:
        rates = asyncio.run(_measure(bench, plain, formed, sizes, rounds, seed, progress))
    rows = []
    for name, (ours, others) in rates.items():
        ratio = paired_ratio(ours, others)
        shown = report.interval({"median": ratio.median, "low": ratio.low, "high": ratio.high})
        rows.append((name, median_interval(ours).median, median_interval(others).median, shown))
    headings = ("tokens a second of a stream", "beside schemas", "beside plain ones", "ratio")
    report.grid(f"{plain} streams beside {formed}", headings, rows, json_to)
    report.write_json({**report.environment(), **bench.describe(), "rates": rates}, json_to)


async def _measure(
    bench: BenchEngine,
    plain: int,
    formed: int,
    sizes: dict[str, int],
    rounds: int,
    seed: int,
    progress: report.Report,
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean tokens a second of a stream after its first token, by round: (beside formed, beside
    plain), of the plain streams and of the others. The first round is not entered."""
    rates: dict[str, tuple[list[float], list[float]]] = {
        "of those without rules": ([], []),
        "of the others": ([], []),
    }
    async with own_server(bench) as own:
        for turn in range(rounds + 1):
            for kind in (0, 1) if turn % 2 else (1, 0):
                job: dict[str, Any] = sizes | {
                    "kind": "load",
                    "plain": plain + (formed if kind else 0),
                    "formed": 0 if kind else formed,
                    "schema": SCHEMA,
                    "vocab_size": bench.engine.limits.vocab_size,
                    "seed": zlib.crc32(f"{seed} {turn} {kind}".encode()),
                }
                found = await own.load(servers=[own.targets["grpc"]], **job)
                speeds = [_speed(record) for record in found["records"]]
                if turn:
                    for name, part in zip(rates, (speeds[:plain], speeds[plain:])):
                        rates[name][kind].append(sum(part) / len(part))
            progress("rounds", turn + 1, rounds + 1)
    return rates


def _speed(record: dict[str, Any]) -> float:
    if "error" in record:
        raise RuntimeError(f"a request failed: {record['error']}")
    if not record["decode"]:
        raise RuntimeError("a stream came in one message, which has no speed; raise --output-len")
    return (record["tokens"] - 1) / record["decode"]
