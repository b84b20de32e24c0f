"""The command behind `scripts/gpu_check`: one process a program, a table or JSON of the results."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxinfer.gpu_check import kernel_report
from jaxinfer.gpu_check.cases import FEW_LAYERS, PROGRAMS, model_of
from jaxinfer.gpu_check.checks import Result
from jaxinfer.gpu_check.target import TARGETS, environment

TIMEOUT = 900  # seconds for one program
RECORDED = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
INSTALL = "the compiler for GPUs is not installed; run: pip install '.[gpu-check]'"


@dataclass(frozen=True, slots=True)
class Job:
    """One program to compile in a process of its own."""

    device: str
    ways: int
    layers: int
    program: str

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "jaxinfer.gpu_check", "--device", self.device),
            *("--ways", str(self.ways), "--layers", str(self.layers), "--program", self.program),
        ]


def run(program: str, command: list[str]) -> Result:
    """The result a command prints; whatever happens to its process becomes a failed row."""
    try:
        done = subprocess.run(
            command,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return Result(program, error=f"the compiler took more than {TIMEOUT} s")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Result(program, error=f"the compiler died of {name}: {last}")
    if done.returncode:
        return Result(program, error=last)
    return Result.from_json(json.loads(done.stdout.splitlines()[-1]))


def main(
    full: Annotated[bool, typer.Option(help="All layers of the model, not a few.")] = False,
    device: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}.")] = "h200",
    gpus: Annotated[list[int] | None, typer.Option(help="1, 8; default both.")] = None,
    program: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. 'forward 64+0'.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Compilers at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    kernels: Annotated[
        bool, typer.Option(help="The kernels by themselves, for every kind of GPU.")
    ] = False,
    record: Annotated[
        bool, typer.Option(help="With --kernels: write their figures into docs/kernels.md.")
    ] = False,
) -> None:
    """Compile the step for GPUs this machine does not have, and assert on what would run.

    Nothing is executed. Exit status 1 when an assertion fails, 2 when something is missing.
    """
    errors = Console(stderr=True)
    if importlib.util.find_spec("jax_plugins") is None:
        errors.print(INSTALL, markup=False)
        raise typer.Exit(2)
    if kernels:
        raise typer.Exit(_check_kernels(errors, jobs, record, as_json))
    if device not in TARGETS or not set(gpus or ()) <= set(PROGRAMS):
        errors.print(f"--device is one of {', '.join(TARGETS)}; --gpus is 1 or 8", markup=False)
        raise typer.Exit(2)
    todo = [
        Job(device, ways, model_of(name).num_layers if full else FEW_LAYERS, name)
        for ways in gpus or PROGRAMS
        for name in PROGRAMS[ways]
        if not program or name in program
    ]
    if not todo:
        errors.print(f"no such program; known: {', '.join(PROGRAMS[1])}", markup=False)
        raise typer.Exit(2)
    with ThreadPoolExecutor(jobs) as pool, errors.status("compiling") as status:
        results = []
        for job, result in zip(todo, pool.map(lambda job: run(job.program, job.command()), todo)):
            results.append((job, result))
            status.update(f"compiled {len(results)} of {len(todo)}: {job.program}")
    if as_json:
        print(json.dumps({"device": device, "rows": [_row(*r) for r in results]}, indent=2))
    else:
        _print(TARGETS[device].name, results)
    failed = [(job, result) for job, result in results if not result.passed]
    for job, result in failed:
        where = f"{job.program} on {job.ways} GPU: "
        if result.error:
            errors.print(f"failed: {where}{result.error}", markup=False, soft_wrap=True)
        for check in result.checks:
            if not check.passed:
                errors.print(
                    f"failed: {where}{check.name}: {check.detail}", markup=False, soft_wrap=True
                )
    raise typer.Exit(1 if failed else 0)


def _check_kernels(errors: Console, jobs: int, record: bool, as_json: bool) -> int:
    """Compile the kernels, show their figures, and return the exit status."""
    with errors.status("compiling kernels"):
        report = kernel_report.compile_everywhere(jobs=jobs)
    if as_json:
        rows = {target: [asdict(kernel) for kernel in found] for target, found in report.items()}
        print(json.dumps(rows, indent=2))
    else:
        print(kernel_report.table(report), end="")
    wrong = kernel_report.problems(report, "" if record else RECORDED.read_text())
    for problem in wrong:
        errors.print(f"failed: {problem}", markup=False, soft_wrap=True)
    if record and not wrong:
        kernel_report.write(report, RECORDED)
    return 1 if wrong else 0


def _row(job: Job, result: Result) -> dict:
    return {"gpus": job.ways, "layers": job.layers} | result.to_json()


def _print(target: str, results: list[tuple[Job, Result]]) -> None:
    models = "Llama 3 8B (latent: attention of DeepSeek V2 Lite) in bf16"
    table = Table(title=f"{models}, compiled for {target}; nothing was executed")
    for heading in ("program", "GPUs", "layers"):
        table.add_column(heading)
    for heading in (
        "arguments\nGiB",
        "aliased\nGiB",
        "temporaries\nMiB (limit)",
        "room left\nGiB",
        "launches\n(a layer)",
    ):
        table.add_column(heading, justify="right")
    for heading in ("collectives", "CPU s", "result"):
        table.add_column(heading)
    for job, result in results:
        in_layers = "forward" in job.program
        row = [job.program, str(job.ways), str(job.layers) if in_layers else "-"]
        if f := result.figures:
            row += [
                f"{f.argument_bytes / 2**30:.2f}",
                f"{f.alias_bytes / 2**30:.2f}",
                f"{f.temp_bytes / 2**20:.0f} ({f.temp_limit / 2**20:.0f})",
                f"{f.room_bytes / 2**30:.1f}",
                f"{f.launches}" + f" ({f.layer_launches / job.layers:.0f})" * in_layers,
                ", ".join(f"{n} {kind}" for kind, n in f.collectives.items()) or "-",
            ]
        else:
            row += ["-"] * 6
        table.add_row(
            *row, f"{result.seconds:.0f}", "[green]ok[/]" if result.passed else "[red]FAILED[/]"
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
