"""Rows of x rounded to few bits, each with a scale of its own: in plain jax."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels.quantised_matmul.weight import Activations

INT8_MOST, FLOAT8_MOST, LEAST_SCALE = 127.0, 448.0, 1e-12
PAIR = 254.0  # what is left over after rounding is at most half a unit, and int8 has 127


class Rounded(NamedTuple):
    """Rows as a product takes them: `terms` of every row after each other, whose products times
    their scales add up."""

    values: Num[Array, "R K"]
    scales: Float[Array, " R"] | None = None
    terms: int = 1

    def total(self, product: Float[Array, "R N"]) -> Float[Array, "M N"]:
        """The terms of every row's product, added."""
        if self.terms == 1:
            return product
        return product.reshape(-1, self.terms, product.shape[1]).sum(axis=1)


def most(activations: Activations) -> float:
    """The number that the largest magnitude of a row becomes."""
    return FLOAT8_MOST if activations == "float8_e4m3fn" else INT8_MOST


def rounded(x: Float[Array, "M K"], activations: Activations) -> Rounded:
    """x as the weight's kind has it (per-token scales: Dettmers et al. 2022, arXiv:2208.07339).

    Integers know no NaN, and XLA's maximum on CPUs drops it: the scale of a row that is not finite
    says so.
    """
    if activations == "as_given":
        return Rounded(x)
    x = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / most(activations), LEAST_SCALE)
    scales = jnp.where(jnp.isfinite(x).all(axis=-1), scales, jnp.nan)
    units = x * (1 / scales)[:, None]
    if activations == "float8_e4m3fn":
        return Rounded(units.astype(jnp.float8_e4m3fn), scales)
    high = jnp.round(units)
    if activations == "int8":
        return Rounded(high.astype(jnp.int8), scales)
    low = jnp.round((units - high) * PAIR)
    pair = jnp.stack([high, low], axis=1).astype(jnp.int8)
    both = jnp.stack([scales, scales / PAIR], axis=1)
    return Rounded(pair.reshape(-1, x.shape[1]), both.reshape(-1), terms=2)
