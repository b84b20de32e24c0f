"""MXFP4: blocks of 32 four-bit floats (e2m1) that share a scale, a power of two (OCP Microscaling
Formats specification 1.0)."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

BLOCK = 32  # values of one scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
_BIAS, _MOST, _NAN = 127, 252, 255  # of the scale's exponent; 6 * 2 ** (252 - 127) is finite
_AT_ONCE = 1 << 12  # blocks: the temporaries stay in the CPU's cache


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16[..., B * 32], exact, of uint8 `blocks` [..., B, 16] and `scales` [..., B].

    A byte holds two values, the lower four bits the first. A scale s is 2 ** (s - 127); one of 255
    is NaN, and products too large for bfloat16 are Inf.
    """
    flat, exponents = blocks.reshape(-1, BLOCK // 2), scales.reshape(-1, 1)
    pairs = np.empty(flat.shape, np.uint32)
    for start in range(0, len(flat), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        places = exponents[part].astype(np.intp) << 8 | flat[part]
        np.take(_pairs(), places, out=pairs[part], mode="clip")  # all are in range: no buffering
    return pairs.view(ml_dtypes.bfloat16).reshape(*blocks.shape[:-2], -1)


def scales_of(exponents: np.ndarray) -> np.ndarray:
    """bfloat16 scales, exact, of uint8 exponents: NaN of 255, and Inf where an e2m1 number times
    the scale may be."""
    scales = np.ldexp(np.float32(1), np.minimum(exponents, _MOST).astype(np.int32) - _BIAS)
    scales[exponents > _MOST] = np.inf
    scales[exponents == _NAN] = np.nan
    return scales.astype(ml_dtypes.bfloat16)


@functools.cache
def _pairs() -> np.ndarray:
    """uint32[65536]: by (scale, byte), the two bfloat16 values it stands for."""
    values = np.array([*_E2M1, *(-value for value in _E2M1)], np.float64)
    exponents = np.arange(256, dtype=np.float64) - _BIAS
    scales = np.where(np.arange(256) == _NAN, np.nan, np.exp2(exponents))
    both = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        table = (scales[:, None, None] * both).astype(ml_dtypes.bfloat16)
    return table.reshape(-1).view(np.uint32)
