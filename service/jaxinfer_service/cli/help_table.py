"""How help shows options: their names whole, one below the other, so that they can be copied.

Typer gives each kind of name a column of its own, and cuts the names where these do not fit.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text
from typer import rich_utils

_OPTION_CELLS = 6


class OptionTable(Table):
    """Takes rows as Typer makes them: [required mark,] long, short, long and short negative names,
    type, help. Those of commands are shorter and stay."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        if len(cells) < _OPTION_CELLS:
            super().add_row(*cells, **how)
            return
        *first, long, short, no_long, no_short, kind, text = cells
        lines, short = _parts(long) + _parts(no_long) + _parts(no_short), _parts(short)
        lines[:1] = [Text(", ").join([*lines[:1], *short])]
        super().add_row(*first, Text("\n").join(lines), kind, text, **how)
        self.columns[len(first)].no_wrap = True


def _parts(cell: Text) -> list[Text]:
    return [part for part in cell.split(",") if part]


def use() -> None:
    """Have Typer show options so, in this process."""
    rich_utils.Table = OptionTable  # type: ignore[misc,attr-defined]
