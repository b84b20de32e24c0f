"""The figures of compiled programs, as a table for people and for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.gpu_check.checks import Result
from jaxinfer.gpu_check.kernel_report import versions

HEADINGS = (
    "model",
    "GPUs",
    "layers",
    "program",
    "arguments\nGiB",
    "aliased\nGiB",
    "temporaries\nMiB (limit)",
    "room left\nGiB",
    "launches\n(a layer)",
    "collectives",
)


def cells(model: str, gpus: int, layers: int, result: Result) -> list[str]:
    """One program's figures, by `HEADINGS`."""
    figures = result.figures
    row = [model, str(gpus), str(layers), result.program]
    if figures is None:
        return row + ["-"] * (len(HEADINGS) - len(row))
    each = ", ".join(str(count) for count in figures.layer_launches.values())
    return [
        *row,
        f"{figures.argument_bytes / 2**30:.2f}",
        f"{figures.alias_bytes / 2**30:.2f}",
        f"{figures.temp_bytes / 2**20:.0f} ({figures.temp_limit / 2**20:.0f})",
        f"{figures.room_bytes / 2**30:.1f}",
        f"{figures.launches}" + (f" ({each})" if each else ""),
        ", ".join(f"{n} {kind}" for kind, n in figures.collectives.items()) or "none",
    ]


def table(target: str, rows: Sequence[tuple[str, int, int, Result]]) -> str:
    """Markdown of (model, GPUs, layers, result); the last column names the checks that fail."""
    headings = [heading.replace("\n", " ") for heading in (*HEADINGS, "fails")]
    lines = [
        f"Compiled for {target} with {versions()}.",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    for model, gpus, layers, result in rows:
        fails = result.error or ", ".join(c.name for c in result.checks if not c.passed) or "-"
        lines.append(f"| {' | '.join([*cells(model, gpus, layers, result), fails])} |")
    return "\n".join(lines) + "\n"
