"""The command behind `scripts/gpu_check`: one process a plan, a table or JSON of the results."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any

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
    """Programs of one plan, to be compiled in a process of their own."""

    target: str
    served: Served
    layers: int
    programs: tuple[str, ...]

    def command(self, programs: Sequence[str]) -> list[str]:
        """What compiles some of them."""
        return [
            *(sys.executable, "-m", "jaxinfer.gpu_check", "--target", self.target),
            *("--model", self.served.model, "--ways", str(self.served.ways)),
            *("--quantization", self.served.quantization, "--kv-dtype", self.served.kv_dtype),
            *("--layers", str(self.layers), *(f"--program={name}" for name in programs)),
        ]


def run(job: Job) -> list[Result]:
    """A result for each program. One that the process dies of becomes a failed row, and another
    process goes on with the next."""
    left, results = list(job.programs), list[Result]()
    while left:
        found, problem = _printed(job.command(left), TIMEOUT * len(left))
        if len(found) < len(left):
            found.append(Result(left[len(found)], error=problem))
        results += found
        del left[: len(found)]
    return results


def _printed(command: list[str], seconds: float) -> tuple[list[Result], str]:
    """The results that a command prints, and what became of it if it was no good end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(
                command, env=environment(), stdout=out, stderr=errors, timeout=seconds
            ).returncode
            problem = f"the compiler ended with {status}"
        except subprocess.TimeoutExpired:
            status, problem = 0, f"the compiler took more than {seconds:.0f} s"
        said = [_all_of(file) for file in (out, errors)]
    last = (said[1] or ["no message"])[-1]
    if status:
        problem = last
    if status < 0:
        problem = f"the compiler died of {signal.Signals(-status).name}: {last}"
    rows = [line for line in said[0] if line.startswith("{")]
    return [Result.from_json(json.loads(row)) for row in rows], problem


def _all_of(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().strip().splitlines()


def compile_programs(
    jobs: Sequence[Job], at_once: int, progress: Callable[[str], None]
) -> list[tuple[Job, Result]]:
    """Every program of every job, in order."""
    results = []
    with ThreadPoolExecutor(at_once) as pool:
        for job, found in zip(jobs, pool.map(run, jobs)):
            results += [(job, result) for result in found]
            progress(f"compiled {job.served}")
    return results


def jobs_for(
    target: str, full: bool, asked: Sequence[Collection[Any] | None], programs: Collection[str]
) -> list[Job]:
    """What to compile of `PROGRAMS`: those served as asked, by the fields of `Served`, where
    something is asked for, and of their programs those that are named, or all."""
    jobs = []
    for served, known in PROGRAMS.items():
        chosen = tuple(name for name in known if not programs or name in programs)
        if chosen and all(not some or own in some for some, own in zip(asked, served)):
            layers = known_model(served.model).num_layers if full else FEW_LAYERS
            jobs.append(Job(target, served, layers, chosen))
    return jobs


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
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option("--kv-cache-dtype", metavar="KIND", help="Of pages; default all there are."),
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
    todo = jobs_for(target, full, (model, gpus, quantization, kv_dtype), program or ())
    if not todo:
        known = (f"{served}: {', '.join(steps)}" for served, steps in PROGRAMS.items())
        errors.print(f"no such program; known: {'; '.join(known)}", markup=False)
        raise typer.Exit(2)
    with errors.status("compiling") as status:
        results = compile_programs(todo, jobs, status.update)
    if as_json:
        print(json.dumps({"target": target, "rows": [_row(*r) for r in results]}, indent=2))
    else:
        _print(TARGETS[target].name, results)
    if record:
        rows = [(job.served, job.layers, result) for job, result in results]
        kernel_report.write(step_report.table(TARGETS[target].name, rows), DOCS / "gpu.md")
    failed = [(job, result) for job, result in results if not result.passed]
    for job, result in failed:
        where = f"{job.served}, {result.program}: "
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
    model, gpus, kind, pages = job.served
    where = {"model": model, "gpus": gpus, "quantization": kind, "kv_dtype": pages}
    return where | {"layers": job.layers} | result.to_json()


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
