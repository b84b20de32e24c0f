"""`bench load`: restoring our own checkpoint beside a plain parallel read of the same files.

In every round each takes a turn, with none of the files in the page cache and with all of them. The
plain read fills the same few buffers again and again: nothing is kept, summed or placed, so it is
the least that getting the bytes can cost. Another one keeps what it reads, as a restore must: it
pays for memory that was not used before, and that is all the difference.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jaxinfer.bench import report
from jaxinfer.bench.options import JsonTo, Model, Rounds
from jaxinfer.bench.stats import MedianInterval, median_interval, paired_ratio

READERS = 4
CACHES = ("cold", "warm")
BUFFER = 4 << 20  # bytes
Turn = Callable[[], object]


def load(
    model: Model,
    rounds: Rounds = 10,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices the parameters are sharded over.")
    ] = 1,
    json_to: JsonTo = None,
) -> None:
    """Restore an Orbax checkpoint of ours in turns with a plain read of its files."""
    from jaxinfer.checkpoints import resolve_model
    from jaxinfer.demo import DEMO, demo_checkpoint

    try:
        with report.progress_bar() as progress:
            path = demo_checkpoint(progress) if model == DEMO else resolve_model(model)
            result = compare_loading(path, tensor_parallel_size, rounds, progress)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rows: list[tuple[Any, ...]] = [
        (title, *(report.interval(result[cache][key]) for cache in CACHES))
        for key, title in {
            "plain_seconds": "plain read, s",
            "kept_seconds": "read and kept, s",
            "restore_seconds": "restore, s",
            "to_plain": "restore to plain read",
            "to_kept": "restore to read and kept",
            "plain_cpu_seconds": "plain read, s of processor time",
            "kept_cpu_seconds": "read and kept, s of processor time",
            "restore_cpu_seconds": "restore, s of processor time",
        }.items()
    ]
    rows.append(("bytes of the checkpoint", f"{result['bytes']:,}", ""))
    rows.append(("bytes that a restore reads", f"{result['bytes_read'] or 0:,}", ""))
    report.grid(f"Loading, {rounds} rounds", ("", "cold cache", "warm cache"), rows, json_to)
    report.write_json(report.environment() | result, json_to)


def compare_loading(
    path: Path, devices: int, rounds: int, progress: report.Report | None = None
) -> dict[str, Any]:
    """Seconds of both in every round, by state of the page cache, and the bytes that were read.

    Raises ValueError when `path` is no Orbax folder of ours.
    """
    from jaxinfer.checkpoints import orbax_io

    if not orbax_io.is_orbax_folder(path):
        raise ValueError(f"{path} is no Orbax folder of ours: make one by jaxinfer convert SRC DST")
    manifest = orbax_io.read_manifest(path)
    files = [path / orbax_io.PARAMS / name for name in manifest.files]
    pool = ThreadPoolExecutor(READERS)
    turns: dict[str, Turn] = {
        "plain": _plain(files, pool),
        "kept": _kept(files, pool),
        "restore": _restore(path, manifest, devices),
    }
    restore = turns["restore"]
    restore()  # what only the first one pays: imports, threads, devices
    before = _bytes_read()
    restore()
    bytes_read = None if before is None else (_bytes_read() or 0) - before
    result: dict[str, Any] = {
        "bytes": sum(size for size, _ in manifest.files.values()),
        "bytes_read": bytes_read,
        "devices": devices,
        "rounds": rounds,
    }
    names = list(turns)
    for cache in CACHES:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for i in range(rounds):
            for name in names[i % 3 :] + names[: i % 3]:
                if cache == "cold":
                    _forget(files)
                times[name].append(_timed(turns[name]))
            if progress:
                progress(f"rounds, {cache} cache", i + 1, rounds)
        result[cache] = _summary(times)
    return result


def _summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians by the clock and of processor time, and ratios of turns of one round."""
    walls = {name: [wall for wall, _ in pairs] for name, pairs in times.items()}
    entries = {}
    for name, pairs in times.items():
        entries[f"{name}_seconds"] = _entry(median_interval(walls[name]))
        entries[f"{name}_cpu_seconds"] = _entry(median_interval([cpu for _, cpu in pairs]))
    for name in ("plain", "kept"):
        entries[f"to_{name}"] = _entry(paired_ratio(walls["restore"], walls[name]))
    return entries


def _entry(found: MedianInterval) -> dict[str, float]:
    return {"median": found.median, "low": found.low, "high": found.high}


def _timed(turn: Turn) -> tuple[float, float]:
    """Seconds by the clock and of the process's processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    turn()
    return time.perf_counter() - wall, time.process_time() - cpu


def _restore(path: Path, manifest: Any, devices: int) -> Turn:
    import jax

    from jaxinfer.checkpoints import orbax_io
    from jaxinfer.sharding import make_mesh, sharding_of

    mesh = make_mesh(jax.devices(), devices)
    place: Any = functools.partial(sharding_of, mesh=mesh)
    if devices == 1:  # as a server on one device places them
        place = lambda spec: jax.sharding.SingleDeviceSharding(jax.devices()[0])  # noqa: E731

    def restore() -> None:
        params = orbax_io.restore(path, manifest, manifest.dtype, place)
        jax.block_until_ready(params)

    return restore


def _plain(files: list[Path], pool: ThreadPoolExecutor) -> Turn:
    buffers = threading.local()

    def read(file: Path) -> None:
        if not hasattr(buffers, "memory"):
            buffers.memory = memoryview(bytearray(BUFFER))
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffers.memory):
                pass

    return lambda: list(pool.map(read, _largest_first(files)))


def _kept(files: list[Path], pool: ThreadPoolExecutor) -> Turn:
    def read(file: Path) -> np.ndarray:
        data = np.empty(file.stat().st_size, np.uint8)
        memory, done = memoryview(data), 0
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(memory[done:]):
                done += count
        return data

    return lambda: list(pool.map(read, _largest_first(files)))


def _largest_first(files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda file: -file.stat().st_size)


def _forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_read() -> int | None:
    """Bytes this process has asked the system for; None where it is not told."""
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return None
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))
