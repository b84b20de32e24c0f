"""The figures of all kernels on all kinds of GPUs, as a table, and compared with a recorded one."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxinfer.gpu_check.kernels import Kernel, cases, compile_all

KERNEL_TARGETS = ("h200", "b200", "l40", "a100")
SLACK = 8  # registers that another order of instructions may take
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
_BEGIN, _END = "<!-- figures -->\n", "<!-- end of figures -->\n"

Report = Mapping[str, Sequence[Kernel]]  # by target


def compile_everywhere(targets: Sequence[str] = KERNEL_TARGETS, jobs: int = 2) -> Report:
    """All kernels for these targets. Raises RuntimeError if a compiler dies."""
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(targets, pool.map(compile_all, targets)))


def problems(report: Report, recorded: str = "") -> list[str]:
    """What must not be: errors, spills, no tensor cores, and more registers than `recorded`, a
    text with a table made by the same compilers."""
    found = [
        f"{kernel.kernel}, {kernel.case}, on {target}: {_complaint(kernel)}"
        for target, kernels in report.items()
        for kernel in kernels
        if not kernel.passed
    ]
    if versions() not in recorded:
        return found
    before = _recorded(recorded)
    for target, kernels in report.items():
        for kernel in kernels:
            most = before.get((kernel.kernel, kernel.case, target))
            if most is not None and kernel.registers > most + SLACK:
                grown = f"{kernel.registers} registers, {most} recorded"
                found.append(f"{kernel.kernel}, {kernel.case}, on {target}: {grown}")
    return found


def _complaint(kernel: Kernel) -> str:
    done = f"{kernel.spilled} bytes spilled, {kernel.tensor_core_products} products"
    return kernel.error or (f"no {kernel.missing}" if kernel.missing else done)


def versions() -> str:
    """The compilers that are installed."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def table(report: Report) -> str:
    """Markdown: registers a thread by kernel and target."""
    targets = list(report)
    lines = [
        f"Compiled with {versions()}.",
        "",
        "| kernel | of | shape | " + " | ".join(targets) + " |",
        "|---" * (3 + len(targets)) + "|",
    ]
    for case in cases():
        cells = [_cell(report[target], case.kernel, case.case) for target in targets]
        lines.append(f"| {' | '.join([case.kernel, case.case, case.shape, *cells])} |")
    return "\n".join(lines) + "\n"


def write(table: str, path: Path) -> None:
    """Put a table into a text, between its marks."""
    text = path.read_text()
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    path.write_text(before + _BEGIN + table + _END + after)


def _cell(kernels: Sequence[Kernel], kernel: str, case: str) -> str:
    found = [found for found in kernels if (found.kernel, found.case) == (kernel, case)]
    return str(found[0].registers) if found else "-"


def _recorded(text: str) -> dict[tuple[str, str, str], int]:
    """Registers by (kernel, case, target) of the table in a text."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heading = next((row for row in rows if row[:3] == ["kernel", "of", "shape"]), [])
    found = {}
    for row in rows:
        for target, cell in zip(heading[3:], row[3:]):
            if re.fullmatch(r"\d+", cell):
                found[row[0], row[1], target] = int(cell)
    return found
