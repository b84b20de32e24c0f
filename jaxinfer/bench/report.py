"""What a benchmark prints: progress and a table for people, JSON for programs.

Progress and, with `--json -`, the table go to stderr, so that stdout is JSON alone.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Report = Callable[[str, int, int], None]  # (what, done, total)


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """A callback that shows what is being done and how far it is, on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            if bars.tasks[0].total != total or done < bars.tasks[0].completed:
                bars.reset(task)
            bars.update(task, description=what, completed=done, total=total)

        yield report


def host() -> dict[str, Any]:
    """When and on what machine the figures were measured. `load_average` tells of company."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()),
    }


def environment() -> dict[str, Any]:
    """`host`, and the device and JAX that the engine ran on."""
    import jax

    device = jax.devices()[0]
    return host() | {"device": device.device_kind, "jax_version": jax.__version__}


def publish(
    title: str, rows: Mapping[str, Any], result: Mapping[str, Any], json_to: str | None
) -> None:
    """Print `rows` as a table and write `result` as JSON to a file or, for "-", to stdout."""
    grid(title, (), list(rows.items()), json_to)
    write_json(result, json_to)


def grid(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], json_to: str | None
) -> None:
    """Print a table, its first column to the left; without headings, of two columns."""
    table = Table(title=title, title_justify="left", show_header=bool(headings))
    for column, heading in enumerate(headings or ("", "")):
        table.add_column(heading, justify="right" if column else "left")
    for row in rows:
        table.add_row(*map(text, row))
    show(table, json_to)


def show(table: Table, json_to: str | None) -> None:
    """Print a table where it does not mix with JSON."""
    Console(stderr=json_to == "-").print(table)


def write_json(result: Mapping[str, Any], json_to: str | None) -> None:
    """Write one JSON object to a file, to stdout for "-", nowhere for None."""
    if json_to is None:
        return
    line = json.dumps(result, indent=None if json_to == "-" else 1)
    if json_to == "-":
        sys.stdout.write(line + "\n")
    else:
        Path(json_to).write_text(line + "\n", "utf-8")


def text(value: Any) -> str:
    """A table cell: floats with four significant digits but whole thousands."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def interval(entry: Mapping[str, float]) -> str:
    """A table cell: a median, and its interval if there were several rounds."""
    median, low, high = (text(float(entry[name])) for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}–{high})"
