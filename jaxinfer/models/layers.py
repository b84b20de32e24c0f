"""The parts model families share. `linear` is the only place that knows how a weight is stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.cpu_kernels.integer_panels import (
    IntegerPanels,
    multiply_integers,
    rows_of_integers,
)
from jaxinfer.cpu_kernels.panels import Panels, multiply_panels, rows_of_panels
from jaxinfer.quantization.weight import Heard, Quantised, multiply, rows_of


def linear(
    x: Float[Array, "T ..."],
    weight: Float[Array, ...] | Quantised | Panels | IntegerPanels | Heard,
    out_dtype: Any = None,
) -> Float[Array, "T ..."]:
    """x @ weight.T over all axes of x but the first; weights are stored (out..., in...).

    The result has x's dtype unless `out_dtype` asks for the sums' own precision.

    That layout is the checkpoint's own, lets a tied head share the embedding, and is the fast
    one for XLA on CPUs. The product is taken over a flat weight: with several output axes XLA
    would transpose and copy the whole weight in every step.
    """
    if isinstance(weight, Heard):
        weight.hear(x.reshape(x.shape[0], -1))
        return linear(x, weight.array, out_dtype)
    outputs = weight.shape[: len(weight.shape) - (x.ndim - 1)]
    x = x.reshape(x.shape[0], -1)
    if isinstance(weight, Quantised):
        product = multiply(x, weight, out_dtype or x.dtype)
    elif isinstance(weight, Panels):
        product = multiply_panels(x, weight).astype(out_dtype or x.dtype)
    elif isinstance(weight, IntegerPanels):
        product = multiply_integers(x, weight).astype(out_dtype or x.dtype)
    else:
        dimensions, flat = (((1,), (1,)), ((), ())), weight.reshape(-1, x.shape[1])
        product = lax.dot_general(x, flat, dimensions, preferred_element_type=out_dtype)
    return product.reshape(x.shape[0], *outputs)


def linear_of_experts(
    product: Callable[..., Array],
    x: Float[Array, "R K"],
    weight: Float[Array, "E *outputs K"] | Quantised | Heard,
    sizes: Int[Array, " E"],
) -> Float[Array, "R ..."]:
    """Rows times the matrices of their experts, by `product`, the `multiply` of `base.Experts`."""
    if isinstance(weight, Heard):
        weight.hear(x)
        return linear_of_experts(product, x, weight.array, sizes)
    count, *outputs = weight.shape[:-1]
    if isinstance(weight, Quantised):
        products = [product(x, term, sizes) for term in weight.terms]
    else:
        products = [product(x, weight.reshape(count, -1, x.shape[1]), sizes)]
    return sum(products[1:], start=products[0]).reshape(x.shape[0], *outputs)


def linear_by_head(
    x: Float[Array, "T H K"], weight: Float[Array, "H N K"]
) -> Float[Array, "T H N"]:
    """Every head's part of x times the transposed matrix of that head."""
    return lax.dot_general(x, weight, (((2,), (2,)), ((1,), (0,)))).swapaxes(0, 1)


def add_bias(x: Float[Array, "T ..."], bias: Array | None) -> Float[Array, "T ..."]:
    """x + bias, if there is one."""
    return x if bias is None else x + bias[None]


def rms_norm(
    x: Float[Array, "T D"], weight: Float[Array, " D"], eps: float, offset: float = 0.0
) -> Float[Array, "T D"]:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), statistics in float32.

    The normed values are multiplied by weight + offset.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32) + offset if offset else weight.astype(jnp.float32)
    return (x32 * scale * factor[None, :]).astype(x.dtype)


def layer_norm(
    x: Float[Array, "T *heads D"],
    weight: Float[Array, "*heads D"] | None,
    bias: Float[Array, "*heads D"] | None,
    eps: float,
    offset: float = 0.0,
) -> Float[Array, "T *heads D"]:
    """Layer norm (Ba et al. 2016, arXiv:1607.06450) of the last axis, statistics in float32.

    The normed values are multiplied by weight + offset.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    if weight is not None:
        factor = weight.astype(jnp.float32) + offset if offset else weight.astype(jnp.float32)
        normed = normed * factor[None]
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)[None]
    return normed.astype(x.dtype)


MLP_BLOCK = 64
MLP_SHARDS = 8


def mlp_block(intermediate_size: int) -> int:
    """Rows of gate and up that alternate in a fused weight [F / block, 2, block, D].

    Whole blocks keep both halves contiguous, and one axis shards gate, up and down alike: the
    block leaves `MLP_SHARDS` of them where the size divides so.
    """
    share = intermediate_size // MLP_SHARDS
    return math.gcd(share if intermediate_size % MLP_SHARDS == 0 else intermediate_size, MLP_BLOCK)


def fuse_gate_up(gate: Any, up: Any) -> Any:
    """Weights [F, D] of gate and up as one [F / block, 2, block, D], or biases [F]."""
    shape = (-1, 1, mlp_block(gate.shape[0]), *gate.shape[1:])
    return gate.__array_namespace__().concat([gate.reshape(shape), up.reshape(shape)], axis=1)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activate(gate_up: Float[Array, "T blocks 2 block"], activation: str) -> Float[Array, "T F"]:
    """activation(gate) * up (Shazeer 2020, arXiv:2002.05202).

    The barrier keeps the reshape out of the loop, which XLA would not vectorise on CPUs.
    """
    gate, up = gate_up[:, :, 0], gate_up[:, :, 1]
    hidden = lax.optimization_barrier(ACTIVATIONS[activation](gate) * up)
    return hidden.reshape(gate_up.shape[0], -1)


def clamped_swiglu(
    gate_up: Float[Array, "T blocks 2 block"], limit: float, alpha: float
) -> Float[Array, "T F"]:
    """gate * sigmoid(alpha * gate) * (up + 1), of values clamped to `limit` (gpt-oss,
    arXiv:2508.10925); the gate from above only."""
    gate, up = jnp.minimum(gate_up[:, :, 0], limit), jnp.clip(gate_up[:, :, 1], -limit, limit)
    hidden = lax.optimization_barrier(gate * jax.nn.sigmoid(alpha * gate) * (up + 1))
    return hidden.reshape(gate_up.shape[0], -1)


def embed(
    table: Float[Array, "V D"] | Quantised | Panels | IntegerPanels, tokens: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Rows of the embedding table. Token ids are validated at the edge."""
    if isinstance(table, Quantised):
        return rows_of(table, tokens)
    if isinstance(table, Panels):
        return rows_of_panels(table, tokens)
    if isinstance(table, IntegerPanels):
        return rows_of_integers(table, tokens)
    return table.at[tokens].get(mode="promise_in_bounds")
