"""Options that take the place of what a checkpoint says about chats and generating."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.field_rules import shown
from jaxinfer.replies.formats import REASONING_PARSERS, TOOL_PARSERS, check_parser

if TYPE_CHECKING:
    from jaxinfer.generation import TextOptions

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


def parse_tool_parser(value: str) -> str:
    return _known("tool-call-parser", value, TOOL_PARSERS)


def parse_reasoning_parser(value: str) -> str:
    return _known("reasoning-parser", value, REASONING_PARSERS)


def _known(option: str, value: str, names: Mapping[str, object]) -> str:
    try:
        check_parser(option, value, names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


ToolCallParser = Annotated[
    str,
    typer.Option(
        parser=parse_tool_parser,
        metavar="NAME",
        help="How calls of tools are written: auto (as the chat template has them), none, or"
        f" {', '.join(TOOL_PARSERS)}.",
        rich_help_panel=_MODEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        parser=parse_reasoning_parser,
        metavar="NAME",
        help="How reasoning is written: auto (as the chat template has it), none, or"
        f" {', '.join(REASONING_PARSERS)}.",
        rich_help_panel=_MODEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTextOptions:
    """What is put in place of what a checkpoint says."""

    chat_template: ChatTemplate = None
    generation_config: GenerationConfig = "auto"
    override_generation_config: OverrideGenerationConfig = None

    def read(self) -> TextOptions:
        """Raises ValueError naming a file that is missing or broken."""
        from jaxinfer.generation import TextOptions

        return TextOptions.read(
            self.chat_template, self.generation_config, self.override_generation_config
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions(ModelTextOptions):
    """The same, and how replies are read for callers of the service."""

    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
