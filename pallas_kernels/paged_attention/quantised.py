"""Keys and values in 8 bits: numbers, and a float32 scale for each token and head.

XLA for CPUs has no operations on float8 and makes float16 of whole arrays around them. So pages may
be uint8 in their place, which holds the bits of float8_e4m3fn.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num


def meant(dtype: jnp.dtype) -> jnp.dtype:
    """The type of the numbers that pages of this dtype hold."""
    return jnp.dtype(jnp.float8_e4m3fn) if dtype == jnp.uint8 else dtype


def as_stored(numbers: Num[Array, "*axes"], dtype: jnp.dtype) -> Num[Array, "*axes"]:
    """Numbers of the type that is meant, as pages of this dtype hold them."""
    return lax.bitcast_convert_type(numbers, jnp.uint8) if dtype == jnp.uint8 else numbers


def as_numbers(stored: Num[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """What pages hold, exactly, in a type of 16 bits or more.

    A float8_e4m3fn's bits are those of a float16 whose exponent has another bias. NaN, which pages
    never hold, would become 480.
    """
    if stored.dtype != jnp.uint8:
        return stored.astype(dtype)
    wide = stored.astype(jnp.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(dtype) * 256


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


def in_units(
    weights: Float[Array, "*axes T"], dtype: jnp.dtype
) -> tuple[Float[Array, "*axes T"], Float[Array, "*axes 1"] | None]:
    """Weights of values, times their scales, in `dtype`: of the unit that is returned, if any.

    float16 has few bits for such products, or none where values are small: there each row's largest
    is its unit.
    """
    if dtype != jnp.float16:
        return weights.astype(dtype), None
    unit = jnp.max(weights, axis=-1)[..., None]
    return (weights / jnp.where(unit > 0, unit, 1.0)).astype(dtype), unit
