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
from pallas_kernels.paged_attention.splits import Parts, num_splits
from pallas_kernels.paged_attention.triton_combine import combine

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
    k, v, loaded = blocks.ring_types(o, dtype, o.values)
    alone = splits == 1 and sinks is None
    queries = q.astype(dtype)
    if alone and _share_tiles(q, o.values):
        queries = queries.reshape(slots, -1, head_dim)
    else:
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    per_row = jax.ShapeDtypeStruct(
        (slots, kv_heads, splits, ROWS * (heads // kv_heads)), jnp.float32
    )
    of_parts = (slots, kv_heads, splits, group, head_dim)
    values = jax.ShapeDtypeStruct(of_parts, q.dtype if alone else jnp.float32)
    found = blocks.kernel(
        functools.partial(_kernel, o, heads // kv_heads, splits),
        interpret,
        kernel_name="paged_attention_mosaic",
        grid=(slots, heads, splits, halves),
        grid_names=("slot", "head", "split", "half"),
        out_type=[values] if alone else [values, per_row, per_row],
        scratch_types=[
            blocks.tiled(o, dtype, ROWS, head_dim),
            blocks.tiled(o, dtype, ROWS, keys),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            # The result takes the place of keys and values when they have been read.
            plgpu.RefUnion((k, v), plgpu.SMEM((ROWS, o.values), values.dtype)),
            loaded,
        ],
    )(queries, k_pool, v_pool, page_table, kv_lens)
    if alone:
        return found[0].reshape(q.shape)
    values, top, total = found
    how: dict[str, Any] = {"group": group, "dtype": q.dtype, "interpret": interpret}
    return combine(Parts(top, total, values), kv_lens, sinks, None, **how)


def _share_tiles(q: Float[Array, "S KV G hd"], values: int) -> bool:
    """Whether heads of several keys lie in each tile that TMA copies, and results of each, which
    are rows of `values`, where TMA may begin to copy them back."""
    _, kv_heads, group, _ = q.shape
    aligned = values * q.dtype.itemsize % blocks.ALIGNED == 0
    return blocks.TILE % group == 0 and kv_heads * group % blocks.TILE == 0 and aligned


def _kernel(
    o: Options,
    row_blocks: int,
    splits: int,
    q_ref: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    lens: Any,
    *refs: Any,
) -> None:
    values_ref, *per_row = refs[:-6]  # the maxima and sums of parts, if they are to be combined
    q, p, found, q_loaded, pages_or_out, loaded = refs[-6:]
    slot, split = lax.axis_index("slot"), lax.axis_index("split")
    program = lax.axis_index("head")
    head, part = lax.div(program, jnp.int32(row_blocks)), lax.rem(program, jnp.int32(row_blocks))
    length = lens[slot]
    (k, v), out = pages_or_out
    half = lax.axis_index("half")
    dims = pl.ds(pl.multiple_of(half * o.values, o.values), o.values)
    mine, begins = _own_queries(q_ref, slot, head, part, values_ref.shape[3])
    store = functools.partial(_store, out, values_ref.at[slot, head, split], part, begins, dims)

    @pl.when(length > 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(mine, q.at[pl.ds(0, mine.shape[0])], q_loaded)
        first = jnp.int32(0) if o.window is None else jnp.maximum(length - o.window, 0)
        begin, end = (
            lax.div(first, jnp.int32(o.keys)),
            lax.div(length + o.keys - 1, jnp.int32(o.keys)),
        )
        share = lax.div(end - begin + splits - 1, jnp.int32(splits))
        begin = begin + split * share
        end = jnp.minimum(begin + share, end)
        source = Source(k_pool, v_pool, table, slot, head, dims, first, length)

        def visible(block: Any) -> Any:
            keys = blocks.keys_of(o, block)
            return keys < length if o.window is None else (keys < length) & (keys >= first)

        plgpu.barrier_wait(q_loaded)
        ring = Ring(k, v, loaded)
        state = blocks.attend(o, source, ring, q, p, (begin, end), visible)
        if not per_row:
            blocks.finish(o, state, None, out)
            store()
            return
        top, total, out[...] = state
        found[0] = top / blocks.LOG2E
        found[1] = total
        plgpu.commit_smem()

        @pl.when(half == 0)
        def _() -> None:
            for i, ref in enumerate(per_row):
                place = ref.at[slot, head, split, pl.ds(part * ROWS, ROWS)]
                plgpu.copy_smem_to_gmem(found.at[i], place)

        store()

    if not per_row:

        @pl.when(length <= 0)
        def _() -> None:
            nothing = jnp.zeros((ROWS, o.values), out.dtype)
            out[...] = plgpu.layout_cast(nothing, blocks.LAYOUT)
            plgpu.commit_smem()
            store()


def _own_queries(q_ref: Any, slot: Any, head: Any, part: Any, group: int) -> tuple[Any, Any]:
    """Whole tiles with the queries of a key's head, and the row of the first one in them."""
    if len(q_ref.shape) == 4:
        rows = min(ROWS, q_ref.shape[2])
        return q_ref.at[slot, head, pl.ds(part * ROWS, rows)], 0
    first = head * group
    begins = lax.rem(first, jnp.int32(blocks.TILE))
    tile = pl.multiple_of(first - begins, blocks.TILE)
    return q_ref.at[slot, pl.ds(tile, blocks.TILE)], begins


def _store(out: Any, values_ref: Any, part: Any, begins: Any, dims: Any) -> None:
    """A block of rows to where they belong: of the last one, those that there are."""
    for i in range(pl.cdiv(values_ref.shape[0], ROWS)):
        rows = min(ROWS, values_ref.shape[0] - i * ROWS)

        @pl.when(part == i)
        def _(rows: int = rows, i: int = i) -> None:
            place = values_ref.at[pl.ds(i * ROWS, rows), dims]
            plgpu.copy_smem_to_gmem(out.at[pl.ds(begins, rows)], place)

    plgpu.wait_smem_to_gmem(0)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(paged_attention, static_argnames=("scale", "window", "soft_cap", "interpret"))
