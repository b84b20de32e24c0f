"""`jaxinfer plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jaxinfer.quantization.kinds import kinds_on
from jaxinfer_service.cli import console, engine_options, options

_FLOORS = "Floors"


def _counts(text: str) -> list[int]:
    return [options.parse_count(part) for part in text.split(",")]


PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint (of a Hugging Face folder config.json is enough), or a known model's "
        "name, e.g. llama-3-8b; a wrong one lists them.",
        show_default=False,
    ),
]
OnDevice = Annotated[
    str, typer.Option("--device", metavar="GPU", help="e.g. h200, b200, a100, l40s, rtx4090.")
]
Gpus = Annotated[int, typer.Option(min=1, metavar="N", help="Devices that share the model.")]
PlannedPages = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="Of the KV pool: float32, bfloat16, float16, int8 or fp8.",
        show_default="as --dtype",
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        metavar="WAY",
        help=f"Of the weights: {', '.join(kinds_on('cuda'))}.",
    ),
]
Batch = Annotated[
    str, typer.Option(metavar="ROWS,...", help="Rows that decode.", rich_help_panel=_FLOORS)
]
Context = Annotated[
    str,
    typer.Option(metavar="TOKENS,...", help="Of each row, e.g. 2k,8k.", rich_help_panel=_FLOORS),
]
Chunk = Annotated[
    int,
    typer.Option(
        parser=options.parse_count,
        metavar="TOKENS",
        help="Of a prompt beside the rows, the last ones of a prompt as long as the context.",
        rich_help_panel=_FLOORS,
    ),
]


def plan(
    model: PlannedModel,
    device: OnDevice = "h200",
    gpus: Gpus = 1,
    dtype: options.Dtype = None,
    kv_dtype: PlannedPages = None,
    quantization: Quantization = "none",
    max_model_len: engine_options.MaxModelLen = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    gpu_memory_utilization: engine_options.GpuMemoryUtilization = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Floors of steps too: the least they can take.")
    ] = False,
    batch: Batch = "1,16,64,256",
    context: Context = "2k,8k",
    chunk: Chunk = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Say what a model needs on GPUs that need not be there, and how fast they could serve it.

    Memory is divided as the server does at its start. Floors are on paper: the bytes a step must
    move and the operations it must do, at the rates of data sheets.
    """
    from jaxinfer.config import EngineConfig
    from jaxinfer.roofline import report
    from jaxinfer.roofline.devices import device_called
    from jaxinfer.roofline.step import Serving, StepLoad

    try:
        config, stored = report.read_model(model)
        kind = options.stored_dtype(dtype) or stored
        how = Serving(kind, kv_dtype, None if quantization == "none" else quantization, gpus)
        given = options.given(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory_utilization=gpu_memory_utilization,
        )
        loads = [
            StepLoad(rows, length, chunk) for length in _counts(context) for rows in _counts(batch)
        ]
        if roofline and (longest := max(load.context for load in loads)) > config.max_position:
            raise ValueError(
                f"--context is {longest}; the model allows at most {config.max_position}"
            )
        if roofline:  # steps of so many rows are what is planned for
            given.setdefault("max_num_seqs", max(load.batch for load in loads))
            given.setdefault(
                "max_num_batched_tokens", max(chunk, EngineConfig().max_num_batched_tokens)
            )
        engine = EngineConfig(**{"dtype": kind, **given})
        where = device_called(device)
        found = report.make_plan(model, config, where, how, engine, loads if roofline else [])
    except (ValueError, OSError) as error:
        console.fail(error)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    from rich.console import Console

    for line in report.memory_lines(found):
        typer.echo(line)
    if roofline:
        wide = Console()
        if not wide.is_terminal:
            wide = Console(width=200)
        wide.print(report.floor_table(found))
