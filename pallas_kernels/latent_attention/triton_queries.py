"""Queries that meet latents, for GPUs by Triton: the part without a position times the head's key
matrix, and the rest rotated, side by side. A program takes a block of tokens of one head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.latent_attention.triton_blocks import added, rotated
from pallas_kernels.paged_attention.rotary import Pairs
from pallas_kernels.paged_attention.triton_blocks import FEWEST, power_of_two

ROWS, MOST_OUTPUTS, WARPS = 16, 128, 4


def absorbed_queries(
    q: Float[Array, "P T H width"],
    key_weights: Float[Array, "H kv_rank nope"],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    *,
    pairs: Pairs,
    interpret: bool = False,
) -> Float[Array, "T H hd"]:
    """Queries of keys that are a latent and a key that rotates.

    `q` are parts whose sum, rounded to the weights' dtype, is a head's query: `nope` values
    without a position, then those that rotate.
    """
    tokens, heads = q.shape[1:3]
    rank, nope = key_weights.shape[1:]
    outputs = min(MOST_OUTPUTS, max(FEWEST, power_of_two(rank)))
    return pl.pallas_call(
        functools.partial(_kernel, pairs, outputs),
        grid=(heads, pl.cdiv(tokens, ROWS), pl.cdiv(rank, outputs)),
        out_shape=jax.ShapeDtypeStruct(
            (tokens, heads, rank + q.shape[3] - nope), key_weights.dtype
        ),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="absorbed_queries",
    )(q, key_weights, *rotary)


def _kernel(pairs: Pairs, outputs: int, q: Any, weights: Any, cos: Any, sin: Any, out: Any) -> None:
    head, block = pl.program_id(0), pl.program_id(2)
    rank, nope = weights.shape[1:]
    token = (pl.program_id(1) * ROWS + jnp.arange(ROWS))[:, None]
    there = token < q.shape[1]

    def load(dims: Any, mask: Any) -> Any:
        return added(q, lambda i: q.at[i, token, head, dims], mask, weights.dtype)

    dims = jnp.arange(max(FEWEST, power_of_two(nope)))
    output = block * outputs + jnp.arange(outputs)
    plain = load(dims[None, :], there & (dims < nope)[None, :]).astype(weights.dtype)
    mask = (output < rank)[:, None] & (dims < nope)[None, :]
    matrix = plgpu.load(weights.at[head, output[:, None], dims[None, :]], mask=mask, other=0)
    product = plgpu.dot(plain, matrix, trans_b=True).astype(out.dtype)
    plgpu.store(
        out.at[token, head, output[None, :]], product, mask=there & (output < rank)[None, :]
    )
    turning = jnp.arange(power_of_two(2 * cos.shape[1]))[None, :]
    mine = there & (turning < 2 * cos.shape[1]) & (block == 0)  # the first block's work
    turned = rotated(pairs, cos, sin, token, turning, mine, lambda at: load(nope + at, mine))
    plgpu.store(out.at[token, head, rank + turning], turned.astype(out.dtype), mask=mine)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(absorbed_queries, static_argnames=("pairs", "interpret"))
