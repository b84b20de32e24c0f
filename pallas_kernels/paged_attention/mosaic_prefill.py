"""Prefill attention for GPUs of compute capability 9.0 by Mosaic: a chunk of tiles, causal, over
cached pages and itself. One warpgroup fetches pages for two that multiply, as FlashAttention-3 does
(Shah et al. 2024, arXiv:2407.08608).
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
from pallas_kernels.paged_attention.reference import TILE_ROWS

STAGES = 2
KEYS = ((128, 64), (192, 64), (256, 32))  # of a block, by dimensions of a head at most
# Of a thread, where two warpgroups multiply: 512 are all that three warpgroups can have.
REGISTERS_TO_MULTIPLY, REGISTERS_TO_FETCH = 224, 56

assert TILE_ROWS == ROWS


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    k_pool: Float[Array, "P KV ps hd"],
    v_pool: Float[Array, "P KV ps hd"],
    page_table: Int[Array, "N W"],
    tiles: Int[Array, "T 4"],
    sinks: Float[Array, "KV G"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float[Array, "C KV G hd"]:
    """See the package. A program computes one tile for one or two query heads of a key/value head,
    a warpgroup each. Rows of no tile are zero."""
    chunk, kv_heads, group, head_dim = q.shape
    page_size, dtype = k_pool.shape[2], k_pool.dtype
    keys = next(keys for limit, keys in KEYS if head_dim <= limit)
    halves = 1 + (head_dim > blocks.WIDE)
    o = Options(head_dim, head_dim // halves, page_size, keys, STAGES, scale, window, soft_cap)
    together = max(halves, 1 + (group % 2 == 0))  # warpgroups that multiply
    heads = together // halves  # of queries
    padded = max(0, ROWS - chunk)  # a tile is copied whole
    queries = jnp.pad(q.astype(dtype).reshape(chunk, -1), ((0, padded), (0, 0)))
    out = jax.new_ref(jnp.zeros(queries.shape, q.dtype))
    given = [] if sinks is None else [sinks.astype(jnp.float32)]
    blocks.kernel(
        functools.partial(_kernel, o, group, halves, sinks is not None),
        interpret,
        kernel_name="paged_prefill_mosaic",
        grid=(tiles.shape[0], kv_heads, group // heads),
        grid_names=("tile", "head", "members"),
        num_threads=together + 1,
        thread_name="warpgroup",
        out_type=[],
        scratch_types=[
            blocks.tiled(o, dtype, together, ROWS, head_dim),
            blocks.tiled(o, dtype, together, ROWS, keys),
            plgpu.SMEM((together, ROWS, o.values), q.dtype),
            plgpu.Barrier(num_arrivals=together, num_barriers=STAGES),
            *blocks.ring_types(o, dtype, head_dim),
        ],
    )(queries, k_pool, v_pool, page_table, tiles, *given, out)
    return out[...][:chunk].reshape(q.shape)


def _kernel(
    o: Options,
    group: int,
    halves: int,
    with_sinks: bool,
    q_ref: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    tiles: Any,
    *refs: Any,
) -> None:
    sinks, refs = (refs[0], refs[1:]) if with_sinks else (None, refs)
    out_ref, q, p, out, consumed, *ring = refs
    together = q.shape[0]
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    warpgroup = lax.axis_index("warpgroup")
    first, count, row, position = (tiles[tile, i] for i in range(4))
    begin = jnp.int32(0) if o.window is None else jnp.maximum(position - o.window + 1, 0)
    end = position + count
    span = lax.div(begin, jnp.int32(o.keys)), lax.div(end + o.keys - 1, jnp.int32(o.keys))

    @pl.when((count > 0) & (warpgroup == together))
    def _() -> None:
        if together == 2:
            plgpu.set_max_registers(REGISTERS_TO_FETCH, action="decrease")
        source = Source(k_pool, v_pool, table, row, head, slice(None), begin, end)
        blocks.feed(o, source, Ring(*ring), consumed, span)

    @pl.when((count > 0) & (warpgroup < together))
    def _() -> None:
        if together == 2:
            plgpu.set_max_registers(REGISTERS_TO_MULTIPLY, action="increase")
        heads = together // halves
        member = lax.axis_index("members") * heads + lax.div(warpgroup, jnp.int32(halves))
        begins = pl.multiple_of((head * group + member) * o.head_dim, o.head_dim)
        half = pl.multiple_of(lax.rem(warpgroup, jnp.int32(halves)) * o.values, o.values)
        start = jnp.minimum(first, q_ref.shape[0] - ROWS)  # what is copied ends with the chunk
        before = first - start  # rows of other tiles
        # TMA copies rows from multiples of a tile's only, so these go through registers.
        rows = q_ref.at[pl.ds(start, ROWS), pl.ds(begins, o.head_dim)]
        mine = q.at[warpgroup]
        mine[...] = plgpu.load(rows, layout=blocks.LAYOUT, optimized=False)
        plgpu.commit_smem()

        def visible(block: Any) -> Any:
            keys = blocks.keys_of(o, block)
            own = plgpu.broadcasted_iota(jnp.int32, keys.shape, 0, layout=blocks.LAYOUT)
            own = own + (position - before)
            seen = keys <= own
            return seen if o.window is None else seen & (keys > own - o.window)

        weights = p.at[warpgroup]
        values = pl.ds(half, o.values) if halves > 1 else slice(None)
        state = blocks.attend_fed(o, Ring(*ring), consumed, mine, weights, values, span, visible)
        sink = None if sinks is None else sinks[head, member]
        blocks.finish(o, state, sink, out.at[warpgroup])
        dims = pl.ds(pl.multiple_of(begins + half, o.values), o.values)
        _store(out.at[warpgroup], out_ref, (first, before, count), dims)


def _store(out: Any, out_ref: Any, rows: tuple[Any, Any, Any], dims: Any) -> None:
    """The rows of the tile, which may be fewer than were computed, to where they belong."""
    first, before, count = rows

    @pl.when(count == ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(out, out_ref.at[pl.ds(first, ROWS), dims])

    @pl.when(count < ROWS)
    def _() -> None:
        def copy(row: Any, _: None) -> None:
            one = out.at[pl.ds(before + row, 1)]
            plgpu.copy_smem_to_gmem(one, out_ref.at[pl.ds(first + row, 1), dims])

        lax.fori_loop(0, count, copy, None)

    plgpu.wait_smem_to_gmem(0)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(paged_prefill, static_argnames=("scale", "window", "soft_cap", "interpret"))
