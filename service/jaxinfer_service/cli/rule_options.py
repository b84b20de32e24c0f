"""Options that say which tokens may come, and what form an output must have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.structured import StructuredOutput

_PANEL = "Rules"

MinTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Do not end before this many tokens.", rich_help_panel=_PANEL),
]
AllowedTokenIds = Annotated[
    str | None,
    typer.Option(
        metavar="ID,ID,...", help="No other token comes, ends included.", rich_help_panel=_PANEL
    ),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A text that never comes; repeatable.", rich_help_panel=_PANEL
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|JSON", help="The output is JSON of this schema.", rich_help_panel=_PANEL
    ),
]
JsonObject = Annotated[
    bool,
    typer.Option("--json-object", help="The output is a JSON object.", rich_help_panel=_PANEL),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="REGEX", help="The output matches it, in whole.", rich_help_panel=_PANEL),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="The output is one of these; repeatable.", rich_help_panel=_PANEL
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The output is of this grammar, in Lark's form or GBNF.",
        rich_help_panel=_PANEL,
    ),
]


def rules(
    min_tokens: int | None,
    allowed_token_ids: str | None,
    bad_word: list[str] | None,
    **forms: Any,
) -> dict[str, Any]:
    """The sampling parameters that were given. Raises BadParameter."""
    given = {
        "min_tokens": min_tokens,
        "allowed_token_ids": None if allowed_token_ids is None else _ids(allowed_token_ids),
        "bad_words": tuple(bad_word) if bad_word else None,
        "structured": _structure(**forms),
    }
    return {name: value for name, value in given.items() if value is not None}


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"--allowed-token-ids {text}: give token ids with commas between them"
        ) from error


def _structure(
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choice: list[str] | None,
    grammar: Path | None,
) -> StructuredOutput | None:
    given = {
        "--json-schema": json_schema is not None,
        "--json-object": json_object,
        "--regex": regex is not None,
        "--choice": bool(choice),
        "--grammar": grammar is not None,
    }
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise typer.BadParameter(f"{' and '.join(named)} are given; an output has one form")
    if json_schema is not None:
        return StructuredOutput.json_schema(_schema(json_schema))
    if json_object:
        return StructuredOutput.json_object()
    if regex is not None:
        return StructuredOutput.regex(regex)
    if choice:
        return StructuredOutput.choice(choice)
    return None if grammar is None else StructuredOutput.grammar(_text(grammar))


def _schema(given: str) -> str:
    """JSON text as it is, or what a file has."""
    return given if given.lstrip().startswith("{") else _text(Path(given))


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from error
