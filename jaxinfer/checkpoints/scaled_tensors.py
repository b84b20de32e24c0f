"""Matrices of 8 bits with scales beside them: float8 with one scale in all, a row or a block
(DeepSeek-V3, arXiv:2412.19437, section 3.3), and int8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.word_tensors import ALL_ZERO, SCALES, Headers, Read
from jaxinfer.models.hf_quantization import Scheme
from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.rounding import Rounded

ReadRows = Callable[[int, int], np.ndarray]  # first, last -> bytes of those rows
STORED = {"F8_E4M3": "float8_e4m3fn", "I8": "int8"}
ZEROS, INPUT = "weight_zero_point", "input_scale"
_AT_ONCE = 1 << 20  # values made numbers of at once: the temporaries stay in the CPU's cache
# What each byte means: looking it up takes less than half the time of a conversion.
_MEANING = {
    name: np.arange(256, dtype=np.uint8).view(jnp.dtype(name)).astype(np.float32)
    for name in STORED.values()
}


@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """A matrix of shape [N, K]; `block` are the rows and columns that share a scale."""

    scheme: Scheme
    shape: tuple[int, int]
    block: tuple[int, int]
    suffix: str
    scales: str
    zeros: bool

    @property
    def layout(self) -> Layout | None:
        """As what it can be kept; None: with zero points, or blocks that do not divide it."""
        (rows, columns), (height, width) = self.shape, self.block
        if self.zeros or columns % width:
            return None
        height = 1 if height >= rows or width == columns else height  # each row has its own
        return Layout(
            self.scheme.values, width if width < columns else 0, height, scales=self.scales
        )

    def read(self, read: Read, rows: ReadRows) -> Rounded:
        """As it is stored; a scale of all rows is one of each."""
        layout = self.layout
        assert layout is not None
        scales = self._scales(read, rows)
        if layout.rows == 1 and len(scales) != self.shape[0]:
            scales = np.repeat(scales, self.block[0], axis=0)[: self.shape[0]]
        values = rows(0, self.shape[0]).view(jnp.dtype(self.scheme.values))
        return Rounded(values, scales)

    def numbers(self, read: Read, rows: ReadRows) -> np.ndarray:
        """float32 [N, K] that it stands for, some rows at a time, as `rows` reads them."""
        (count, columns), (height, _) = self.shape, self.block
        scales = self._scales(read, rows).astype(np.float32)
        zeros = read(ZEROS).reshape(scales.shape).astype(np.float32) if self.zeros else None
        step = max(1, _AT_ONCE // columns)
        if len(scales) > 1:
            step = max(1, step // height) * height
        out = np.empty(self.shape, np.float32)
        for first in range(0, count, step):
            part = out[first : first + step]
            np.take(_MEANING[self.scheme.values], rows(first, first + len(part)), out=part,
                    mode="clip")  # "raise" would buffer it all  # fmt: skip
            if zeros is not None:
                part -= self._of_rows(zeros, first, len(part))
            part *= self._of_rows(scales, first, len(part))
        return out

    def _of_rows(self, blocks: np.ndarray, first: int, count: int) -> np.ndarray:
        """Each block's number for its part of so many rows, as far as it differs within them."""
        (_, columns), (height, width) = self.shape, self.block
        if len(blocks) > 1:
            blocks = blocks[first // height : math.ceil((first + count) / height)]
            blocks = np.repeat(blocks, height, axis=0)[:count] if height > 1 else blocks
        return blocks if width >= columns else np.repeat(blocks, width, axis=1)[:, :columns]

    def _scales(self, read: Read, rows: ReadRows) -> np.ndarray:
        """[blocks of rows, blocks of columns]. Raises ValueError where all are 0 by mistake."""
        scales = read(self.suffix)
        if not scales.any() and rows(0, self.shape[0]).any():
            raise ValueError(ALL_ZERO)
        return scales.reshape(math.ceil(self.shape[0] / self.block[0]), -1)


def scaled_matrix(scheme: Scheme, found: Headers) -> ScaledMatrix:
    """A module's matrix. Raises ValueError naming the tensor that is missing or does not fit."""
    shape, stored = found["weight"]
    if len(shape) != 2:
        raise ValueError(f"stored as {stored} of shape {list(shape)}, expected a matrix")
    if STORED[stored] != scheme.values:
        raise ValueError(f"stored as {stored}, but quantization_config says {scheme.values}")
    rows, columns = shape
    suffix = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
    if suffix not in found:
        wanted = "weight_scale_inv" if scheme.block else "weight_scale"
        raise ValueError(f"stored as {stored}, but its scales {wanted} are missing")
    size, kind = found[suffix]
    block = scheme.block or ((1, scheme.group) if scheme.group else None)
    if block is not None:
        expected = [[math.ceil(rows / block[0]), math.ceil(columns / block[1])]]
    else:
        by_row = math.prod(size) != 1 or rows == 1
        block = (1, columns) if by_row else (rows, columns)
        expected = [[rows, 1], [rows]] if by_row else [[], [1], [1, 1]]
    if list(size) not in expected:
        raise ValueError(f"stored as {stored}: expected {suffix} of shape {expected[0]}, found "
                         f"{list(size)}")  # fmt: skip
    if kind not in SCALES:
        raise ValueError(f"{suffix} is {kind}, expected one of {', '.join(SCALES)}")
    if scheme.static and INPUT not in found:
        raise ValueError(f"its static scale {INPUT} is missing")
    if not scheme.symmetric:
        _check_zeros(found, size, stored)
    return ScaledMatrix(scheme, (rows, columns), block, suffix, SCALES[kind], not scheme.symmetric)


def _check_zeros(found: Headers, shape: tuple[int, ...], stored: str) -> None:
    """Raise ValueError unless there are zero points, of what is `stored`, like the scales."""
    if ZEROS not in found:
        raise ValueError(f"zero points ({ZEROS}) are missing")
    if found[ZEROS] != (shape, stored):
        own = f"{found[ZEROS][1]}{list(found[ZEROS][0])}"
        raise ValueError(f"{ZEROS} is {own}, expected {stored}{list(shape)}, like the scales")
