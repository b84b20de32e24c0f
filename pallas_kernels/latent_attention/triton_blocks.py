"""What both kernels around latent attention do: add the parts of a product, and rotate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.rotary import Pairs


def added(parts: Any, at: Callable[[int], Any], mask: Any, dtype: Any) -> Any:
    """Parts of a product added in order, rounded to `dtype` as the whole would be; in float32.

    `at(i)` refers to what is wanted of part i.
    """
    total = jnp.zeros((), jnp.float32)
    for i in range(parts.shape[0]):
        total = total + plgpu.load(at(i), mask=mask, other=0).astype(jnp.float32)
    return total.astype(dtype).astype(jnp.float32)


def rotated(
    pairs: Pairs, cos: Any, sin: Any, token: Any, dims: Any, real: Any, load: Callable[[Any], Any]
) -> Any:
    """Values of a key or query that rotates whole, by the angles [T, half] of their tokens.

    `token` and `dims` say where each value is, `load(dims)` loads it or its partner.
    """
    half = cos.shape[1]
    if pairs == "halves":
        second, pair = dims >= half, dims % half
        partner = jnp.where(second, dims - half, dims + half)
    else:
        second, pair = dims % 2 == 1, dims // 2
        partner = jnp.where(second, dims - 1, dims + 1)
    turn = plgpu.load(cos.at[token, pair], mask=real, other=1.0)
    swing = plgpu.load(sin.at[token, pair], mask=real, other=0.0)
    return load(dims) * turn + load(partner) * jnp.where(second, swing, -swing)
