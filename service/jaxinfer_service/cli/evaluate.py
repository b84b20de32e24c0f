"""`jaxinfer eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer_service.cli import console, engine_options, options

ROOM = 512  # tokens of a case's prompt and answer
_REFERENCE, _TEXTS, _THRESHOLDS = "Reference", "Texts and cases", "Thresholds"


def evaluate(
    model: options.Model,
    quantization: engine_options.Quantization = None,
    kv_cache_dtype: engine_options.KvCacheDtype = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The reference.",
            show_default="the same model",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    against_quantization: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Of its weights.",
            show_default="as stored",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    against_kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of its KV pool.",
            show_default="auto",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    dtype: options.Dtype = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Texts to predict, one {"text": ...} a line.',
            show_default="eight of several kinds",
            rich_help_panel=_TEXTS,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=2,
            max=4096,
            metavar="N",
            help="Tokens of each text that are taken.",
            rich_help_panel=_TEXTS,
        ),
    ] = 64,
    cases: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions and what answers must hold, see docs/quantisation.md.",
            show_default="25 of several kinds",
            rich_help_panel=_TEXTS,
        ),
    ] = None,
    no_cases: Annotated[
        bool, typer.Option("--no-cases", help="Texts only.", rich_help_panel=_TEXTS)
    ] = False,
    max_kl: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="X",
            help="KL divergence from the reference, in nats.",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = 0.06,
    min_top1: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="Share of positions with the same most likely token.",
            show_default="none",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    max_lost: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Cases that the reference answers and MODEL does not.",
            show_default="none",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Say how far MODEL's answers are from a reference's: another checkpoint, or the same one with
    other weights or pages. Exit code 1 if that is too far."""
    console.set_up_logging(log_level, log_format)
    if no_cases and (cases is not None or max_lost is not None):
        raise typer.BadParameter("--no-cases leaves nothing for --cases and --max-lost")
    from jaxinfer.checkpoints import inspect_checkpoint
    from jaxinfer.demo import DEMO, demo_checkpoint
    from jaxinfer.evaluation.cases import DEFAULT_CASES, DEFAULT_TEXTS, read_cases, read_texts
    from jaxinfer.evaluation.evaluate import Thresholds, describe
    from jaxinfer.evaluation.evaluate import evaluate as compare
    from jaxinfer.llm import LLM

    try:
        asked = [] if no_cases else read_cases(cases or DEFAULT_CASES)
        written = read_texts(texts or DEFAULT_TEXTS)
        sides = (
            (model, quantization, kv_cache_dtype),
            (against or model, against_quantization, against_kv_cache_dtype),
        )
        with console.progress(announce=True) as progress:

            def opened(path: str, weights: str | None, pages: str | None) -> LLM:
                found = demo_checkpoint(progress) if path == DEMO else path
                longest = inspect_checkpoint(found).config.max_position
                return LLM(
                    str(found),
                    dtype=options.stored_dtype(dtype),
                    progress=progress,
                    quantization=weights,
                    kv_dtype=pages,
                    max_model_len=min(longest, max(max_tokens, ROOM)),
                    max_num_seqs=8,
                    max_num_batched_tokens=64,
                )

            llm, reference = opened(*sides[0]), opened(*sides[1])
        thresholds = Thresholds(max_kl, min_top1, max_lost)
        found = compare(llm, reference, [*written.values()], asked, thresholds, max_tokens)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        console.fail(error)
    if as_json:
        typer.echo(json.dumps({"model": model, "against": against or model, **found.to_json()}))
    else:
        from rich.console import Console

        Console().print(describe(found, list(written)))
    for problem in found.problems:
        typer.echo(problem, err=True)
    if found.problems:
        raise typer.Exit(1)
