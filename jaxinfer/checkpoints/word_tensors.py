"""Matrices in 32-bit words of several values: as AWQ (Lin et al. 2023, arXiv:2306.00978), GPTQ
(Frantar et al. 2022, arXiv:2210.17323) and compressed-tensors pack them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Integer, UInt8

from jaxinfer.models.hf_quantization import Scheme
from jaxinfer.quantization.kinds import BITS, Layout
from jaxinfer.quantization.rounding import Rounded
from pallas_kernels.quantised_matmul import pack_int4

Headers = Mapping[str, tuple[tuple[int, ...], str]]  # suffix of a module -> shape, dtype as stored
Read = Callable[[str], np.ndarray]  # suffix -> array
SCALES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ALL_ZERO = "all its scales are 0, but its values are not"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight columns is
_AT_ONCE = 1 << 20  # values made numbers of at once: the temporaries stay in the CPU's cache


class Words(NamedTuple):
    """Where a packing has what, by the suffix of a module's tensors.

    Attributes:
        values / scales / zeros / order: their suffixes; of zero points and order only some modules
            have any.
        transposed: values are [columns, rows], and scales [groups, rows].
        by_column: a word holds values of one row, of neighbouring columns.
        shape: the suffix of the matrix's own shape, where that is not the values'.
    """

    values: str
    scales: str
    zeros: str
    order: str = ""
    transposed: bool = True
    by_column: bool = True
    shape: str = ""


WORDS = {
    "awq": Words("qweight", "scales", "qzeros", by_column=False),
    "gptq": Words("qweight", "scales", "qzeros", "g_idx"),
    "compressed-tensors": Words(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", False,
        shape="weight_shape",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WordMatrix:
    """A matrix of shape [N, K], as its headers say. Reading it checks the rest.

    `scales` is their dtype; `grouped`: the file says each column's group.
    """

    words: Words
    scheme: Scheme
    shape: tuple[int, int]
    scales: str
    grouped: bool

    @property
    def group(self) -> int:
        return self.scheme.group or self.shape[1]

    @property
    def layout(self) -> Layout | None:
        """As what it can be kept; None: 8 bits with zero points of their own, which no kind has."""
        scheme, (_, columns) = self.scheme, self.shape
        if scheme.values == "int8" and not scheme.symmetric:
            return None
        group = scheme.group if self.group < columns else 0
        zeros = not scheme.symmetric
        return Layout(
            scheme.values, group, 1, 1, "uint8" if zeros else "", scheme.order, self.scales
        )

    def read(self, read: Read) -> Rounded:
        """Values packed as ours. Raises ValueError naming the tensor that contradicts the rest."""
        values, zeros, scales, order = self._parts(read)
        if self.scheme.values == "int8":
            made = (values.astype(np.int16) - 128).astype(np.int8)
            return Rounded(made, scales, order=order)
        packed = np.asarray(pack_int4(values, self.group))
        return Rounded(packed, scales, None, None if self.scheme.symmetric else zeros, order)

    def numbers(self, read: Read) -> np.ndarray:
        """float32 [N, K] that it stands for."""
        values, zeros, scales, order = self._parts(read)
        made, step = np.empty(self.shape, np.float32), max(1, _AT_ONCE // self.shape[1])
        places = slice(None) if order is None else np.argsort(order)
        for start in range(0, len(values), step):
            own = slice(start, start + step)
            units = values[own].reshape(-1, scales.shape[1], self.group).astype(np.float32)
            units -= zeros[own, :, None].astype(np.float32)
            units *= scales[own, :, None].astype(np.float32)
            made[own] = units.reshape(-1, self.shape[1])[:, places]
        return made

    def order(self, read: Read) -> np.ndarray | None:
        """How the columns are sorted. Raises ValueError for groups that the scheme does not say."""
        if not self.grouped:
            return None
        columns, g_idx = self.shape[1], read(self.words.order)
        if self.scheme.order:
            return columns_by_group(g_idx, columns // self.group)
        if (g_idx != np.arange(columns) // self.group).any():
            raise ValueError(
                f"{self.words.order} has columns in another order than their groups of "
                f"{self.group}, but the config says that they are not sorted (desc_act, actorder)"
            )
        return None

    def _parts(self, read: Read) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Values [N, K] with columns sorted, zero points and scales [N, groups], and the order."""
        w, bits, (rows, columns) = self.words, BITS[self.scheme.values], self.shape
        middle, stored, scales = 1 << (bits - 1), read(w.values), read(w.scales)
        if w.transposed and w.by_column:
            values = unpacked(stored.T, bits).reshape(rows, -1)
        elif w.transposed:
            values = unpacked(stored, bits)[..., _AWQ_ORDER].reshape(columns, rows).T
        else:
            values = unpacked(stored, bits).reshape(rows, -1)
        values, scales = values[:, :columns], scales.T if w.transposed else scales
        if (order := self.order(read)) is not None:
            values = values[:, order]
        zeros = self._zeros(read, scales.shape, middle)
        if not scales.any() and (values.reshape(*zeros.shape, -1) != zeros[..., None]).any():
            raise ValueError(ALL_ZERO)
        return values, zeros, scales, order

    def _zeros(self, read: Read, shape: tuple[int, ...], middle: int) -> np.ndarray:
        """Zero points [N, groups]."""
        w, bits, rows = self.words, BITS[self.scheme.values], self.shape[0]
        if self.scheme.symmetric and not w.transposed:
            return np.full(shape, middle, np.uint8)
        stored = read(w.zeros)
        stored = np.ascontiguousarray(stored if w.transposed else stored.T)
        if self.scheme.less_one:
            # Of each word as a whole, as it was taken: a zero point of 0 borrowed from the next.
            stored = stored.view(np.uint32) + np.uint32(sum(1 << i for i in range(0, 32, bits)))
        words = unpacked(stored, bits)
        words = words if w.by_column else words[..., _AWQ_ORDER]
        zeros = words.reshape(-1, words.shape[1] * words.shape[2]).T[:rows]
        if self.scheme.symmetric and (zeros != middle).any():
            found = sorted(set(zeros.ravel().tolist()))[:4]
            raise ValueError(
                f"{w.zeros} mean {', '.join(map(str, found))}, but sym is true, so that they are "
                f"{middle}; is checkpoint_format ('gptq' or 'gptq_v2') the file's?"
            )
        return zeros


