"""`jaxinfer quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxinfer_service.cli import console, options
from jaxinfer_service.command import unwinding


def quantize(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint of any kind, or `demo`."),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The Orbax folder to write.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="gptq: what rounding a column changes, those after it make up for; awq: columns "
            "are scaled by what they meet; rtn: each weight to its nearest.",
        ),
    ] = "gptq",
    bits: Annotated[int, typer.Option(metavar="4|8", help="Of a weight.")] = 4,
    group_size: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Columns that share a scale, halved where they do not divide a matrix; -1: all.",
        ),
    ] = 128,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text that awq and gptq measure on: a JSON object with a `text` a line.",
            show_default="a small set of ours",
        ),
    ] = None,
    max_calibration_tokens: Annotated[
        int, typer.Option(min=32, metavar="N", help="Tokens of it that are used.")
    ] = 16384,
    damping: Annotated[
        float, typer.Option(metavar="X", help="gptq: added to the moments, of their mean.")
    ] = 0.01,
    act_order: Annotated[
        bool,
        typer.Option("--act-order/--no-act-order", help="gptq: columns that meet most come first."),
    ] = False,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Quantise a checkpoint by what its weights meet in text, layer by layer.

    A run that is interrupted goes on where it was when it is started again with the same options.
    """
    console.set_up_logging(log_level, log_format)
    work = Path(dst).expanduser()
    work = work.with_name(f".{work.name}.quantize")
    with unwinding(lambda: f"start again to go on ({work} has what is done)") as check:
        from jaxinfer.demo import DEMO, demo_checkpoint
        from jaxinfer.evaluation.cases import read_texts
        from jaxinfer.quantization.making.make import Settings, quantise_checkpoint
        from jaxinfer.quantization.making.texts import DEFAULT_TEXTS

        try:
            settings = Settings(
                method, bits, group_size, damping, act_order, max_calibration_tokens  # type: ignore[arg-type]
            )  # fmt: skip
            file = DEFAULT_TEXTS if calibration is None else Path(calibration).expanduser()
            texts = list(read_texts(file).values()) if method != "rtn" else []
            with console.progress() as progress:

                def step(what: str, done: int, total: int) -> None:
                    check()
                    progress(what, done, total)

                found = demo_checkpoint(step) if src == DEMO else src
                path = quantise_checkpoint(found, dst, settings, texts, step)
        except (ValueError, OSError, MemoryError) as error:
            console.fail(error)
        typer.echo(f"{path} is ready: jaxinfer serve {path}")
