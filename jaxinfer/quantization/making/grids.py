"""The values that a weight in few bits can have: a scale, and perhaps a zero point, a group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.rounding import INT4_MOST, Rounded, grid
from pallas_kernels.quantised_matmul import pack_int4
from pallas_kernels.quantised_matmul.activations import INT8_MOST

SHRINKS = tuple(1 - 0.05 * i for i in range(7))  # of a group's range, for the search below


class Grid(NamedTuple):
    """Of groups: values from `least` to `most`, meant as (value - zero) * scale."""

    scales: Float[np.ndarray, "*shape"]
    zeros: Int[np.ndarray, "*shape"]
    least: int
    most: int

    def codes(self, numbers: Float[np.ndarray, "*shape group"]) -> Int[np.ndarray, "*shape group"]:
        """The nearest value of every number."""
        units = np.rint(numbers / self.scales[..., None]) + self.zeros[..., None]
        return np.clip(units, self.least, self.most).astype(np.int16)

    def meant(self, codes: Int[np.ndarray, "*shape group"]) -> Float[np.ndarray, "*shape group"]:
        return (codes - self.zeros[..., None]).astype(np.float32) * self.scales[..., None]

    def nearest(self, numbers: Float[np.ndarray, "*shape g"]) -> Float[np.ndarray, "*shape g"]:
        return self.meant(self.codes(numbers))


def grid_of(groups: Float[np.ndarray, "*shape group"], layout: Layout, shrink: float = 1.0) -> Grid:
    """From the least to the largest number of each group, or over `shrink` of that."""
    if layout.values == "int4":
        scales, zeros = grid(groups, shrink)
        return Grid(scales, zeros.astype(np.int16), 0, INT4_MOST)
    scales = np.abs(groups).max(axis=-1) * np.float32(shrink / INT8_MOST)
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    return Grid(scales, np.zeros(scales.shape, np.int16), -int(INT8_MOST), int(INT8_MOST))


def best_grid(
    groups: Float[np.ndarray, "N G group"],
    moments: Float[np.ndarray, "G group group"],
    layout: Layout,
) -> Grid:
    """The range of every group that leaves least of its products' error, given the second moments
    of what each group is multiplied with."""
    best = grid_of(groups, layout)
    least = output_error(best.nearest(groups) - groups, moments)
    for shrink in SHRINKS[1:]:
        other = grid_of(groups, layout, shrink)
        error = output_error(other.nearest(groups) - groups, moments)
        better = error < least
        least = np.where(better, error, least)
        best = best._replace(
            scales=np.where(better, other.scales, best.scales),
            zeros=np.where(better, other.zeros, best.zeros),
        )
    return best


def output_error(
    difference: Float[np.ndarray, "N G group"], moments: Float[np.ndarray, "G group group"]
) -> Float[np.ndarray, "N G"]:
    """Mean square of what groups of weights that differ so give differently."""
    by_group = difference.swapaxes(0, 1)
    return np.einsum("gnk,gnk->ng", by_group @ moments, by_group)


def by_groups(moments: Float[np.ndarray, "K K"], group: int) -> Float[np.ndarray, "G group group"]:
    """The blocks on the diagonal."""
    count = len(moments) // group
    blocks = moments.reshape(count, group, count, group)
    return np.stack([blocks[i, :, i] for i in range(count)])


def stored(codes: Int[np.ndarray, "N G group"], used: Grid, layout: Layout) -> Rounded:
    """A matrix as its layout has it."""
    rows, _, group = codes.shape
    flat, scales = codes.reshape(rows, -1), used.scales.astype(np.float32)
    if layout.bits == 8:
        return Rounded(flat.astype(np.int8), scales)
    packed = np.asarray(pack_int4(flat.astype(np.uint8), group))
    return Rounded(packed, scales, zeros=used.zeros.astype(np.uint8))
