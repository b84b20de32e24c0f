"""New keys and values into the pages, in plain jax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.quantised import as_stored, meant, quantise


def write_kv(
    pools: tuple[Num[Array, "P KV ps ..."], ...],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"],
) -> tuple[Num[Array, "P KV ps ..."], ...]:
    """Store one token a row at (page, offset), in place when the pools are donated.

    `pools` are k_pool, v_pool and, if those are quantised, k_scale, v_scale: then a token's key or
    value in a head is stored as numbers whose largest is the largest of the pages' dtype.

    Several padding rows may hit the null page, so the indices are not promised to be unique.

    Values in the pool are always finite: attention drops masked keys by selection, but masked
    values by a weight of 0, and 0 * NaN would reach whoever uses the page next. Where a value is
    not finite its key gets a NaN, or its key's scale where there is one, which reaches all that
    attend to it and nobody else.
    """

    def put(pool: Array, rows: Array) -> Array:
        return pool.at[pages, :, offsets].set(rows, mode="promise_in_bounds")

    k_pool, v_pool, *scales = pools
    if not scales:
        k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
        finite = jnp.isfinite(v)  # elementwise: a reduction over the head would not fuse
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        return put(k_pool, k), put(v_pool, v)
    finite = (jnp.isfinite(k) & jnp.isfinite(v)).all(-1)
    k_numbers, k_scales = quantise(jnp.where(jnp.isfinite(k), k, 0), meant(k_pool.dtype))
    v_numbers, v_scales = quantise(jnp.where(jnp.isfinite(v), v, 0), meant(v_pool.dtype))
    k_scales = jnp.where(finite, k_scales, jnp.nan)
    k, v = as_stored(k_numbers, k_pool.dtype), as_stored(v_numbers, v_pool.dtype)
    rows = (k, v, k_scales, v_scales)
    return tuple(put(pool, new) for pool, new in zip(pools, rows, strict=True))


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
