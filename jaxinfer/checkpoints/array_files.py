"""The arrays of our own checkpoints, straight from their files and to them.

They are stored uncompressed, so a file's bytes are the array's memory: each is read once, whatever
the array is sharded over, its checksum is computed while it is in the processor's cache, and on a
CPU the memory it was read into becomes the parameter. A general reader copies every byte once more
and knows no checksum, for which everything would be read twice.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError

Files = Mapping[str, tuple[int, int]]  # path below the folder -> (bytes, CRC-32)
_READERS = 4  # threads: enough to keep a disk busy and to compute checksums meanwhile
_PIECE = 1 << 20  # bytes read and summed at once
_IN_FLIGHT = 64 << 20  # bytes being read and placed; a larger array is alone
_ALIGNMENT = 64  # what JAX takes as it is on a CPU
_PLAIN = {"zarr_format": 2, "order": "C", "compressor": None, "filters": None}


def read_arrays(
    folder: Path,
    files: Files,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    place: Callable[[str, np.ndarray], Any],
) -> dict[str, Any]:
    """`place(name, array)` of every tensor (name -> shape, dtype), several at once.

    All files are compared with their checksums; those of sizes are not looked at again. Raises
    CheckpointError listing every file that has changed or cannot be read.
    """
    sizes = {n: math.prod(shape) * np.dtype(kind).itemsize for n, (shape, kind) in tensors.items()}
    order = sorted(tensors, key=lambda name: -sizes[name])  # large ones last would end alone
    budget = _Budget(max([_IN_FLIGHT, *sizes.values()]))

    def read(name: str) -> Any:
        with budget.of(sizes[name]):
            array = _read_array(folder, files, name, *tensors[name])
            return jax.block_until_ready(place(name, array))

    others = [name for name in files if name.split("/")[0] not in tensors]
    with ThreadPoolExecutor(_READERS) as pool:
        checks = [pool.submit(_check_file, folder, files, name) for name in others]
        reads = {name: pool.submit(read, name) for name in order}
    done: list[Future[Any]] = [*checks, *reads.values()]
    failures = [future.exception() for future in done]
    for failure in failures:
        if failure is not None and not isinstance(failure, FileProblem):
            raise failure
    if problems := [str(failure) for failure in failures if failure is not None]:
        raise CheckpointError("\n  ".join([f"{folder} cannot be restored:", *problems]))
    return {name: reads[name].result() for name in tensors}


class FileProblem(CheckpointError):
    """One file that is not what it was when it was written."""


class _Budget:
    """Bounds the bytes in flight; whoever needs all of it waits until nobody else has any."""

    def __init__(self, size: int):
        self._size, self._used, self._changed = size, 0, threading.Condition()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used + size <= self._size)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


def _read_array(
    folder: Path, files: Files, name: str, shape: tuple[int, ...], kind: str
) -> np.ndarray:
    """One array from its chunks, of which there is one unless shards were saved apart."""
    dtype = np.dtype(kind)
    layout = _layout(folder, files, name, shape)
    chunks = tuple(layout["chunks"])
    whole = _empty(shape, dtype)
    if chunks == shape:
        _read_file(folder, files, _chunk(name, layout, (0,) * len(shape)), whole)
        return whole
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks)]
    for index in itertools.product(*map(range, counts)):
        part = _empty(chunks, dtype)  # those at the edge are stored in full
        _read_file(folder, files, _chunk(name, layout, index), part)
        starts = [i * size for i, size in zip(index, chunks)]
        target = whole[tuple(slice(a, a + n) for a, n in zip(starts, chunks))]
        target[...] = part[tuple(slice(0, n) for n in target.shape)]
    return whole


def _layout(folder: Path, files: Files, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """.zarray of an array: that it is stored as plain memory, and in which chunks."""
    file = f"{name}/.zarray"
    data = np.empty(files[file][0] if file in files else 0, np.uint8)
    _read_file(folder, files, file, data)
    layout: dict[str, Any] = json.loads(data.tobytes())
    expected = _PLAIN | {"shape": list(shape)}
    if wrong := [key for key in expected if layout.get(key) != expected[key]]:
        raise FileProblem(
            f"{folder.name}/{file}: {wrong[0]} = {layout.get(wrong[0])}, expected "
            f"{expected[wrong[0]]}; convert the original again"
        )
    return layout


def _chunk(name: str, layout: dict[str, Any], index: tuple[int, ...]) -> str:
    separator = layout.get("dimension_separator", ".")
    return f"{name}/{separator.join(map(str, index)) or '0'}"


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for an array, aligned so that JAX need not copy it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _read_file(folder: Path, files: Files, name: str, into: np.ndarray) -> None:
    """All of a file, which must have the array's size, and the checksum of when it was written."""
    if name not in files:
        raise FileProblem(f"{folder.name}/{name}: not among the files that were written")
    size, expected = files[name]
    if size != into.nbytes:
        raise FileProblem(f"{folder.name}/{name}: {size} bytes, expected {into.nbytes}")
    memory = memoryview(into.reshape(-1).view(np.uint8))
    crc = done = 0
    try:
        with (folder / name).open("rb", buffering=0) as file:
            while done < size and (count := file.readinto(memory[done : done + _PIECE])):
                crc = zlib.crc32(memory[done : done + count], crc)
                done += count
    except OSError as error:
        raise FileProblem(f"{folder.name}/{name}: {error.strerror}") from error
    if done < size:
        raise FileProblem(f"{folder.name}/{name}: expected {size} bytes, found {done}")
    if crc != expected:
        raise FileProblem(
            f"{folder.name}/{name}: changed since it was written (expected CRC-32 "
            f"{expected:08x}, found {crc:08x})"
        )


def write_array(folder: Path, name: str, array: np.ndarray) -> dict[str, list[int]]:
    """Put an array in the place of another of as many dimensions and the same dtype.

    Returns size and CRC-32 of its files, by path below the folder.
    """
    metadata = folder / name / ".zarray"
    shape = list(array.shape)
    layout = json.loads(metadata.read_text("utf-8")) | {"shape": shape, "chunks": shape}
    text = json.dumps(layout).encode()
    metadata.write_bytes(text)
    chunk = _chunk(name, layout, (0,) * array.ndim)
    memory = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    crc = 0
    with (folder / chunk).open("wb", buffering=0) as file:
        for start in range(0, len(memory), _PIECE):
            piece = memory[start : start + _PIECE]
            crc = zlib.crc32(piece, crc)
            while len(piece):
                piece = piece[file.write(piece) :]
    return {f"{name}/.zarray": [len(text), zlib.crc32(text)], chunk: [len(memory), crc]}


def _check_file(folder: Path, files: Files, name: str) -> None:
    _read_file(folder, files, name, np.empty(files[name][0], np.uint8))
