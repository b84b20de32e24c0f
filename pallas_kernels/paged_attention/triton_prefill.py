"""Prefill attention for GPUs by Triton: a chunk of tiles, causal, over cached pages and itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tuning
from pallas_kernels.paged_attention import triton_blocks as blocks
from pallas_kernels.paged_attention.reference import TILE_ROWS
from pallas_kernels.paged_attention.triton_blocks import Options, Pool
from pallas_kernels.tuning import Tiling

TUNED = "attention, prefill, triton"  # its name in the table of measured sizes
# By dimensions of a value, at most: query rows and keys of a block, warps, and stages of the loop.
# The largest that no GPU spills registers for: see docs/kernels.md.
BLOCKS = ((128, 128, 64, 8, 2), (256, 64, 16, 8, 1), (1024, 32, 32, 8, 2))


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    pool: Pool,
    page_table: Int[Array, "N W"],
    tiles: Int[Array, "T 4"],
    sinks: Float[Array, "KV G"] | None,
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "C KV G vd"]:
    """See the package. A program computes some rows of one tile and key/value head; a row is one
    query head of one token. Rows of no tile are zero. `tiling` None: as `choose_tiling` says."""
    chunk, kv_heads, group, head_dim = q.shape
    rows, keys, warps, stages, _ = tiling or choose_tiling(pool, group, value_dim, window)
    page_size = pool.k.shape[2]
    o = Options(head_dim, value_dim, page_size, group, rows, keys, scale, window, soft_cap)
    arrays = [q, page_table, tiles]
    optional = [*pool, None if sinks is None else sinks.astype(jnp.float32)]
    arrays += [array for array in optional if array is not None]
    out = jnp.zeros((chunk, kv_heads, group, value_dim), q.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, o, tuple(array is not None for array in optional)),
        grid=(tiles.shape[0], kv_heads, pl.cdiv(TILE_ROWS * group, rows)),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(arrays): 0},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="paged_prefill",
    )(*arrays, out)


def rule(group: int, value_dim: int, window: int | None, quantised: bool) -> Tiling:
    """Sizes where none were measured."""
    most, keys, warps, stages = next(block for limit, *block in BLOCKS if value_dim <= limit)
    rows = min(blocks.power_of_two(TILE_ROWS * group), most)
    if quantised:  # registers hold quantised keys and values twice
        rows, keys = min(rows, 64), min(keys, 32)
    if window is not None:  # and masks of two sides
        keys = min(keys, 32)
        if quantised and value_dim <= 64:  # of which 8 warps would spill a few on A100 and L40
            warps = 4
    return Tiling(rows, keys, warps, stages)


def choose_tiling(pool: Pool, group: int, value_dim: int, window: int | None) -> Tiling:
    """The measured sizes for these shapes on the device at hand, else the rule's."""
    shape = blocks.shape_name(pool, group, value_dim, window)
    return tuning.choose(TUNED, shape, rule(group, value_dim, window, pool.k_scale is not None))


def _kernel(
    o: Options, given: tuple[bool, ...], q_ref: Any, table: Any, tiles: Any, *refs: Any
) -> None:
    arrays, out_ref = iter(refs[:-2]), refs[-1]
    *pages, sinks = (next(arrays) if there else None for there in given)
    pool = Pool(*pages)
    tile, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first, count, slot, position = (plgpu.load(tiles.at[tile, jnp.int32(i)]) for i in range(4))
    rows = part * o.rows + jnp.arange(o.rows)
    token, member = rows // o.group, rows % o.group
    real = token < count

    def at(ref: Any, dims: Any) -> Any:
        return ref.at[(first + token)[:, None], head, member[:, None], dims]

    q = blocks.load_queries(o, pool, functools.partial(at, q_ref), real)
    own = position + token  # what each row may see last
    lowest, highest = part * o.rows // o.group, (part * o.rows + o.rows - 1) // o.group
    end = jnp.where(lowest < count, position + jnp.minimum(count, highest + 1), 0)
    begin = 0 if o.window is None else jnp.maximum(position + lowest - o.window + 1, 0)

    def seen(keys: Any) -> tuple[Any, Any]:
        exist = (keys >= begin) & (keys < end)
        visible = exist[None, :] & real[:, None] & (keys[None, :] <= own[:, None])
        if o.window is not None:
            visible &= keys[None, :] > own[:, None] - o.window
        return exist, visible

    turn = functools.partial(blocks.attend_block, o, pool, table, slot, head, q)
    top, total, values = lax.fori_loop(
        begin // o.keys,
        pl.cdiv(end, o.keys),
        lambda i, state: turn(i, seen, state),
        blocks.start_state(o),
    )
    decay = jnp.ones_like(total)
    if sinks is not None:
        sink = plgpu.load(sinks.at[head, member])
        raised = jnp.maximum(top, sink)
        decay = jnp.exp(top - raised)
        total = total * decay + jnp.exp(sink - raised)
    factor = (decay / jnp.where(real, total, 1.0))[:, None]
    for dims, value in zip(blocks.parts(o.value_dim), values):
        out = (value * factor).astype(out_ref.dtype)
        plgpu.store(at(out_ref, blocks.dims_of(dims)), out, mask=real[:, None])


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(
    paged_prefill,
    static_argnames=("scale", "value_dim", "window", "soft_cap", "interpret", "tiling"),
)
