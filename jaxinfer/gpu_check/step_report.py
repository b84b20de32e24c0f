"""The figures of compiled programs, as a table for people and for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.gpu_check.cases import Served
from jaxinfer.gpu_check.checks import Result
from jaxinfer.gpu_check.kernel_report import versions
from jaxinfer.page_dtypes import AUTO
from jaxinfer.quantization.kinds import NONE

HEADINGS = (
    "model",
    "GPUs",
    "kind",
    "layers",
    "program",
    "arguments\nGiB",
    "aliased\nGiB",
    "temporaries\nMiB (limit)",
    "room left\nGiB",
    "weights\nGiB",
    "launches\n(a layer)",
    "collectives",
)


def cells(served: Served, layers: int, result: Result) -> list[str]:
    """One program's figures, by `HEADINGS`."""
    figures = result.figures
    kind = "bfloat16" if served.quantization == NONE else served.quantization
    if served.kv_dtype != AUTO:
        kind += f", {served.kv_dtype} pages"
    row = [served.model, str(served.ways), kind, str(layers), result.program]
    if figures is None:
        return row + ["-"] * (len(HEADINGS) - len(row))
    each = ", ".join(str(count) for count in figures.layer_launches.values())
    return [
        *row,
        f"{figures.argument_bytes / 2**30:.2f}",
        f"{figures.alias_bytes / 2**30:.2f}",
        f"{figures.temp_bytes / 2**20:.0f} ({figures.temp_limit / 2**20:.0f})",
        f"{figures.room_bytes / 2**30:.1f}",
        f"{figures.weight_bytes / 2**30:.2f}" if figures.weight_bytes else "-",
        f"{figures.launches}" + (f" ({each})" if each else ""),
        ", ".join(f"{n} {kind}" for kind, n in figures.collectives.items()) or "none",
    ]


def table(target: str, rows: Sequence[tuple[Served, int, Result]]) -> str:
    """Markdown of (what is served, layers, result); the last column names the checks that fail."""
    headings = [heading.replace("\n", " ") for heading in (*HEADINGS, "fails")]
    lines = [
        f"Compiled for {target} with {versions()}.",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    for served, layers, result in rows:
        fails = result.error or ", ".join(c.name for c in result.checks if not c.passed) or "-"
        lines.append(f"| {' | '.join([*cells(served, layers, result), fails])} |")
    return "\n".join(lines) + "\n"
