"""Float8 weights with one scale a block (DeepSeek-V3, arXiv:2412.19437, section 3.3), read as the
numbers that they stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.source import summarise

if TYPE_CHECKING:
    from jaxinfer.checkpoints.safetensors_io import SafetensorsFiles

FLOAT8, SCALE = "F8_E4M3", "_scale_inv"
# What each byte means: looking it up takes less than half the time of a conversion.
_MEANING = np.arange(256, dtype=np.uint8).view(jnp.dtype("float8_e4m3fn")).astype(np.float32)


class Fp8Tensors:
    """The tensors of safetensors files; float8 ones as float32, their scales not on their own."""

    def __init__(self, files: SafetensorsFiles, block: tuple[int, int], description: str):
        """`block` is the rows and columns that share a scale.

        Raises CheckpointError naming every float8 tensor that lacks its scales.
        """
        self._files, self._block = files, block
        self._starts: dict[str, dict[str, int]] = {}  # by file, where each tensor's bytes begin
        self._float8 = {name for name, kind in files.dtypes.items() if kind == FLOAT8}
        if problems := [text for name in sorted(self._float8) for text in self._problems(name)]:
            raise CheckpointError(summarise(description, problems))
        scales = {name + SCALE for name in self._float8}
        self.shapes = {name: s for name, s in files.shapes.items() if name not in scales}

    def _problems(self, name: str) -> list[str]:
        shape, scale = self._files.shapes[name], name + SCALE
        where = f"{self._files.where(name)}: {name}: stored as {FLOAT8}"
        if len(shape) != 2:
            return [f"{where} of shape {list(shape)}, expected a matrix"]
        expected = tuple(math.ceil(size / part) for size, part in zip(shape, self._block))
        found = self._files.shapes.get(scale)
        if found is None:
            return [f"{where}, but its scales {scale} are missing"]
        if found != expected:
            return [f"{where}: expected {scale} of shape {list(expected)}, found {list(found)}"]
        return []

    def read(self, name: str) -> np.ndarray:
        """The tensor. Scales are applied to a row of blocks at a time, as it is read."""
        if name not in self._float8:
            return self._files.read(name)
        rows, columns = self.shapes[name]
        height, width = self._block
        scales = self._files.read(name + SCALE).astype(np.float32)
        out = np.empty((rows, columns), np.float32)
        with Path(self._files.where(name)).open("rb") as file:
            file.seek(self._start(name))
            for i, first in enumerate(range(0, rows, height)):
                part = out[first : first + height]
                stored = np.fromfile(file, np.uint8, part.size).reshape(part.shape)
                np.take(_MEANING, stored, out=part, mode="clip")  # "raise" would buffer it all
                part *= np.repeat(scales[i], width)[:columns]
        return out

    def _start(self, name: str) -> int:
        """Where in its file the tensor begins: the library reads no float8 into NumPy."""
        path = self._files.where(name)
        if path not in self._starts:
            self._starts[path] = _starts(Path(path))
        return self._starts[path][name]

    def storage(self, name: str) -> tuple[str, int]:
        kind, size = self._files.storage(name)
        return kind, size + (self._files.storage(name + SCALE)[1] if name in self._float8 else 0)

    def where(self, name: str) -> str:
        return self._files.where(name)


def _starts(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
