"""Norms of a token's latents, rotation of its shared key, and the write of both into the page, for
GPUs by Triton: a program takes one token.
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

from pallas_kernels.latent_attention.triton_blocks import added, rotated
from pallas_kernels.paged_attention.rotary import Pairs
from pallas_kernels.paged_attention.triton_blocks import power_of_two

WARPS = 4


def norm_and_write(
    projected: tuple[Float[Array, "_ T _"], ...],
    norms: tuple[Float[Array, " q_rank"] | None, Float[Array, " kv_rank"]],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    pool: Float[Array, "pages 1 ps hd"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    pairs: Pairs,
    eps: float,
    dtype: Any,
    interpret: bool = False,
) -> tuple[Float[Array, "T q_rank"] | None, Float[Array, "pages 1 ps hd"]]:
    """The latents of queries after their norm, and the pool with the step's keys.

    `projected` are parts whose sum, rounded to `dtype`, is a token's latent of queries if there is
    a norm for it, then that of keys and values, then the key that rotates: all in one array, or
    the first in one and the others in a second. A key is the latter two after norm and rotation.
    As `write_latent` has it, its value stays finite, and the rest of it is NaN if that was not. The
    pool is updated in place where it is donated.
    """
    tokens = projected[0].shape[1]
    q_rank = sum(part.shape[2] for part in projected) - pool.shape[3]
    weights = [weight for weight in norms if weight is not None]
    arrays = [*projected, *rotary, pages, offsets, *weights]
    low = [jax.ShapeDtypeStruct((tokens, q_rank), dtype)] if q_rank else []
    *found, pool = pl.pallas_call(
        functools.partial(_kernel, len(projected), pairs, eps, jnp.dtype(dtype)),
        grid=(tokens,),
        out_shape=[*low, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(arrays): len(low)},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="norm_and_write",
    )(*arrays, pool)
    return (found[0] if found else None), pool


def _kernel(count: int, pairs: Pairs, eps: float, dtype: Any, *refs: Any) -> None:
    projected, (cos, sin, pages, offsets, *rest) = refs[:count], refs[count:]
    norms = (len(rest) - 1) // 2  # each has a result; the pool is there twice
    (*q_norm, kv_norm), (*low, pool) = rest[:norms], rest[norms + 1 :]
    token, rank = pl.program_id(0), kv_norm.shape[0]
    q_rank = sum(part.shape[2] for part in projected) - pool.shape[3]

    def load(first: int, dims: Any, mask: Any) -> Any:
        parts = projected[0]
        if count == 2 and first >= q_rank:
            parts, first = projected[1], first - q_rank
        return added(parts, lambda i: parts.at[i, token, first + dims], mask, dtype)

    def normed(first: int, weight: Any) -> tuple[Any, Any, Any]:
        size = weight.shape[0]
        dims = jnp.arange(power_of_two(size))
        real = dims < size
        x = load(first, dims, real)
        scale = lax.rsqrt(jnp.sum(x * x) / size + eps)
        factor = plgpu.load(weight.at[dims], mask=real, other=0).astype(jnp.float32)
        return dims, real, (x * scale * factor).astype(dtype)

    if q_norm:
        dims, real, x = normed(0, q_norm[0])
        plgpu.store(low[0].at[token, dims], x, mask=real)
    page, offset = plgpu.load(pages.at[token]), plgpu.load(offsets.at[token])
    dims, real, value = normed(q_rank, kv_norm)
    value = value.astype(pool.dtype)
    finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
    plgpu.store(pool.at[page, 0, offset, dims], jnp.where(finite, value, 0), mask=real)
    failed = jnp.max(jnp.where(finite, 0.0, 1.0)) > 0
    dims = jnp.arange(power_of_two(2 * cos.shape[1]))
    real = dims < 2 * cos.shape[1]
    turned = functools.partial(load, q_rank + rank, mask=real)
    key = rotated(pairs, cos, sin, token, dims, real, turned)
    key = jnp.where(failed, jnp.nan, key.astype(dtype)).astype(pool.dtype)
    plgpu.store(pool.at[page, 0, offset, rank + dims], key, mask=real)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(
    norm_and_write,
    static_argnames=("pairs", "eps", "dtype", "interpret"),
    donate_argnames=("pool",),
)
