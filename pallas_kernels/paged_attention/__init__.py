"""Attention over a paged KV pool: one contract, several bodies, one dispatch.

The pool of a layer is two arrays [pages, kv_heads, page_size, head_dim]. A sequence's tokens lie in
the pages its row of the page table names, in order. Page 0 is the null page: padding reads and
writes there. Keys that a row must not see may be anything; values are finite in every page.

Latent attention (DeepSeek-V2, arXiv:2405.04434) has one array: its `v_pool` is None, and the
leading `value_dim` of a key is its value.

A quantised pool has int8 or float8 pages, and scales float32 [pages, kv_heads, page_size] of its
keys and of its values: what is stored of a token and head, times its scale, is its key or value.
Where XLA attends, float8_e4m3fn may be stored as its bits in uint8 (`quantised.py`).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.dispatch import MOST_ELEMENTS, Body, Implementation, out_of_reach
from pallas_kernels.paged_attention import (
    mosaic_decode,
    mosaic_prefill,
    reference,
    triton_blocks,
    triton_decode,
    triton_prefill,
    triton_write,
)
from pallas_kernels.paged_attention.dispatch import choose_body, hopper_takes
from pallas_kernels.paged_attention.rotary import Pairs, apply_rope
from pallas_kernels.paged_attention.splits import project_values
from pallas_kernels.paged_attention.write import write_kv, write_latent


def paged_attention(
    q: Float[Array, "S KV G hd"],
    k_pool: Num[Array, "P KV ps hd"],
    v_pool: Num[Array, "P KV ps vd"] | None,
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
    k_scale: Float[Array, "P KV ps"] | None = None,
    v_scale: Float[Array, "P KV ps"] | None = None,
    value_weights: Float[Array, "H out vd"] | None = None,
) -> Float[Array, "S KV G out"]:
    """Decode attention: one query token a row over its first `kv_lens` cached tokens.

    Softmax in float32. Rows with `kv_lens` 0 return zeros. With a `window`, a query sees so many
    tokens, itself included; `soft_cap` c makes scores c * tanh(score / c). `sinks` are scores of a
    key that every query sees and that has no value: a term of the softmax's denominator. `block` is
    how many keys the reference takes at once, by which a row's result differs in the last bits;
    None: what is fastest for as many rows. What a query head attended to goes through its matrix of
    `value_weights`, if there are any.
    """
    pool = _pool(k_pool, v_pool, value_dim, k_scale, v_scale, implementation)
    if not implementation.startswith("reference"):
        how = _options(implementation, scale, window, soft_cap)
        if pool.v is not None and _for_hopper(pool, implementation):
            where = (page_table, kv_lens, sinks)
            out = mosaic_decode.paged_attention(q, pool.k, pool.v, *where, **how)
            return out if value_weights is None else project_values(out, value_weights)
        pages = triton_blocks.Pool(pool.k, pool.v, pool.k_scale, pool.v_scale)
        how |= {"value_dim": pool.value_dim, "value_weights": value_weights}
        return triton_decode.paged_attention(q, pages, page_table, kv_lens, sinks, **how)
    dynamic, seen = implementation == "reference", reference.Seen(window, soft_cap, sinks)
    out = reference.paged_attention(q, pool, page_table, kv_lens, scale, seen, dynamic, block)
    return out if value_weights is None else project_values(out, value_weights)


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    k_pool: Num[Array, "P KV ps hd"],
    v_pool: Num[Array, "P KV ps vd"] | None,
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
    k_scale: Float[Array, "P KV ps"] | None = None,
    v_scale: Float[Array, "P KV ps"] | None = None,
) -> Float[Array, "C KV G vd"]:
    """Prefill attention of a ragged chunk, causal, over each piece's cached tokens and itself.

    A tile is (first row in q, rows, row of the page table, position of the first row): at most
    `TILE_ROWS` consecutive tokens of one sequence. Tiles are ordered by first row and cover every
    row that matters; tiles with 0 rows are padding and come last. The pool holds the chunk's own k
    and v already. `window`, `soft_cap`, `sinks` and `block` as for `paged_attention`.
    """
    pool = _pool(k_pool, v_pool, value_dim, k_scale, v_scale, implementation)
    if not implementation.startswith("reference"):
        how = _options(implementation, scale, window, soft_cap)
        if pool.v is not None and _for_hopper(pool, implementation, prefill=True):
            return mosaic_prefill.paged_prefill(q, pool.k, pool.v, page_table, tiles, sinks, **how)
        pages = triton_blocks.Pool(pool.k, pool.v, pool.k_scale, pool.v_scale)
        how |= {"value_dim": pool.value_dim}
        return triton_prefill.paged_prefill(q, pages, page_table, tiles, sinks, **how)
    dynamic, seen = implementation == "reference", reference.Seen(window, soft_cap, sinks)
    return reference.paged_prefill(q, pool, page_table, tiles, scale, seen, dynamic, block)


def rotate_and_write(
    q: Float[Array, "T KV G hd"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    pools: tuple[Array, ...],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    norms: tuple[Float[Array, " hd"], Float[Array, " hd"]] | None = None,
    *,
    pairs: Pairs,
    implementation: Implementation,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T KV G hd"], tuple[Array, ...]]:
    """The queries, rotated by `apply_rope`, and the pools after `write_kv` of rotated keys.

    `rotary` are cosines and sines of each token; `pools` are k_pool, v_pool and, of quantised ones,
    k_scale, v_scale. They are updated in place when they are donated. `norms`, which kernels alone
    take, are weights, `norm_offset` too small, of root-mean-square norms of queries and of keys,
    before they are rotated; numbers are rounded to their dtype after the norm too.
    """
    if not implementation.startswith("reference"):
        _check_reach(pools[0])
        # One array again: the compiler finds that these are parts of one, and moves nothing.
        qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
        where, interpret = (pages, offsets), implementation.endswith("_interpreted")
        how = triton_write.Heads(pairs, eps, norm_offset)
        return triton_write.rotate_and_write(
            qkv, rotary, pools, *where, norms, how=how, interpret=interpret
        )
    if norms is not None:
        raise ValueError("norms are given to kernels only; norm queries and keys before")
    qk = jnp.concatenate([q, k[:, :, None]], axis=2)
    flat = qk.reshape(q.shape[0], -1, q.shape[3])
    qk = apply_rope(flat, *rotary, pairs).reshape(qk.shape)
    stored = write_kv(pools, pages, offsets, qk[:, :, -1], v)
    return qk[:, :, :-1], stored


def _pool(
    k_pool: Array,
    v_pool: Array | None,
    value_dim: int | None,
    k_scale: Array | None,
    v_scale: Array | None,
    implementation: Implementation,
) -> reference.Pool:
    """Raises ValueError for arrays that do not go together."""
    if (v_pool is None) == (value_dim is None):
        raise ValueError("attention takes either v_pool or the value_dim of keys")
    if (k_scale is None) != (v_scale is None) or (v_pool is None and k_scale is not None):
        raise ValueError("attention takes both k_scale and v_scale of pools apart, or neither")
    if k_scale is None and jnp.issubdtype(k_pool.dtype, jnp.integer):
        raise ValueError(f"pages of {k_pool.dtype} need k_scale and v_scale")
    if k_pool.dtype == jnp.uint8 and not implementation.startswith("reference"):
        raise ValueError(f"pages of uint8 are read by XLA only, not by {implementation}")
    if not implementation.startswith("reference"):
        _check_reach(k_pool)
    width = v_pool.shape[3] if v_pool is not None else value_dim
    assert width is not None
    return reference.Pool(k_pool, v_pool, width, k_scale, v_scale)


def _check_reach(pages: Array) -> None:
    """Raises ValueError for pages of which kernels would miss some."""
    if out_of_reach(pages.size, pages.dtype.itemsize):
        most = MOST_ELEMENTS // math.prod(pages.shape[1:])
        raise ValueError(
            f"kernels do not reach all of {pages.shape[0]} pages of {pages.dtype.name} with "
            f"{pages.size} elements; take {most} pages at most"
        )


def _for_hopper(
    pool: reference.Pool, implementation: Implementation, prefill: bool = False
) -> bool:
    shape = pool.k.shape[3], pool.value_dim, pool.page_size
    known = hopper_takes(*shape, pool.k.dtype.name, prefill=prefill)
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
    "Pairs",
    "apply_rope",
    "choose_body",
    "paged_attention",
    "paged_prefill",
    "project_values",
    "rotate_and_write",
    "write_kv",
    "write_latent",
]
