"""Norm and rotation of new queries and keys and the write of keys and values, for GPUs by Triton: a
program takes one token's heads that share a key.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import quantised
from pallas_kernels.paged_attention.rotary import Pairs
from pallas_kernels.paged_attention.triton_blocks import power_of_two

Pools = tuple[Array, ...]  # pages of keys and values, then scales of both if they are quantised
WARPS = 2


class Heads(NamedTuple):
    """What is done to heads: which values are pairs, and of a norm its epsilon and what its weights
    are too small by."""

    pairs: Pairs
    eps: float = 0.0
    norm_offset: float = 0.0


def rotate_and_write(
    qkv: Float[Array, "T KV G2 hd"],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    pools: Pools,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    norms: tuple[Float[Array, " hd"], Float[Array, " hd"]] | None = None,
    *,
    how: Heads,
    interpret: bool = False,
) -> tuple[Float[Array, "T KV G hd"], Pools]:
    """See the package. The pools are updated in place where they are donated."""
    tokens, kv_heads, members, head_dim = qkv.shape
    arrays = [qkv, *rotary, pages, offsets, *(norms or ())]
    first = len(arrays)  # of the pools among the arguments
    out = jax.ShapeDtypeStruct((tokens, kv_heads, members - 2, head_dim), qkv.dtype)
    shapes = [out, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)]
    q, *stored = pl.pallas_call(
        functools.partial(_kernel, rotary[0].shape[1], how, norms is not None, len(pools)),
        grid=(tokens, kv_heads),
        out_shape=shapes,
        input_output_aliases={first + i: 1 + i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(*arrays, *pools)
    return q, tuple(stored)


def _kernel(half: int, how: Heads, normed: bool, num_pools: int, *refs: Any) -> None:
    qkv, cos_ref, sin_ref, pages, offsets = refs[:5]
    weights = refs[5:7] if normed else (None, None)
    q_out, *pools = refs[5 + 2 * normed + num_pools :]
    token, head = pl.program_id(0), pl.program_id(1)
    group, size = qkv.shape[2] - 2, qkv.shape[3]
    dims = jnp.arange(power_of_two(size))
    real, turns = dims < size, dims < 2 * half
    if how.pairs == "halves":
        second, pair = dims >= half, dims % half
        partner = jnp.where(second, dims - half, dims + half)
    else:
        second, pair = dims % 2 == 1, dims // 2
        partner = jnp.where(second, dims - 1, dims + 1)
    cos = plgpu.load(cos_ref.at[token, pair], mask=turns, other=1.0)
    sin = plgpu.load(sin_ref.at[token, pair], mask=turns, other=0.0)
    sin = jnp.where(second, sin, -sin)

    def load(member: Any, at: Any, mask: Any) -> Any:
        return plgpu.load(qkv.at[token, head, member, at], mask=mask, other=0).astype(jnp.float32)

    def rotated(member: Any, weight: Any, *where: Any) -> Any:
        cos, sin, dims, partner, mask = where
        both = mask & (partner < size)
        own, other = load(member, dims, mask), load(member, partner, both)
        if weight is not None:
            squares = jnp.sum(own * own, axis=-1, keepdims=True)
            scale = lax.rsqrt(squares / size + how.eps)
            own = times(own * scale, weight, dims, dims < size)
            other = times(other * scale, weight, partner, partner < size)
        return own * cos + other * sin

    def times(x: Any, weight: Any, at: Any, mask: Any) -> Any:
        factor = plgpu.load(weight.at[at], mask=mask, other=0).astype(jnp.float32)
        return (x * (factor + how.norm_offset)).astype(q_out.dtype).astype(jnp.float32)

    members = jnp.arange(power_of_two(group))[:, None]
    there = (members < group) & real[None, :]
    wide = [x[None, :] for x in (cos, sin, dims, partner)]
    q = rotated(members, weights[0], *wide, there).astype(q_out.dtype)
    plgpu.store(q_out.at[token, head, members, dims[None, :]], q, mask=there)
    # Rounded to the dtype of activations as it would be outside.
    k = rotated(group, weights[1], cos, sin, dims, partner, real)
    k = k.astype(q_out.dtype).astype(jnp.float32)
    v = load(group + 1, dims, real)
    page, offset = plgpu.load(pages.at[token]), plgpu.load(offsets.at[token])
    if num_pools == 2:
        k, v = _finite(k.astype(pools[0].dtype), v.astype(pools[1].dtype))
        stored = [k, v]
    else:
        stored = _quantised(k, v, pools)
    for pool, value in zip(pools[:2], stored):
        plgpu.store(pool.at[page, head, offset, dims], value, mask=real)
    for pool, scale in zip(pools[2:], stored[2:]):
        plgpu.store(pool.at[page, head, offset], scale)


def _is_finite(x: Any) -> Any:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def _finite(k: Any, v: Any) -> tuple[Any, Any]:
    """Values that are finite; where one was not, its key is NaN."""
    finite = _is_finite(v)
    return jnp.where(finite, k, jnp.array(jnp.nan, k.dtype)), jnp.where(finite, v, 0)


def _quantised(k: Any, v: Any, pools: Any) -> list[Any]:
    """Numbers of keys and values, and their scales; the key's is NaN if any was not finite."""
    failed = jnp.max(jnp.where(_is_finite(k) & _is_finite(v), 0.0, 1.0)) > 0
    stored, scales = [], []
    for x, pool in zip((k, v), pools):
        x = jnp.where(_is_finite(x), x, 0.0)
        scale = quantised.scale_of(jnp.max(jnp.abs(x)), pool.dtype)
        stored.append(quantised.to_numbers(x, scale, pool.dtype))
        scales.append(scale)
    return [*stored, jnp.where(failed, jnp.nan, scales[0]), scales[1]]


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(
    rotate_and_write, static_argnames=("how", "interpret"), donate_argnames=("pools",)
)
