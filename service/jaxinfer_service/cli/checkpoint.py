"""`jaxinfer convert` and `jaxinfer inspect`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.option_groups import takes_groups
from jaxinfer_service.cli import console, engine_options, options, text_options
from jaxinfer_service.cli.remote import RemoteOptions
from jaxinfer_service.command import unwinding

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="config.json of an Orbax checkpoint of MaxText, gemma or NNX without one beside it; "
        "tokenizer.json is taken from its folder.",
        show_default=False,
    ),
]


def convert(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A Hugging Face folder, a .gguf file (the first, if split), or another project's "
            "Orbax checkpoint.",
        ),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The Orbax folder to write.")],
    config: ConfigFile = None,
    dtype: options.Dtype = None,
    quantization: engine_options.Quantization = None,
    chat_template: text_options.ChatTemplate = None,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Convert a checkpoint to Orbax, config, tokenizer and generation defaults included."""
    console.set_up_logging(log_level, log_format)
    there = os.path.lexists(Path(dst).expanduser())

    def consequence() -> str:
        done = not there and os.path.lexists(Path(dst).expanduser())
        return f"{dst} was complete by then" if done else f"nothing was written to {dst}"

    with unwinding(consequence) as check:
        from jaxinfer.checkpoints import convert as convert_checkpoint
        from jaxinfer.generation import TextOptions

        try:
            text = TextOptions.read(chat_template)
            with console.progress() as progress:

                def step(what: str, done: int, total: int) -> None:
                    check()
                    progress(what, done, total)

                kind = options.stored_dtype(dtype)
                path = convert_checkpoint(
                    src, dst, kind, step, config, text=text, quantization=quantization
                )
        except (ValueError, OSError, MemoryError) as error:
            console.fail(error)
        typer.echo(f"{path} is ready: jaxinfer serve {path}")


@takes_groups
def inspect(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="An Orbax or Hugging Face folder, a .gguf file, or `demo`.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[
        int | None,
        typer.Option(
            parser=options.parse_size,
            metavar="SIZE",
            help="Say what fits on a device with this much, e.g. 80GiB.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Sizes as if it were served so, see `jaxinfer serve --help`.",
            show_default="as stored",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of the KV pool, see `jaxinfer serve --help`.",
            show_default="auto",
        ),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Instead: every tensor, and as what it is stored.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    expert_load: Annotated[
        bool,
        typer.Option(
            "--expert-load", help="Instead: how a server's tokens spread over its experts."
        ),
    ] = False,
    over: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Of the next seconds, not since it began to serve."
        ),
    ] = None,
    *,
    where: RemoteOptions,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Say what a checkpoint is, from its headers: shapes, sizes, tokenizer. Loads nothing."""
    console.set_up_logging(log_level, log_format)
    if expert_load:
        if path is not None or device_memory is not None:
            raise typer.BadParameter("--expert-load asks a server: leave PATH and sizes out")
        from jaxinfer_service.cli.expert_load import show

        show(where, over, as_json)
        return
    if path is None or where.given or over is not None:
        raise typer.BadParameter("give a PATH; or --expert-load, with --server and --over")
    from jaxinfer.checkpoints import describe, inspect_checkpoint, tensor_table
    from jaxinfer.checkpoints.device_fit import device_fit
    from jaxinfer.demo import DEMO, demo_checkpoint
    from jaxinfer.page_dtypes import page_dtype

    try:
        with console.progress() as progress:
            found = demo_checkpoint(progress) if path == DEMO else path
            info = inspect_checkpoint(found, config, quantization)
        pages = page_dtype(kv_cache_dtype)
        per_token = info.kv_bytes_per_token(pages or info.dtype)
    except (ValueError, OSError) as error:
        console.fail(error)
    if as_json:
        fields: dict[str, Any] = info.to_json() | {"kv_bytes_per_token": per_token}
        if not tensors:
            del fields["tensors"]
        if device_memory is not None:
            kinds = (info.quantization, info.layouts, pages)
            fit = device_fit(info.config, info.dtype, device_memory, *kinds)
            fields["device"] = fit.to_json()
        typer.echo(json.dumps(fields, indent=1))
        return
    from rich.console import Console

    Console().print(tensor_table(info) if tensors else describe(info, device_memory, pages))
