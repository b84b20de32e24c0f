"""Decode attention for GPUs of compute capability 9.0 by Mosaic: one query token a row, its heads
in the rows of a wgmma, split over the keys as the Triton kernel does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import mosaic_blocks as blocks
from pallas_kernels.paged_attention.mosaic_blocks import ROWS, Options, Ring, Source
from pallas_kernels.paged_attention.splits import combine, num_splits

STAGES = 2


def paged_attention(
    q: Float[Array, "S KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps hd"],
    page_table: Int[Array, "S W"],
    kv_lens: Int[Array, " S"],
    sinks: Float[Array, "KV G"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float[Array, "S KV G hd"]:
    """See the package. Each row's keys are divided over as many programs as shapes alone say, so
    its result does not depend on its neighbours."""
    slots, kv_heads, group, head_dim = q.shape
    page_size, longest = k_pool.shape[2], page_table.shape[1] * k_pool.shape[2]
    keys, halves = (32, 2) if head_dim > blocks.WIDE else (64, 1)
    o = Options(head_dim, head_dim // halves, page_size, keys, STAGES, scale, window, soft_cap)
    rows = pl.cdiv(group, blocks.TILE) * blocks.TILE  # TMA copies whole tiles
    if rows > ROWS:
        rows = pl.cdiv(group, ROWS) * ROWS
    heads = kv_heads * pl.cdiv(rows, ROWS)
    splits = num_splits(slots * heads, longest if window is None else min(longest, window))
    dtype = k_pool.dtype
    q = jnp.pad(q.astype(dtype), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    k, v, loaded = blocks.ring_types(o, dtype, o.values)
    per_row = jax.ShapeDtypeStruct((slots, heads, splits, ROWS), jnp.float32)
    top, total, values = blocks.kernel(
        functools.partial(_kernel, o, heads // kv_heads, splits),
        interpret,
        kernel_name="paged_attention_mosaic",
        grid=(slots, heads, splits, halves),
        grid_names=("slot", "head", "split", "half"),
        out_type=[
            per_row,
            per_row,
            jax.ShapeDtypeStruct((slots, kv_heads, splits, rows, head_dim), jnp.float32),
        ],
        scratch_types=[
            blocks.tiled(o, dtype, ROWS, head_dim),
            blocks.tiled(o, dtype, ROWS, keys),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            # The result takes the place of keys and values when they have been read.
            plgpu.RefUnion((k, v), plgpu.SMEM((ROWS, o.values), jnp.float32)),
            loaded,
        ],
    )(q, k_pool, v_pool, page_table, kv_lens)

    def by_query(found: Float[Array, "S H N R"]) -> Float[Array, "S KV G N"]:
        shape = (slots, kv_heads, heads // kv_heads, splits, ROWS)
        found = jnp.moveaxis(found.reshape(shape), 3, -1)
        return found.reshape(slots, kv_heads, -1, splits)[:, :, :group]

    values = jnp.swapaxes(values[:, :, :, :group], 2, 3)
    return combine(by_query(top), by_query(total), values, sinks, kv_lens, q.dtype)


def _kernel(
    o: Options,
    row_blocks: int,
    splits: int,
    q_ref: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    lens: Any,
    top_ref: Any,
    total_ref: Any,
    values_ref: Any,
    q: Any,
    p: Any,
    found: Any,
    q_loaded: Any,
    pages_or_out: Any,
    loaded: Any,
) -> None:
    slot, split = lax.axis_index("slot"), lax.axis_index("split")
    program = lax.axis_index("head")
    head, part = lax.div(program, jnp.int32(row_blocks)), lax.rem(program, jnp.int32(row_blocks))
    length = lens[slot]
    rows = min(ROWS, values_ref.shape[3])
    (k, v), out = pages_or_out

    @pl.when(length > 0)
    def _() -> None:
        mine = q_ref.at[slot, head, pl.ds(part * ROWS, rows)]
        plgpu.copy_gmem_to_smem(mine, q.at[pl.ds(0, rows)], q_loaded)
        first = jnp.int32(0) if o.window is None else jnp.maximum(length - o.window, 0)
        begin, end = (
            lax.div(first, jnp.int32(o.keys)),
            lax.div(length + o.keys - 1, jnp.int32(o.keys)),
        )
        share = lax.div(end - begin + splits - 1, jnp.int32(splits))
        begin = begin + split * share
        end = jnp.minimum(begin + share, end)
        half = lax.axis_index("half")
        dims = pl.ds(pl.multiple_of(half * o.values, o.values), o.values)
        source = Source(k_pool, v_pool, table, slot, head, dims, first, length)

        def visible(block: Any) -> Any:
            keys = blocks.keys_of(o, block)
            return keys < length if o.window is None else (keys < length) & (keys >= first)

        plgpu.barrier_wait(q_loaded)
        ring = Ring(k, v, loaded)
        top, total, values = blocks.attend(o, source, ring, q, p, (begin, end), visible)
        found[0] = top / blocks.LOG2E
        found[1] = total
        out[...] = values
        plgpu.commit_smem()

        @pl.when(half == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(found.at[0], top_ref.at[slot, program, split])
            plgpu.copy_smem_to_gmem(found.at[1], total_ref.at[slot, program, split])

        place = values_ref.at[slot, head, split, pl.ds(part * ROWS, rows), dims]
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, rows)], place)
        plgpu.wait_smem_to_gmem(0)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(paged_attention, static_argnames=("scale", "window", "soft_cap", "interpret"))
