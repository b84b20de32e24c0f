"""The parts model families share. `linear` is the only place that knows how a weight is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def linear(x: Float[Array, "T K"], weight: Float[Array, "... K"]) -> Float[Array, "T ..."]:
    """x @ weight.T over the last axis of both; weights are stored (out..., in).

    That layout is the checkpoint's own, lets a tied head share the embedding, and is the fast
    one for XLA on CPUs.
    """
    return lax.dot_general(x, weight, (((1,), (weight.ndim - 1,)), ((), ())))


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "T D"]:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), statistics in float32."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def swiglu(gate_up: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def embed(table: Float[Array, "V D"], tokens: Int[Array, "T"]) -> Float[Array, "T D"]:
    """Rows of the embedding table. Token ids are validated at the edge."""
    return table.at[tokens].get(mode="promise_in_bounds")
