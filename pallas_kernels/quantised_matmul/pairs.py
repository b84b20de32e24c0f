"""Products of rows in two int8 terms, all first terms above all second ones.

In plain jax the order matters: beside each other, a row's two terms and the sum of their products
cost a third more on CPUs than the product itself does.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from pallas_kernels.quantised_matmul.activations import INT8_MOST, LEAST_SCALE, PAIR


def pair_product(
    x: Float[Array, "M K"],
    dot: Callable[[Int8[Array, "R K"]], Int32[Array, "R N"]],
    scales: Float[Array, " N"],
) -> Float[Array, "M N"]:
    """float32 x times a transposed matrix of integers, by which `dot` multiplies, times the scales
    of its rows. Rounds as `activations.rounded` does, and says likewise where a row is not finite.
    """
    rows, x = x.shape[0], x.astype(jnp.float32)
    own = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / INT8_MOST, LEAST_SCALE)
    units = x * (1 / own)
    high = jnp.round(units)
    low = jnp.round((units - high) * PAIR)
    product = dot(jnp.concatenate([high, low]).astype(jnp.int8)).astype(jnp.float32)
    own = jnp.where(jnp.isfinite(x).all(axis=-1, keepdims=True), own, jnp.nan)
    return (product[:rows] + product[rows:] * (1 / PAIR)) * (own * scales[None])
