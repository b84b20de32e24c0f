"""`scripts/gpu_check --device`: all tasks in order, in workers that may die, within a budget.

Results come first, then the whole step, then times, then the search for block sizes, so that what
time is left over decides how much is searched. Whatever happens to a worker costs the task it was
doing: another worker goes on with the next. The report is written after every task.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.gpu_check.on_device.registry import device_cases
from jaxinfer.gpu_check.on_device.tasks import Record
from jaxinfer.gpu_check.on_device.worker import STEP
from jaxinfer.gpu_check.target import environment
from pallas_kernels import tuning

START_SECONDS = 120  # for a worker to find its device
LIMITS = {"check": 60, STEP: 200, "time": 60, "search": 90}  # seconds for one task
NO_TIME = "no time left"
LEAST_SECONDS = 5  # less than this is left: nothing more is begun
DRY_FACTOR = 10  # a CPU interprets, and compiles beside others


class WorkerDied(RuntimeError):
    """What became of a worker that did not answer."""


@dataclass
class Session:
    """A run: what it found so far, and where that is written.

    Attributes:
        report: what `results.json` holds: the device, versions, and a record a task.
    """

    out: Path
    command: Sequence[str]
    env: dict[str, str]
    dry: bool
    deadline: float
    report: Record = field(default_factory=dict)
    worker: Worker | None = None

    def run(self, tasks: Sequence[str], progress: Callable[[str], None]) -> None:
        """Do the tasks, one after another; those that there is no time for are skipped.

        Raises WorkerDied when no worker can be started at all.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self.report |= {
            "executed_on_gpu": not self.dry,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "records": [],
        }
        try:
            for done, task in enumerate(tasks):
                progress(f"{done + 1} of {len(tasks)}: {task}")
                left = self.deadline - time.monotonic()
                if left < LEAST_SECONDS:
                    record: Record = {"task": task, "skipped": NO_TIME}
                else:
                    record = self._perform(task, min(self._limit(task), left))
                self.report["records"].append(record)
                self._write(record)
        finally:
            self._stop()

    def _limit(self, task: str) -> float:
        return LIMITS[task.partition(":")[0]] * (DRY_FACTOR if self.dry else 1)

    def _perform(self, task: str, seconds: float) -> Record:
        end = time.monotonic() + seconds
        if task == STEP:  # it takes all of the device's memory, and says how much of it
            self._stop()
        try:
            if self.worker is None:
                self.worker = Worker(self.command, self.env, self.out / "worker.log")
                self.report |= self.worker.ready(min(START_SECONDS, seconds))
            record = self.worker.perform(task, end - time.monotonic())
        except WorkerDied as died:
            if "device" not in self.report:
                raise
            self._stop()
            cut = time.monotonic() >= self.deadline  # by the budget: nobody's fault
            return {"task": task, "skipped": NO_TIME} if cut else {"task": task, "error": str(died)}
        if task == STEP or (record.get("error") and not self.dry):
            self._stop()
        return record

    def _stop(self) -> None:
        if self.worker is not None:
            self.worker.stop()
        self.worker = None

    def _write(self, record: Record) -> None:
        _replace(self.out / "results.json", self.report)
        if record.get("best") and record.get("tuned"):
            file = self.out / "tuned.json"
            table = tuning.read(file) if file.exists() else tuning.table()
            kernel, shape = record["tuned"]
            kind = self.report["device"]
            kernels = table.setdefault(f"dry run on {kind}" if self.dry else kind, {})
            kernels.setdefault(kernel, {})[shape] = record["best"]
            _replace(file, table)
            tuning.read(file)  # as the kernels will


class Worker:
    """A process that does tasks: `worker.py`, or in tests something that answers like it."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path):
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ready(self, seconds: float) -> Record:
        """What it found: device and versions."""
        return self._answer(seconds)["ready"]

    def perform(self, task: str, seconds: float) -> Record:
        """The record of one task. Raises WorkerDied when there is none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{task}\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerDied(self._obituary()) from None
        return self._answer(seconds)

    def stop(self) -> None:
        """End the process and everything that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent is of no use any more
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> Record:
        """The next line that is a record: libraries print what they like."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise WorkerDied(f"took more than {seconds:.0f} s") from None
            if line is None:
                raise WorkerDied(self._obituary())
            try:
                found: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found

    def _obituary(self) -> str:
        status = self._process.wait()
        last = (self._log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        return f"the worker {how}: {last}"[:600]


def task_names(only: Sequence[str] = ()) -> list[str]:
    """All tasks in order, or those whose names have one of the words `only`."""

    def each() -> Iterator[str]:
        cases = list(device_cases())
        yield from (f"check: {case.name}" for case in cases)
        yield STEP
        yield from (f"time: {case.name}" for case in cases)
        yield from (f"search: {case.name}" for case in cases if case.tilings)

    return [task for task in each() if not only or any(word in task for word in only)]


def session(out: Path, dry_for: str | None, minutes: float) -> Session:
    """A run on the GPU at hand, or a dry one, `dry_for` a target."""
    command = [sys.executable, "-m", "jaxinfer.gpu_check.on_device.worker"]
    # This process keeps off the GPU, by that variable; its workers must not.
    at_hand = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return Session(
        out=out,
        command=[*command, "--dry-run-for", dry_for] if dry_for else command,
        env=environment() if dry_for else at_hand,
        dry=dry_for is not None,
        deadline=time.monotonic() + 60 * minutes,
    )


def _replace(path: Path, data: Any) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)
