"""Attention over a paged KV pool: one contract, several bodies, one dispatch.

The pool of a layer is two arrays [pages, kv_heads, page_size, head_dim]. A sequence's tokens lie in
the pages its row of the page table names, in order. Page 0 is the null page: padding reads and
writes there. Keys that a row must not see may be anything; values are finite in every page.

Latent attention (DeepSeek-V2, arXiv:2405.04434) has one array: its `v_pool` is None, and the
leading `value_dim` of a key is its value.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import (
    mosaic_decode,
    mosaic_prefill,
    reference,
    triton_blocks,
    triton_decode,
    triton_prefill,
    triton_write,
)
from pallas_kernels.paged_attention.dispatch import (
    Body,
    Implementation,
    choose_body,
    hopper_takes,
)


def paged_attention(
    q: Float[Array, "S KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps vd"] | None,
    page_table: Int[Array, "S W"],
    kv_lens: Int[Array, " S"],
    *,
    scale: float,
    implementation: Implementation,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "KV G"] | None = None,
    block: int | None = None,
    value_dim: int | None = None,
) -> Float[Array, "S KV G vd"]:
    """Decode attention: one query token a row over its first `kv_lens` cached tokens.

    Softmax in float32. Rows with `kv_lens` 0 return zeros. With a `window`, a query sees so many
    tokens, itself included; `soft_cap` c makes scores c * tanh(score / c). `sinks` are scores of a
    key that every query sees and that has no value: a term of the softmax's denominator. `block` is
    how many keys the reference takes at once, by which a row's result differs in the last bits;
    None: what is fastest for as many rows.
    """
    pool = _pool(k_pool, v_pool, value_dim)
    if not implementation.startswith("reference"):
        how = _options(implementation, scale, window, soft_cap)
        if pool.v is not None and _for_hopper(pool, implementation):
            return mosaic_decode.paged_attention(
                q, pool.k, pool.v, page_table, kv_lens, sinks, **how
            )
        pages, how = triton_blocks.Pool(pool.k, pool.v), how | {"value_dim": pool.value_dim}
        return triton_decode.paged_attention(q, pages, page_table, kv_lens, sinks, **how)
    dynamic, seen = implementation == "reference", reference.Seen(window, soft_cap, sinks)
    return reference.paged_attention(q, pool, page_table, kv_lens, scale, seen, dynamic, block)


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps vd"] | None,
    page_table: Int[Array, "N W"],
    tiles: Int[Array, "T 4"],
    *,
    scale: float,
    implementation: Implementation,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "KV G"] | None = None,
    block: int | None = None,
    value_dim: int | None = None,
) -> Float[Array, "C KV G vd"]:
    """Prefill attention of a ragged chunk, causal, over each piece's cached tokens and itself.

    A tile is (first row in q, rows, row of the page table, position of the first row): at most
    `TILE_ROWS` consecutive tokens of one sequence. Tiles are ordered by first row and cover every
    row that matters; tiles with 0 rows are padding. The pool holds the chunk's own k and v already.
    `window`, `soft_cap`, `sinks` and `block` as for `paged_attention`.
    """
    pool = _pool(k_pool, v_pool, value_dim)
    if not implementation.startswith("reference"):
        how = _options(implementation, scale, window, soft_cap)
        if pool.v is not None and _for_hopper(pool, implementation):
            return mosaic_prefill.paged_prefill(q, pool.k, pool.v, page_table, tiles, sinks, **how)
        pages, how = triton_blocks.Pool(pool.k, pool.v), how | {"value_dim": pool.value_dim}
        return triton_prefill.paged_prefill(q, pages, page_table, tiles, sinks, **how)
    dynamic, seen = implementation == "reference", reference.Seen(window, soft_cap, sinks)
    return reference.paged_prefill(q, pool, page_table, tiles, scale, seen, dynamic, block)


def write_kv(
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps hd"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"],
) -> tuple[Float[Array, "P KV ps hd"], Float[Array, "P KV ps hd"]]:
    """Store one token a row at (page, offset), in place when the pools are donated.

    Several padding rows may hit the null page, so the indices are not promised to be unique.

    Values in the pool are always finite: attention drops masked keys by selection, but masked
    values by a weight of 0, and 0 * NaN would reach whoever uses the page next. Where a value is
    not finite its key gets a NaN, which reaches all that attend to it and nobody else.
    """
    k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
    finite = jnp.isfinite(v)  # elementwise: a reduction over the head would not fuse
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
    k_pool = k_pool.at[pages, :, offsets].set(k, mode="promise_in_bounds")
    return k_pool, v_pool.at[pages, :, offsets].set(v, mode="promise_in_bounds")


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
    implementation: Implementation,
) -> tuple[Float[Array, "T KV G hd"], Float[Array, "P KV ps hd"], Float[Array, "P KV ps hd"]]:
    """Queries as attention takes them, and the pages with the step's keys and values.

    Of each key/value head `qkv` has the queries that share it, its key and its value, as projected.
    Queries and keys are normed by root mean square, if there are weights for it, which are
    `norm_offset` too small; then their halves are rotated. Kernels only: with operations of XLA's
    it is a norm, a rotation and `write_kv`.
    """
    interpret = implementation.endswith("_interpreted")
    where = (qkv, k_pool, v_pool, pages, offsets, rotary, norms)
    return triton_write.rotate_and_write(
        *where, eps=eps, norm_offset=norm_offset, interpret=interpret
    )


def write_latent(
    pool: Float[Array, "P 1 ps hd"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    k: Float[Array, "T 1 hd"],
    value_dim: int,
) -> Float[Array, "P 1 ps hd"]:
    """`write_kv` where the leading `value_dim` of a key is its value: that part stays finite, and
    the rest of the key says with NaN if it was not."""
    k = k.astype(pool.dtype)
    finite = jnp.isfinite(k[..., :value_dim])
    value = jnp.where(finite, k[..., :value_dim], 0)
    rest = jnp.where(finite.all(-1, keepdims=True), k[..., value_dim:], jnp.nan)
    k = jnp.concatenate([value, rest], axis=-1)
    return pool.at[pages, :, offsets].set(k, mode="promise_in_bounds")


def _pool(k_pool: Array, v_pool: Array | None, value_dim: int | None) -> reference.Pool:
    if v_pool is not None and value_dim is None:
        return reference.Pool(k_pool, v_pool, v_pool.shape[3])
    if v_pool is None and value_dim is not None:
        return reference.Pool(k_pool, None, value_dim)
    raise ValueError("attention takes either v_pool or the value_dim of keys that begin with it")


def _for_hopper(pool: reference.Pool, implementation: Implementation) -> bool:
    dims = pool.k.shape[3], pool.value_dim
    known = hopper_takes(*dims, pool.page_size, pool.k.dtype.name)
    return implementation.startswith("mosaic") and known


def _options(
    implementation: Implementation, scale: float, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """Options of a kernel's call. Its blocks follow from shapes alone."""
    interpret = implementation.endswith("_interpreted")
    return {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret}


TILE_ROWS = reference.TILE_ROWS

__all__ = [
    "TILE_ROWS",
    "Body",
    "Implementation",
    "choose_body",
    "paged_attention",
    "paged_prefill",
    "rotate_and_write",
    "write_kv",
    "write_latent",
]
