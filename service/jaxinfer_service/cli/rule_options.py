"""Options that say which tokens may come, and what form an output must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.structured import StructuredOutput
from jaxinfer_service.cli import options

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions:
    """Which tokens may come, and the form of the output."""

    min_tokens: MinTokens = None
    allowed_token_ids: AllowedTokenIds = None
    bad_word: BadWord = None
    json_schema: JsonSchema = None
    json_object: JsonObject = False
    regex: Regex = None
    choice: Choice = None
    grammar: Grammar = None

    def params(self) -> dict[str, Any]:
        """The sampling parameters that were given. Raises typer.BadParameter."""
        ids = self.allowed_token_ids
        return options.given(
            min_tokens=self.min_tokens,
            allowed_token_ids=None if ids is None else _ids(ids),
            bad_words=tuple(self.bad_word) if self.bad_word else None,
            structured=self._structure(),
        )

    def _structure(self) -> StructuredOutput | None:
        given = {
            "--json-schema": self.json_schema is not None,
            "--json-object": self.json_object,
            "--regex": self.regex is not None,
            "--choice": bool(self.choice),
            "--grammar": self.grammar is not None,
        }
        named = [name for name, is_given in given.items() if is_given]
        if len(named) > 1:
            raise typer.BadParameter(f"{' and '.join(named)} are given; an output has one form")
        if self.json_schema is not None:
            return StructuredOutput.json_schema(_schema(self.json_schema))
        if self.json_object:
            return StructuredOutput.json_object()
        if self.regex is not None:
            return StructuredOutput.regex(self.regex)
        if self.choice:
            return StructuredOutput.choice(self.choice)
        return None if self.grammar is None else StructuredOutput.grammar(_text(self.grammar))


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"--allowed-token-ids {text}: give token ids with commas between them"
        ) from error


def _schema(given: str) -> str:
    """JSON text as it is, or what a file has."""
    return given if given.lstrip().startswith("{") else _text(Path(given))


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from error
