"""Rotation of queries and keys by their position (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

# "halves" pairs the first half of what rotates with the second (NeoX), "neighbours" values side by
# side (GPT-J).
Pairs = Literal["halves", "neighbours"]


def apply_rope(
    x: Float[Array, "T N hd"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    pairs: Pairs = "halves",
) -> Float[Array, "T N hd"]:
    """Rotate pairs of each head's leading 2 * half values; computed in float32.

    Swapping the two of a pair instead of slicing and joining them keeps it one fused operation.
    """
    rotary = 2 * cos.shape[-1]
    if rotary < x.shape[-1]:
        turned = apply_rope(x[..., :rotary], cos, sin, pairs)
        return jnp.concatenate([turned, x[..., rotary:]], axis=-1)
    axis = -2 if pairs == "halves" else -1
    shape = (2, -1) if pairs == "halves" else (-1, 2)
    both = x.reshape(*x.shape[:-1], *shape).astype(jnp.float32)
    signed = jnp.stack([-sin, sin], axis=axis)[:, None]
    rotated = both * jnp.expand_dims(cos, axis)[:, None] + jnp.flip(both, axis) * signed
    return rotated.reshape(x.shape).astype(x.dtype)
