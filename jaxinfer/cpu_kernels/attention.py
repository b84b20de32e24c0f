"""Attention over pages, read where they lie: as `pallas_kernels.paged_attention` has it.

What a row's result is made of, and in which order, follows from its own position alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jaxinfer.cpu_kernels import xla_call
from jaxinfer.cpu_kernels.decode import decode_piece, pieces
from jaxinfer.cpu_kernels.emit import Emitter
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.prefill import prefill_tile, tiles_for
from jaxinfer.cpu_kernels.softmax import MASKED
from jaxinfer.cpu_kernels.xla_call import Buffer

DECODE_RANKS = (4, 4, 4, 2, 1, 1, 2, 4)  # of `decode_piece`'s buffers
PREFILL_RANKS = (4, 4, 4, 2, 2, 1, 2, 4, 4)  # of `prefill_tile`'s


def paged_attention(
    q: Float[Array, "S KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps vd"],
    page_table: Int[Array, "S W"],
    kv_lens: Int[Array, " S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "KV G"] | None = None,
) -> Float[Array, "S KV G vd"]:
    """One query token a row over its first `kv_lens` cached tokens, where `Heads.taken`."""
    heads = _heads(q, k_pool, v_pool, soft_cap)
    first = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    result = jax.ShapeDtypeStruct((*q.shape[:3], heads.value_dim), jnp.float32)
    call = jax.ffi.ffi_call(register_decode(heads), result)
    queries, own = q.astype(jnp.float32) * scale, _sinks(sinks, q)
    return call(queries, k_pool, v_pool, page_table, first, kv_lens, own).astype(q.dtype)


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps vd"],
    page_table: Int[Array, "N W"],
    tiles: Int[Array, "T 4"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "KV G"] | None = None,
) -> Float[Array, "C KV G vd"]:
    """A ragged chunk, causal, over each piece's cached tokens and itself, where `Heads.taken`.

    Rows of no tile are zeros.
    """
    heads = _heads(q, k_pool, v_pool, soft_cap)
    result = jax.ShapeDtypeStruct((*q.shape[:3], heads.value_dim), jnp.float32)
    call = jax.ffi.ffi_call(register_prefill(heads), result, input_output_aliases={7: 0})
    queries, own = q.astype(jnp.float32) * scale, _sinks(sinks, q)
    seen = jnp.full(1, page_table.shape[1] * heads.page_size if window is None else window)
    out = jnp.zeros(result.shape, result.dtype)
    attended = call(queries, k_pool, v_pool, page_table, tiles, seen, own, out)
    return attended.astype(q.dtype)


def _heads(q: Array, k_pool: Array, v_pool: Array, soft_cap: float | None) -> Heads:
    sizes = (q.shape[2], q.shape[3], v_pool.shape[3], k_pool.shape[2])
    return Heads(*sizes, soft_cap or 0.0, k_pool.dtype.name)


def _sinks(sinks: Float[Array, "KV G"] | None, q: Array) -> Float[Array, "KV G"]:
    """Without any, such as take no share."""
    if sinks is None:
        return jnp.full(q.shape[1:3], MASKED, jnp.float32)
    return sinks.astype(jnp.float32)


def register_decode(heads: Heads) -> str:
    """Make the kernel for such heads known to XLA, which compiles it; its name there."""
    return _registered(heads, False)()


def register_prefill(heads: Heads) -> str:
    """Make the kernel for such heads known to XLA, which compiles it; its name there."""
    return _registered(heads, True)()


@functools.cache
def _registered(heads: Heads, prefill: bool) -> xla_call.Named:
    def tiles(e: Emitter, buffers: Sequence[Buffer]) -> ir.Value:
        """How many there are, of each group of heads that share keys."""
        return e.mul(buffers[4].shape[0], buffers[0].shape[1])

    @xla_call.once
    def register() -> str:
        kind = "prefill" if prefill else "decode"
        name, module = f"jaxinfer_{kind}_{heads.name}", ir.Module(kind)
        compute: xla_call.Compute = functools.partial(decode_piece, heads)
        if prefill:
            compute = functools.partial(prefill_tile, heads, tiles_for(module, heads))
        ranks, items = (PREFILL_RANKS, tiles) if prefill else (DECODE_RANKS, pieces)
        xla_call.register(name, module, ranks, 1, items, compute)
        return name

    return register
