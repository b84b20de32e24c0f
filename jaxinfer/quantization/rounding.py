"""Matrices rounded to nearest, in NumPy: what every layout makes of numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num, UInt8

from jaxinfer.quantization.kinds import Layout
from pallas_kernels.quantised_matmul import pack_int4
from pallas_kernels.quantised_matmul.activations import FLOAT8_MOST, INT8_MOST, PAIR
from pallas_kernels.quantised_matmul.weight import TWICE_E2M1

_PIECE = 1 << 18  # values rounded at once: the temporaries stay in the CPU's cache
_TINY = np.finfo(np.float32).tiny
_E2M1_MOST_EXPONENT = 2  # of 4 and 6, its largest numbers
INT4_MOST = 15


class Rounded(NamedTuple):
    """A matrix [N, K] as a layout has it; see `weight.Quantised`. Scales and zeros are by row."""

    values: Num[np.ndarray, "N Kp"]
    scales: Float[np.ndarray, "Nb G"]
    low: Num[np.ndarray, "N K"] | None = None
    zeros: Num[np.ndarray, "N G"] | None = None
    order: Num[np.ndarray, " K"] | None = None


def round_matrix(rows: Num[np.ndarray, "N K"], layout: Layout) -> Rounded:
    """The nearest in each group's units: float32 scales of the largest magnitude, or of all
    numbers from the least to the largest where there are zero points."""
    step = max(1, _PIECE // rows.shape[1] // layout.rows) * layout.rows
    pieces = [
        _piece(rows[start : start + step].astype(np.float32), layout)
        for start in range(0, len(rows), step)
    ]
    parts = (None if p[0] is None else np.concatenate(p) for p in zip(*pieces, strict=True))
    return Rounded(*parts)  # type: ignore[arg-type]


def grid(
    groups: Float[np.ndarray, "*shape group"], shrink: float = 1.0
) -> tuple[Float[np.ndarray, "*shape"], UInt8[np.ndarray, "*shape"]]:
    """Scales and zero points of int4 groups: 16 steps from their least to their largest number, 0
    among them, or over `shrink` of that."""
    least = np.minimum(groups.min(axis=-1), 0) * np.float32(shrink)
    most = np.maximum(groups.max(axis=-1), 0) * np.float32(shrink)
    scales = np.maximum((most - least) / np.float32(INT4_MOST), _TINY)
    return scales, np.clip(np.rint(-least / scales), 0, INT4_MOST).astype(np.uint8)


def _piece(rows: Float[np.ndarray, "n K"], layout: Layout) -> Rounded:
    count, columns = rows.shape
    group = layout.group or columns
    if layout.rows > 1:
        return _float8_blocks(rows, layout)
    groups = rows.reshape(count, columns // group, group)
    if layout.values == "int4" and layout.zeros:
        scales, zeros = grid(groups)
        values = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, INT4_MOST)
        return Rounded(_packed(values, columns, group), scales, zeros=zeros)
    largest = np.abs(groups).max(axis=-1)
    if layout.values == "float4_e2m1fn":
        return _mxfp4(groups, largest)
    most = {"int8": INT8_MOST, "float8_e4m3fn": FLOAT8_MOST, "int4": 7.0}[layout.values]
    scales = np.maximum(largest / np.float32(most), _TINY)
    units = groups / scales[..., None]
    if layout.values == "float8_e4m3fn":
        return Rounded(units.astype(jnp.float8_e4m3fn).reshape(rows.shape), scales)
    high = np.rint(units)
    if layout.values == "int4":
        return Rounded(_packed(high + 8, columns, group), scales)
    low = None
    if layout.terms == 2:
        low = np.rint((units - high) * np.float32(PAIR)).astype(np.int8).reshape(rows.shape)
    return Rounded(high.astype(np.int8).reshape(rows.shape), scales, low)


def _float8_blocks(rows: Float[np.ndarray, "n K"], layout: Layout) -> Rounded:
    """One scale for so many rows and columns."""
    count, columns = rows.shape
    height = math.ceil(count / layout.rows)
    whole = np.zeros((height * layout.rows, columns), np.float32)
    whole[:count] = rows
    blocks = whole.reshape(height, layout.rows, -1, layout.group)
    scales = np.maximum(np.abs(blocks).max(axis=(1, 3)) / np.float32(FLOAT8_MOST), _TINY)
    units = (blocks / scales[:, None, :, None]).reshape(-1, columns)[:count]
    return Rounded(units.astype(jnp.float8_e4m3fn), scales)


def _mxfp4(groups: Float[np.ndarray, "n G 32"], largest: Float[np.ndarray, "n G"]) -> Rounded:
    """The specification's own way: the largest number's exponent, less that of e2m1's largest. What
    is stored so already keeps its values."""
    _, exponents = np.frexp(np.maximum(largest, _TINY))  # of a fraction from 1/2 to 1
    scales = np.ldexp(np.float32(1), np.maximum(exponents - 1 - _E2M1_MOST_EXPONENT, -126))
    numbers = np.array(TWICE_E2M1, np.float32) / 2
    between = (numbers[1:] + numbers[:-1]) / 2
    units = groups / scales[..., None]
    # Halfway between two numbers it is the one whose lowest bit is 0: its code is even.
    codes = np.searchsorted(between, np.abs(units), side="left")
    tied = np.isin(np.abs(units), between) & (codes % 2 == 1)
    codes = (codes + tied) | (np.signbit(units) << 3)
    columns = groups.shape[1] * groups.shape[2]
    return Rounded(_packed(codes, columns, groups.shape[2]), scales.astype(jnp.bfloat16))


def _packed(values: Num[np.ndarray, "n G g"], columns: int, group: int) -> np.ndarray:
    return pack_int4(values.reshape(len(values), columns).astype(np.uint8), group)
