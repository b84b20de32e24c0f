"""Random arrays that compile fast: numbers of a place, mixed with a key.

Programs that make a case's inputs took as long to compile as all else of its tasks with
`jax.random`, whose generators are long code for each array.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

Key = UInt32[Array, ""]
_MOST = 1 - 2**-20  # of uniform numbers whose place in the normal distribution is asked for


def split(key: Key, count: int = 2) -> UInt32[Array, " count"]:
    """Keys for so many arrays."""
    return _mixed(_mixed(jnp.arange(count, dtype=jnp.uint32)) + _mixed(key))


def uniform(
    key: Key, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0
) -> Float[Array, ...]:
    """float32 from `low` to `high`."""
    part = _bits(key, shape).astype(jnp.float32) * jnp.float32(2**-32)
    return low + part * (high - low)


def normal(key: Key, shape: tuple[int, ...]) -> Float[Array, ...]:
    """float32 of mean 0 and variance 1, within five deviations."""
    return math.sqrt(2) * lax.erf_inv(uniform(key, shape, -_MOST, _MOST))


def integers(key: Key, shape: tuple[int, ...], low: int, high: int) -> Int[Array, ...]:
    """int32 from `low` to `high` - 1; fewer than 2^16 numbers."""
    return low + (_bits(key, shape) >> 16).astype(jnp.int32) % (high - low)


def _bits(key: Key, shape: tuple[int, ...]) -> UInt32[Array, ...]:
    places = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return _mixed(_mixed(places) + key)


def _mixed(bits: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """Each bit of the result depends on all: the finaliser of MurmurHash3 (Appleby 2011)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
