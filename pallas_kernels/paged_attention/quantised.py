"""Keys and values in 8 bits: numbers, and a float32 scale for each token and head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num


def largest(dtype: jnp.dtype) -> float:
    """The largest number that is stored: 127 of int8, 448 of float8_e4m3fn."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return float(info(dtype).max)


def quantise(
    x: Float[Array, "T KV hd"], dtype: jnp.dtype
) -> tuple[Num[Array, "T KV hd"], Float[Array, "T KV"]]:
    """Finite x as numbers of `dtype` times scales: the largest one becomes the dtype's largest.

    Errors are at most half a scale of int8; of float8_e4m3fn a sixteenth of a number, or
    scale / 1024 where that is more.
    """
    x = x.astype(jnp.float32)
    scale = scale_of(jnp.abs(x).max(-1), dtype)
    return to_numbers(x, scale[..., None], dtype), scale


def scale_of(most: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """The scale of a largest magnitude; 0 for one that has no reciprocal."""
    scale = most / largest(dtype)
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale)


def to_numbers(
    x: Float[Array, "*axes"], scale: Float[Array, "*#axes"], dtype: jnp.dtype
) -> Num[Array, "*axes"]:
    """Finite float32 x divided by its scale, as the numbers that are stored."""
    most = largest(dtype)
    x = jnp.clip(x * jnp.where(scale > 0, 1 / scale, 0.0), -most, most)
    return (jnp.floor(x + 0.5) if jnp.dtype(dtype) == jnp.int8 else x).astype(dtype)
