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

from jaxinfer.gpu_check import kernel_report, step_report
from jaxinfer.gpu_check.cases import FEW_LAYERS, PROGRAMS, Served
from jaxinfer.gpu_check.checks import Result
from jaxinfer.gpu_check.on_device.command import run_on_device
from jaxinfer.gpu_check.target import TARGETS, environment
from jaxinfer.known_models import known_model

TIMEOUT = 900  # seconds for one program
DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORDED = DOCS / "kernels.md"
INSTALL = "the compiler for GPUs is not installed; run: pip install '.[gpu-check]'"


@dataclass(frozen=True, slots=True)
class Job:
    """One program to compile in a process of its own."""

    target: str
    served: Served
    layers: int
    program: str

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "jaxinfer.gpu_check", "--target", self.target),
            *("--model", self.served.model, "--ways", str(self.served.ways)),
            *("--quantization", self.served.quantization),
            *("--layers", str(self.layers), "--program", self.program),
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
    target: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}.")] = "h200",
    model: Annotated[
        list[str] | None, typer.Option(help="Some of the models, e.g. llama-3-8b.")
    ] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="1, 8; default both.")] = None,
    quantization: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Of weights; default all there are.")
    ] = None,
    program: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. 'forward 64+0'.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Compilers at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    kernels: Annotated[
        bool, typer.Option(help="The kernels by themselves, for every kind of GPU.")
    ] = False,
    record: Annotated[
        bool, typer.Option(help="Write the figures into docs/gpu.md, or docs/kernels.md.")
    ] = False,
    device: Annotated[
        bool, typer.Option("--device", help="Run on the GPU at hand: results, times, block sizes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --device: the same without a GPU, in small.")
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="With --device: where the report goes.")
    ] = Path("gpu-check"),
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="With --device: 8; 60 for a dry run.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="WORD", help="With --device: tasks named so.")
    ] = None,
) -> None:
    """Compile the step for GPUs this machine does not have, and assert on what would run.

    Nothing is executed, except with --device. Exit status 1 when an assertion fails, 2 when
    something is missing.
    """
    errors = Console(stderr=True)
    if dry_run and not device:
        errors.print("--dry-run goes with --device")
        raise typer.Exit(2)
    if device and not dry_run:
        raise typer.Exit(run_on_device(errors, out, minutes, only or (), as_json))
    if importlib.util.find_spec("jax_plugins") is None:
        errors.print(INSTALL, markup=False)
        raise typer.Exit(2)
    if kernels:
        raise typer.Exit(_check_kernels(errors, jobs, record, as_json))
    if target not in TARGETS:
        errors.print(f"--target is one of {', '.join(TARGETS)}", markup=False)
        raise typer.Exit(2)
    if device:
        raise typer.Exit(run_on_device(errors, out, minutes, only or (), as_json, target))
    todo = [
        Job(target, served, known_model(served.model).num_layers if full else FEW_LAYERS, step)
        for served, steps in PROGRAMS.items()
        for step in steps
        if all(
            not asked or given in asked
            for asked, given in zip((model, gpus, quantization, program), (*served, step))
        )
    ]
    if not todo:
        known = (f"{served}: {', '.join(steps)}" for served, steps in PROGRAMS.items())
        errors.print(f"no such program; known: {'; '.join(known)}", markup=False)
        raise typer.Exit(2)
    with ThreadPoolExecutor(jobs) as pool, errors.status("compiling") as status:
        results = []
        for job, result in zip(todo, pool.map(lambda job: run(job.program, job.command()), todo)):
            results.append((job, result))
            status.update(f"compiled {len(results)} of {len(todo)}: {job.program}")
    if as_json:
        print(json.dumps({"target": target, "rows": [_row(*r) for r in results]}, indent=2))
    else:
        _print(TARGETS[target].name, results)
    if record:
        rows = [(job.served, job.layers, result) for job, result in results]
        kernel_report.write(step_report.table(TARGETS[target].name, rows), DOCS / "gpu.md")
    failed = [(job, result) for job, result in results if not result.passed]
    for job, result in failed:
        where = f"{job.served}, {job.program}: "
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
        kernel_report.write(kernel_report.table(report), RECORDED)
    return 1 if wrong else 0


def _row(job: Job, result: Result) -> dict:
    model, gpus, kind = job.served
    where = {"model": model, "gpus": gpus, "quantization": kind, "layers": job.layers}
    return where | result.to_json()


def _print(target: str, results: list[tuple[Job, Result]]) -> None:
    table = Table(title=f"Compiled for {target}; nothing was executed")
    for heading in step_report.HEADINGS:
        table.add_column(heading, justify="right" if "\n" in heading else "left")
    for heading in ("CPU s", "result"):
        table.add_column(heading)
    for job, result in results:
        row = step_report.cells(job.served, job.layers, result)
        table.add_row(
            *row, f"{result.seconds:.0f}", "[green]ok[/]" if result.passed else "[red]FAILED[/]"
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
