"""Options that take the place of what a checkpoint says about chats and generating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.field_rules import shown

_MODEL = "Model"

ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A chat template (Jinja) in place of the checkpoint's.",
        show_default="the checkpoint's",
        rich_help_panel=_MODEL,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        metavar="auto|none|FOLDER",
        help="Where sampling defaults come from: the checkpoint's generation_config.json, nowhere,"
        " or that of a folder.",
        rich_help_panel=_MODEL,
    ),
]


def parse_override(value: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object of generation_config.json's fields."""
    try:
        data = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{shown(value)} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise typer.BadParameter(f"""{shown(value)} is no object such as {{"temperature": 0.6}}""")
    return data


OverrideGenerationConfig = Annotated[
    Any,
    typer.Option(
        parser=parse_override,
        metavar="JSON",
        help="""Sampling defaults that win over those, e.g. '{"temperature": 0.6}'.""",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
