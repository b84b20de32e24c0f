"""GGUF's blocks of 32 that a kind has the like of, taken apart: nothing is rounded.

    Q8_0    scale (float16), 32 int8
    Q4_0    scale (float16), 32 values of 0 to 15 that mean 8 less
    Q4_1    scale and least number (float16), 32 values of 0 to 15
    MXFP4   exponent (uint8), 32 e2m1 codes

Of 4 bits a byte holds the one of the first half of a block below that of the second, as ours does.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxinfer.checkpoints.gguf_reader import GgufFile
from jaxinfer.models.mxfp4 import scales_of
from jaxinfer.quantization.kinds import KINDS, NONE, Layout
from jaxinfer.quantization.rounding import Rounded

BLOCK = 32
BLOCKS = {
    "Q8_0": Layout("int8", BLOCK, scales="float16"),
    "Q4_0": Layout("int4", BLOCK, scales="float16"),
    "Q4_1": Layout("int4", BLOCK, zeros="float32", scales="float16"),
    "MXFP4": KINDS["mxfp4"].layout,
}
_KINDS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4", "MXFP4": "mxfp4"}


def stored_kind(file: GgufFile) -> str:
    """What most of a file's matrices are stored like; none if no kind is."""
    types = Counter(
        tensor.tensor_type.name
        for name, tensor in file.tensors.items()
        if tensor.tensor_type.name in BLOCKS and name.startswith("blk.")
    )
    return _KINDS[types.most_common(1)[0][0]] if types else NONE


def packed_blocks(kind: str, data: np.ndarray, columns: int) -> Rounded:
    """A matrix of `columns` from the bytes [N, ...] of its rows."""
    rows, groups = len(data), columns // BLOCK
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(rows, groups, -1)
    if kind == "MXFP4":
        return Rounded(blocks[:, :, 1:].reshape(rows, -1), scales_of(blocks[:, :, 0]))
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    if kind == "Q8_0":
        return Rounded(blocks[:, :, 2:].view(np.int8).reshape(rows, columns), scales)
    if kind == "Q4_0":
        return Rounded(blocks[:, :, 2:].reshape(rows, -1), scales)
    least = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0]
    values, wide = blocks[:, :, 4:], scales.astype(np.float32)
    # A block of one number has no step: it is 0 - 1 steps of that number, negated.
    flat = wide == 0
    zeros = np.where(flat, 1, -least.astype(np.float32) / np.where(flat, 1, wide))
    values = np.where(flat[:, :, None], np.uint8(0), values)
    scales = np.where(flat, -least, scales)
    return Rounded(values.reshape(rows, -1), scales, zeros=zeros.astype(np.float32))