def word_matrix(
    words: Words, scheme: Scheme, found: Headers, shape: np.ndarray | None
) -> WordMatrix:
    """A module's matrix; `shape` is what the file says it is, if it does.

    Raises ValueError naming the tensor that is missing, or of another shape than the group size
    and the others say.
    """
    each = 32 // BITS[scheme.values]
    needed = [words.values, words.scales]
    needed += [words.zeros] if words.transposed or not scheme.symmetric else []
    grouped = scheme.order or words.order in found
    needed += [words.order] if grouped else []
    if missing := [suffix for suffix in needed if suffix not in found]:
        what = {words.zeros: "zero points", words.order: "the columns' groups"}
        raise ValueError(f"{what.get(missing[0], 'scales')} ({missing[0]}) are missing")
    if len(found[words.values][0]) != 2:
        raise ValueError(
            f"{words.values} has shape {list(found[words.values][0])}, not of a matrix"
        )
    (height, width), _ = found[words.values]
    if words.transposed:
        rows, columns = (width, height * each) if words.by_column else (width * each, height)
    else:
        rows, columns = height, width * each
    if shape is not None:
        if shape.shape != (2,) or (shape[0], -(-shape[1] // each)) != (height, width):
            raise ValueError(f"{words.shape} says {shape.tolist()}, {words.values} another")
        rows, columns = int(shape[0]), int(shape[1])
    group = scheme.group or columns
    if columns % group:
        raise ValueError(f"group_size = {group} does not divide its {columns} columns")
    groups, packed = columns // group, -(-rows // each)
    expected = {
        words.scales: (rows, groups),
        words.zeros: (packed, groups),
        words.order: (columns,),
    }
    for suffix in needed[1:]:
        wanted = expected[suffix][::-1] if words.transposed else expected[suffix]
        if found[suffix][0] != wanted:
            raise ValueError(
                f"{suffix} has shape {list(found[suffix][0])}, expected {list(wanted)} for groups "
                f"of {group}"
            )
    stored = found[words.scales][1]
    if stored not in SCALES or any(found[n][1] != "I32" for n in needed if n != words.scales):
        raise ValueError(f"{words.values} and zero points must be I32, scales one of "
                         f"{', '.join(SCALES)}; scales are {stored}")  # fmt: skip
    return WordMatrix(words, scheme, (rows, columns), SCALES[stored], grouped)


def unpacked(
    words: Integer[np.ndarray, "*shape W"], bits: int
) -> UInt8[np.ndarray, "*shape W each"]:
    """The values of 4 or 8 bits in 32-bit words, the lowest of every word first."""
    octets = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if bits == 8:
        return octets
    values = np.empty((*words.shape, 8), np.uint8)
    values[..., 0::2], values[..., 1::2] = octets & 15, octets >> 4
    return values


def columns_by_group(g_idx: Int[np.ndarray, " K"], groups: int) -> Int[np.ndarray, " K"]:
    """i32[K]: the columns sorted by their group. Raises ValueError for groups of other sizes."""
    wanted = np.repeat(np.arange(groups), len(g_idx) // groups)
    order = np.argsort(g_idx, kind="stable")
    if (g_idx[order] != wanted).any():
        found, sizes = np.unique(g_idx, return_counts=True)
        raise ValueError(
            f"g_idx: {len(found)} groups of {sorted(set(sizes.tolist()))} columns, expected "
            f"{groups} of {len(g_idx) // groups}"
        )
    return order.astype(np.int32)
