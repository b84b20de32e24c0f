"""Our engine beside others on one machine: measured in turns, compared round by round.

A machine's speed drifts by more than what engines differ by, so every round measures all of them
next to each other, and a comparison is the median of the rounds' ratios with its interval. What
is compared is defined in `drive`: decode tokens a second with all streams running, and prompt
tokens a second of one long prompt until its first token.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxinfer.bench.drive import StepMark, Steppable, decode_rate, drive
from jaxinfer.bench.stats import median_interval, paired_ratio
from jaxinfer.bench.workload import WorkItem, make_workload

Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of measurement: decoding by `streams` streams, or prefilling one prompt."""

    streams: int
    prompt_len: int
    decode_steps: int  # 0: prefill is measured

    @property
    def name(self) -> str:
        if self.decode_steps:
            return f"decode tok/s, {self.streams} streams"
        return f"prefill tok/s, {self.prompt_len} tokens"

    def items(self, vocab_size: int, seed: int) -> list[WorkItem]:
        """The first token comes from the prefill, so there is one more than decode steps.

        No two cells' prompts begin alike, or an engine that shares prefixes would compute less.
        """
        total = self.prompt_len + self.decode_steps + 1
        seed = zlib.crc32(f"{self.name} {seed}".encode())
        return make_workload(
            "synthetic",
            self.streams,
            self.prompt_len,
            self.decode_steps + 1,
            vocab_size,
            total,
            seed,
        )

    def rate(self, marks: Sequence[StepMark]) -> float:
        """Tokens a second. Raises RuntimeError if there was no step to measure."""
        if not self.decode_steps:
            return self.streams * self.prompt_len / next(m.time for m in marks if m.firsts)
        rate = decode_rate(marks, self.streams)
        if rate is None:
            raise RuntimeError(f"{self.name}: the streams never all decoded at once")
        return rate


def cells(
    streams: Sequence[int], prompt_len: int, decode_steps: int, prefill_len: int
) -> list[Cell]:
    """Decoding at each number of streams, then prefill of one prompt (0: none)."""
    prefill = [Cell(1, prefill_len, 0)] if prefill_len else []
    return [Cell(n, prompt_len, decode_steps) for n in streams] + prefill


class Contender(Protocol):
    """An engine in the comparison."""

    name: str

    def measure(self, cell: Cell, seed: int) -> float:
        """Tokens a second of one run."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Ours:
    """The offline engine with scheduler and sampler, warm in this process."""

    engine: Steppable
    name: str = "jaxinfer"

    def measure(self, cell: Cell, seed: int) -> float:
        items = cell.items(self.engine.limits.vocab_size, seed)
        return cell.rate(drive(self.engine, items, cell.streams).marks)

    def close(self) -> None:
        pass


class Worker:
    """A peer in a process of its own that stays warm: jobs in, step marks out, as JSON lines.

    Between its turns the process is stopped: idle peers whose threads wait in a loop would take
    the processor from whoever is being measured.
    """

    def __init__(self, name: str, command: Sequence[str], vocab_size: int):
        self.name, self.vocab_size = name, vocab_size
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, cell: Cell, seed: int) -> float:
        items = cell.items(self.vocab_size, seed)
        prompts = [item.prompt for item in items]
        self._process.send_signal(signal.SIGCONT)
        answer = self._ask({"prompts": prompts, "output_len": items[0].output_len})
        self._process.send_signal(signal.SIGSTOP)
        return cell.rate([StepMark(*mark) for mark in answer["marks"]])

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(json.dumps(job), file=stdin, flush=True)
            while line := stdout.readline():
                if line.startswith('{"marks"'):
                    return json.loads(line)
        except BrokenPipeError:
            pass
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}, see above")

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass(slots=True)
class LlamaBatchedBench:
    """llama.cpp's own benchmark program, one process a run. It samples nothing."""

    binary: Path
    gguf: Path
    threads: int
    extra: tuple[str, ...] = ()
    name: str = "llama.cpp"

    def measure(self, cell: Cell, seed: int) -> float:
        tokens = cell.streams * (cell.prompt_len + max(cell.decode_steps, 1))
        arguments = {
            "-m": self.gguf,
            "-c": tokens + 256 * cell.streams,
            "-npp": cell.prompt_len,
            "-ntg": max(cell.decode_steps, 1),
            "-npl": cell.streams,
            "-t": self.threads,
            "-tb": self.threads,
            "--output-format": "jsonl",
        }
        command = [str(self.binary), *(str(x) for pair in arguments.items() for x in pair)]
        done = subprocess.run([*command, *self.extra], capture_output=True, text=True)
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(rows) != 1:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        row = json.loads(rows[0])
        return row["speed_tg"] if cell.decode_steps else row["speed_pp"]

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Comparison:
    """Rates by cell and contender, one a round; the first `ours` contenders are ours."""

    names: list[str]
    ours: int = 1
    rates: dict[Cell, dict[str, list[float]]] = field(default_factory=dict)

    def report(self) -> list[dict[str, Any]]:
        """By cell: each one's median, and each of ours against all before it and against each peer
        as paired median and interval."""
        report = []
        for cell, rates in self.rates.items():
            entry: dict[str, Any] = {"cell": cell.name, "rounds": len(rates[self.names[0]])}
            entry["rates"] = rates
            entry["medians"] = {name: median_interval(rates[name]).median for name in self.names}
            entry["ratios"] = {
                own: {
                    name: dataclasses.asdict(paired_ratio(rates[own], rates[name]))
                    for name in (*self.names[:i], *self.names[self.ours :])
                }
                for i, own in enumerate(self.names[: self.ours])
            }
            report.append(entry)
        return report


def compare(
    contenders: Sequence[Contender],
    measured: Sequence[Cell],
    rounds: int,
    progress: Progress | None = None,
    ours: int = 1,
) -> Comparison:
    """`rounds` rounds after a warm-up; the first `ours` contenders are ours. The order turns by one
    every round, so none is always first.

    Raises RuntimeError when a contender fails.
    """
    names = [contender.name for contender in contenders]
    rates: dict[Cell, dict[str, list[float]]]
    rates = {cell: {name: [] for name in names} for cell in measured}
    result = Comparison(names, ours, rates)
    total, done = (rounds + 1) * len(measured) * len(contenders), 0
    for round_number in range(rounds + 1):
        turn = round_number % len(contenders)
        for cell in measured:
            for contender in [*contenders[turn:], *contenders[:turn]]:
                if progress:
                    progress(f"{contender.name}: {cell.name}", done, total)
                rate = contender.measure(cell, seed=round_number)
                if round_number:
                    result.rates[cell][contender.name].append(rate)
                done += 1
    return result
