"""What comes between the projection of queries, keys and values and attention, in one kernel by
Triton: heads are normed and rotated, keys and values go into their pages.

XLA makes three operations of it, and five where heads are normed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.triton_blocks import power_of_two


def rotate_and_write(
    qkv: Float[Array, "T KV G2 hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps hd"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    norms: tuple[Float[Array, " hd"], Float[Array, " hd"]] | None,
    *,
    eps: float,
    norm_offset: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T KV G hd"], Float[Array, "P KV ps hd"], Float[Array, "P KV ps hd"]]:
    """Rotated queries, and the pages with the step's rotated keys and its values.

    `norms` are weights, `norm_offset` too small, of root-mean-square norms of each query and key.
    Of each key/value head, `qkv` holds the queries that share it, its key and its value. Values in
    the pool stay finite, and a key says with NaN where its value was not: see `write_kv`. Numbers
    are rounded to their dtype after the norm and after the rotation, as by separate operations.
    """
    tokens, kv_heads, fused, head_dim = qkv.shape
    group = fused - 2
    arrays = [qkv, pages, offsets, *rotary, *(norms or ())]
    q_shape = jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), qkv.dtype)
    pool = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, group, head_dim, eps, norm_offset),
        grid=(tokens, kv_heads),
        out_shape=[q_shape, pool, pool],
        input_output_aliases={len(arrays): 1, len(arrays) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(*arrays, k_pool, v_pool)


def _kernel(
    group: int,
    head_dim: int,
    eps: float,
    norm_offset: float,
    qkv: Any,
    pages: Any,
    offsets: Any,
    cos_ref: Any,
    sin_ref: Any,
    *refs: Any,
) -> None:
    *weights, _, _, q_out, k_out, v_out = refs
    token, head = pl.program_id(0), pl.program_id(1)
    half = head_dim // 2
    dims = jnp.arange(power_of_two(half))
    inside = dims < half
    cos = plgpu.load(cos_ref.at[token, dims], mask=inside, other=0.0)[None, :]
    sin = plgpu.load(sin_ref.at[token, dims], mask=inside, other=0.0)[None, :]

    def halves(member: Any, count: int) -> tuple[Any, Any, Any]:
        """Both halves of some members of the head, and which values there are."""
        there = (member < count)[:, None] & inside[None, :]
        low, high = (
            plgpu.load(qkv.at[token, head, member[:, None], at[None, :]], mask=there, other=0.0)
            for at in (dims, dims + half)
        )
        return low, high, there

    def rotated(low: Any, high: Any, weight: Any) -> tuple[Any, Any]:
        dtype = low.dtype
        low, high = low.astype(jnp.float32), high.astype(jnp.float32)
        if weight is not None:
            squares = jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)
            scale = lax.rsqrt(squares / head_dim + eps)[:, None]
            factors = (
                plgpu.load(weight.at[at], mask=inside, other=0.0).astype(jnp.float32)[None, :]
                for at in (dims, dims + half)
            )
            low, high = (
                (part * scale * (factor + norm_offset)).astype(dtype).astype(jnp.float32)
                for part, factor in zip((low, high), factors)
            )
        return (low * cos - high * sin).astype(dtype), (high * cos + low * sin).astype(dtype)

    members = jnp.arange(power_of_two(group))
    low, high, there = halves(members, group)
    low, high = rotated(low, high, weights[0] if weights else None)
    for at, part in ((dims, low), (dims + half, high)):
        where = q_out.at[token, head, members[:, None], at[None, :]]
        plgpu.store(where, part, mask=there)
    one = jnp.arange(1)
    page, place = plgpu.load(pages.at[token]), plgpu.load(offsets.at[token])
    low, high, there = halves(group + one, group + 1)
    keys = rotated(low, high, weights[1] if weights else None)
    values = halves(group + 1 + one, group + 2)
    for at, key, value in zip((dims, dims + half), keys, values):
        key, value = key.astype(k_out.dtype), value.astype(v_out.dtype)
        finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
        where = (page, head, place + one[:, None], at[None, :])
        plgpu.store(k_out.at[where], jnp.where(finite, key, jnp.nan), mask=there)
        plgpu.store(v_out.at[where], jnp.where(finite, value, 0), mask=there)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(
    rotate_and_write,
    static_argnames=("eps", "norm_offset", "interpret"),
    donate_argnames=("k_pool", "v_pool"),
)
