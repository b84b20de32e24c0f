"""Safetensors files of gpt-oss as published: a layer's experts in MXFP4, seen one by one.

    experts.gate_up_proj_blocks   uint8 [E, 2 F, D / 32, 16]   rows of gate and up alternate
    experts.gate_up_proj_scales   uint8 [E, 2 F, D / 32]       exponents
    experts.down_proj_blocks      uint8 [E, D, F / 32, 16]
    experts.down_proj_scales      uint8 [E, D, F / 32]

A byte holds two neighbours, the first in its low bits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.source import summarise
from jaxinfer.models.mxfp4 import BLOCK, dequantise, scales_of
from jaxinfer.quantization.kinds import KINDS, NONE, Layout
from jaxinfer.quantization.rounding import Rounded
from pallas_kernels.quantised_matmul import pack_int4

if TYPE_CHECKING:
    from jaxinfer.checkpoints.safetensors_io import SafetensorsFiles

KIND = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_STORED = re.compile(rf"(.*\.experts)\.(gate_up_proj|down_proj)({BLOCKS}|{SCALES})")
_ROWS = {  # by the file's projection, which of its rows are an expert's
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


class _Part(NamedTuple):
    """Rows of one expert of the tensors `stored`_blocks and `stored`_scales."""

    stored: str
    expert: int
    rows: slice


class Mxfp4Files:
    """Tensors under the names of experts one by one; see `packed.Packed`."""

    notes: tuple[str, ...] = ()

    def __init__(self, files: SafetensorsFiles, description: str):
        """Raises CheckpointError naming every tensor that is missing or contradicts its other."""
        self._files = files
        self._parts: dict[str, _Part] = {}
        self.shapes = {n: shape for n, shape in files.shapes.items() if not _STORED.fullmatch(n)}
        found = {
            (match[1], match[2]) for name in files.shapes if (match := _STORED.fullmatch(name))
        }
        problems = [problem for own in sorted(found) if (problem := self._add(*own))]
        if problems:
            raise CheckpointError(summarise(description, problems))
        self.kind = KIND if self._parts else NONE

    def _add(self, experts: str, projection: str) -> str:
        """What is wrong with a projection's tensors, or "" and its experts are there."""
        stored = f"{experts}.{projection}"
        shapes, dtypes = self._files.shapes, self._files.dtypes
        for name in (stored + BLOCKS, stored + SCALES):
            if name not in shapes:
                return f"{name}: missing"
            if dtypes[name] != "U8":
                return f"{self._files.where(name)}: {name}: stored as {dtypes[name]}, expected U8"
        blocks, scales = shapes[stored + BLOCKS], shapes[stored + SCALES]
        if len(scales) != 3 or blocks != (*scales, BLOCK // 2):
            where = self._files.where(stored + SCALES)
            return f"{where}: {stored}{SCALES}: found {list(scales)} for blocks {list(blocks)}"
        count, rows, groups = scales
        for expert in range(count):
            for name, own in _ROWS[projection].items():
                seen = f"{experts}.{expert}.{name}.weight"
                self._parts[seen] = _Part(stored, expert, own)
                self.shapes[seen] = (len(range(rows)[own]), groups * BLOCK)
        return ""

    def _bytes(self, part: _Part) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [N, K / 32, 16] and scales [N, K / 32]."""
        blocks, scales = (
            self._files.entry(f"{part.stored}{suffix}", part.expert)[part.rows]
            for suffix in (BLOCKS, SCALES)
        )
        return blocks, scales

    def read(self, name: str) -> np.ndarray:
        """In bfloat16, which holds every value exactly."""
        part = self._parts.get(name)
        return self._files.read(name) if part is None else dequantise(*self._bytes(part))

    def layout(self, name: str) -> Layout | None:
        return KINDS[KIND].layout if name in self._parts else None

    def packed(self, name: str) -> Rounded:
        blocks, exponents = self._bytes(self._parts[name])
        values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
        return Rounded(pack_int4(values, BLOCK), scales_of(exponents))

    def order(self, name: str) -> np.ndarray | None:
        return None

    def storage(self, name: str) -> tuple[str, int]:
        if name not in self._parts:
            return self._files.storage(name)
        rows, columns = self.shapes[name]
        return "MXFP4", rows * columns // 2 + rows * columns // BLOCK

    def where(self, name: str) -> str:
        part = self._parts.get(name)
        if part is None:
            return self._files.where(name)
        return f"{self._files.where(part.stored + BLOCKS)}: {part.stored}{BLOCKS}"
