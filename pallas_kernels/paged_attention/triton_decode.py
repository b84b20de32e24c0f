"""Decode attention for GPUs by Triton: one query token a row, split over the keys where rows and
heads alone cannot fill the device (flash-decoding, Dao et al. 2023).
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

from pallas_kernels import tuning
from pallas_kernels.paged_attention import triton_blocks as blocks
from pallas_kernels.paged_attention.splits import Parts, num_splits, project_values
from pallas_kernels.paged_attention.triton_blocks import Options, Pool
from pallas_kernels.paged_attention.triton_combine import combine
from pallas_kernels.tuning import Tiling

TUNED = "attention, decode, triton"  # its name in the table of measured sizes
WIDE = 256  # dimensions of a value from which on blocks are smaller


def paged_attention(
    q: Float[Array, "S KV G hd"],
    pool: Pool,
    page_table: Int[Array, "S W"],
    kv_lens: Int[Array, " S"],
    sinks: Float[Array, "KV G"] | None,
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    soft_cap: float | None,
    interpret: bool = False,
    tiling: Tiling | None = None,
    value_weights: Float[Array, "H out vd"] | None = None,
) -> Float[Array, "S KV G out"]:
    """See the package. Each row's keys are divided over as many programs as shapes alone say, so
    its result does not depend on its neighbours. `tiling` None: as `choose_tiling` says."""
    slots, kv_heads, group, head_dim = q.shape
    page_size = pool.k.shape[2]
    rows, keys, warps, stages, _ = tiling or choose_tiling(pool, group, value_dim, window)
    o = Options(head_dim, value_dim, page_size, group, rows, keys, scale, window, soft_cap)
    row_blocks, longest = pl.cdiv(group, rows), page_table.shape[1] * page_size
    heads = kv_heads * row_blocks
    splits = num_splits(slots * heads, longest if window is None else min(longest, window))
    shape = (slots, kv_heads, splits, group)
    whole = [jax.ShapeDtypeStruct((slots, kv_heads, group, value_dim), q.dtype)]
    split = [
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((*shape, value_dim), jnp.float32),
    ]
    alone = splits == 1
    optional = [*pool, sinks.astype(jnp.float32) if alone and sinks is not None else None]
    found = pl.pallas_call(
        functools.partial(_kernel, o, row_blocks, splits, tuple(x is not None for x in optional)),
        grid=(slots, heads, splits),
        out_shape=whole if alone else split,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="paged_attention",
    )(q, page_table, kv_lens, *(x for x in optional if x is not None))
    if alone:
        return found[0] if value_weights is None else project_values(found[0], value_weights)
    how: dict[str, Any] = {"group": group, "dtype": q.dtype, "interpret": interpret}
    return combine(Parts(*found), kv_lens, sinks, value_weights, **how)


def rule(group: int, value_dim: int, quantised: bool = False) -> Tiling:
    """Sizes where none were measured."""
    wide = value_dim >= WIDE
    most = 16 if wide else 32 if value_dim >= WIDE // 2 else 64
    rows = min(max(blocks.FEWEST, blocks.power_of_two(group)), most)
    # Registers hold quantised keys and values twice: those of a head in parts do not fit.
    few = wide or (quantised and len(blocks.parts(value_dim)) > 1)
    return Tiling(rows, 32 if few else 64, warps=4, stages=2)


def choose_tiling(pool: Pool, group: int, value_dim: int, window: int | None) -> Tiling:
    """The measured sizes for these shapes on the device at hand, else the rule's."""
    shape = blocks.shape_name(pool, group, value_dim, window)
    return tuning.choose(TUNED, shape, rule(group, value_dim, pool.k_scale is not None))


def _kernel(
    o: Options,
    row_blocks: int,
    splits: int,
    given: tuple[bool, ...],
    q_ref: Any,
    table: Any,
    lens: Any,
    *refs: Any,
) -> None:
    arrays, outs = iter(refs), refs[sum(given) :]
    *pages, sinks = (next(arrays) if there else None for there in given)
    pool = Pool(*pages)
    slot, split = pl.program_id(0), pl.program_id(2)
    head, part = pl.program_id(1) // row_blocks, pl.program_id(1) % row_blocks
    length = plgpu.load(lens.at[slot])
    rows = part * o.rows + jnp.arange(o.rows)
    real = rows < o.group
    q = blocks.load_queries(o, pool, lambda dims: q_ref.at[slot, head, rows[:, None], dims], real)
    first = 0 if o.window is None else jnp.maximum(length - o.window, 0)
    begin, end = first // o.keys, pl.cdiv(length, o.keys)
    share = pl.cdiv(end - begin, splits)
    begin = begin + split * share

    def seen(keys: Any) -> tuple[Any, Any]:
        exist = (keys >= first) & (keys < length)
        return exist, exist[None, :] & real[:, None]

    turn = functools.partial(blocks.attend_block, o, pool, table, slot, head, q)
    top, total, values = lax.fori_loop(
        begin,
        jnp.minimum(begin + share, end),
        lambda i, state: turn(i, seen, state),
        blocks.start_state(o),
    )
    if splits == 1:
        sink = None if sinks is None else plgpu.load(sinks.at[head, rows], mask=real, other=0.0)
        for dims, value in zip(blocks.parts(o.value_dim), _finished(top, total, values, sink)):
            where = outs[0].at[slot, head, rows[:, None], blocks.dims_of(dims)]
            plgpu.store(where, value.astype(outs[0].dtype), mask=real[:, None])
        return
    top_ref, total_ref, values_ref = outs
    live = real & (length > 0)  # nobody reads parts of a row of no length
    plgpu.store(top_ref.at[slot, head, split, rows], top, mask=live)
    plgpu.store(total_ref.at[slot, head, split, rows], total, mask=live)
    for dims, value in zip(blocks.parts(o.value_dim), values):
        where = values_ref.at[slot, head, split, rows[:, None], blocks.dims_of(dims)]
        plgpu.store(where, value, mask=live[:, None])


def _finished(top: Any, total: Any, values: Any, sink: Any) -> list[Any]:
    """Parts of the result of rows all of whose keys were seen; zero if there were none."""
    decay = jnp.ones_like(total)
    if sink is not None:
        raised = jnp.maximum(top, sink)
        decay = jnp.exp(top - raised)
        total = total * decay + jnp.exp(sink - raised)
    factor = (decay / jnp.where(total == 0, 1.0, total))[:, None]
    return [value * factor for value in values]  # NaN stays: the row failed


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(
    paged_attention,
    static_argnames=("scale", "value_dim", "window", "soft_cap", "interpret", "tiling"),
)
