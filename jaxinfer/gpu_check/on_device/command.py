"""`scripts/gpu_check --device`, from its options to its exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxinfer.gpu_check.on_device import summary
from jaxinfer.gpu_check.on_device.session import WorkerDied, session, task_names

MINUTES, DRY_MINUTES = 8.0, 60.0


def run_on_device(
    errors: Console,
    out: Path,
    minutes: float | None = None,
    only: Sequence[str] = (),
    as_json: bool = False,
    dry_for: str | None = None,
) -> int:
    """Run everything on the GPU at hand, or try that without one, `dry_for` a target; returns the
    exit status: 1 when something failed, 2 when nothing could be run."""
    tasks = task_names(only)
    if not tasks:
        errors.print("no task has such a name; without --only all of them run", markup=False)
        return 2
    run = session(out, dry_for, minutes or (DRY_MINUTES if dry_for else MINUTES))
    try:
        with errors.status("starting") as status:
            run.run(tasks, status.update)
    except WorkerDied as died:
        errors.print(f"cannot be run here: {died}", markup=False, soft_wrap=True)
        return 2
    if as_json:
        print(json.dumps(run.report, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(summary.table(run.report))
        print(summary.as_words(run.report), f"-> {out / 'results.json'}")
    wrong = summary.failures(run.report["records"])
    for line in wrong:
        errors.print(f"failed: {line}", markup=False, soft_wrap=True)
    return 1 if wrong else 0
