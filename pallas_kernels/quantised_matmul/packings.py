"""Weights of 4 bits as AWQ and GPTQ checkpoints pack them, made into ours once, on the host.

AWQ: Lin et al. 2023, arXiv:2306.00978. GPTQ: Frantar et al. 2022, arXiv:2210.17323. Both store the
transposed matrix in 32-bit words of eight values.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, UInt8

from pallas_kernels.quantised_matmul.weight import ZERO_OF_INT4, QuantisedWeight, pack_int4

NIBBLES = 8  # of a word
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight columns is


def from_awq(
    qweight: Int[np.ndarray, "K N8"],
    qzeros: Int[np.ndarray, "G N8z"],
    scales: Float[np.ndarray, "Gs N"],
) -> QuantisedWeight:
    """A weight [N, K] from the tensors of an AWQ layer (version "gemm"); a word holds outputs.

    Raises ValueError naming the tensor that does not fit.
    """
    outputs = _outputs(scales, qzeros)
    if qweight.shape[1] * NIBBLES != outputs:
        raise ValueError(f"qweight has {qweight.shape[1]} words a row, expected {outputs // 8}")
    values, zeros = (unpacked(words)[..., AWQ_ORDER] for words in (qweight, qzeros))
    return _weight(values.reshape(-1, outputs).T, zeros.reshape(-1, outputs), scales, None)


def from_gptq(
    qweight: Int[np.ndarray, "K8 N"],
    qzeros: Int[np.ndarray, "G N8"],
    scales: Float[np.ndarray, "Gs Ns"],
    g_idx: Int[np.ndarray, " K"] | None = None,
    *,
    zeros_less_one: bool = True,
) -> QuantisedWeight:
    """A weight [N, K] from the tensors of a GPTQ layer; a word holds columns.

    `zeros_less_one`: zero points are stored less one, as the format "gptq" has them and "gptq_v2"
    does not. `g_idx` is the group of each column: where columns were quantised in the order of
    their activations, they are sorted by group, and x will be.

    Raises ValueError naming the tensor that does not fit, or a group of another size.
    """
    outputs = _outputs(scales, qzeros)
    if qweight.shape[1] != outputs:
        raise ValueError(f"qweight has {qweight.shape[1]} outputs, scales have {outputs}")
    columns = qweight.shape[0] * NIBBLES
    values = unpacked(qweight.T).reshape(outputs, columns)
    zeros = unpacked(qzeros).reshape(-1, outputs) + np.uint8(zeros_less_one)
    order = None if g_idx is None else columns_by_group(g_idx, columns, len(scales))
    if order is not None and (order == np.arange(columns)).all():
        order = None
    return _weight(values if order is None else values[:, order], zeros, scales, order)


def _outputs(scales: np.ndarray, qzeros: np.ndarray) -> int:
    groups, outputs = scales.shape
    if qzeros.shape != (groups, outputs // NIBBLES) or outputs % NIBBLES:
        raise ValueError(f"qzeros has shape {qzeros.shape} beside scales of {scales.shape}")
    return outputs


def unpacked(
    words: Int[np.ndarray, "*shape W"], bits: int = 4
) -> UInt8[np.ndarray, "*shape W each"]:
    """uint8 values of so many bits, the lowest of every word first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    whole = np.ascontiguousarray(words).view(np.uint32)[..., None]
    return (whole >> shifts & ((1 << bits) - 1)).astype(np.uint8)


def columns_by_group(
    g_idx: Int[np.ndarray, " K"], columns: int, groups: int
) -> Int[np.ndarray, " K"]:
    """i32[K]: the columns sorted by their group. Raises ValueError for groups of other sizes."""
    if g_idx.shape != (columns,):
        raise ValueError(f"g_idx has shape {g_idx.shape}, expected ({columns},)")
    sizes = np.bincount(g_idx, minlength=groups) if g_idx.min() >= 0 else np.zeros(0)
    if sizes.tolist() != [columns / groups] * groups:
        raise ValueError(f"g_idx: groups of {sorted(set(sizes.tolist()))} columns, not all alike")
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def _weight(
    values: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray | None
) -> QuantisedWeight:
    columns, groups = values.shape[1], len(scales)
    if columns % groups:
        raise ValueError(f"scales are of {groups} groups, which do not divide {columns} columns")
    group = columns // groups
    weight = QuantisedWeight(
        pack_int4(values, group),
        scales,
        None if (zeros == ZERO_OF_INT4).all() else zeros,
        order,
        bits=4,
        block=(1, group),
    )
    weight.check()
    return weight
