"""Parts of a row's keys added, for GPUs by Triton: a program takes a block of rows of one head, and
some dimensions of its result.
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

from pallas_kernels.paged_attention.splits import Parts
from pallas_kernels.paged_attention.triton_blocks import FEWEST, MASKED, power_of_two

ROWS, OUTPUTS, WARPS = 16, 64, 4
MOST_DIMENSIONS = 64  # of values that are multiplied at once


def combine(
    parts: Parts,
    kv_lens: Int[Array, " S"],
    sinks: Float[Array, "KV G"] | None,
    value_weights: Float[Array, "H out vd"] | None,
    *,
    group: int,
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "S KV G out"]:
    """The parts of a row weighted by what each found; zero for a row of no length, whose parts are
    not read. Values, rounded to `dtype`, go through the `value_weights` of their head, if any."""
    slots, kv_heads, _, _, value_dim = parts.values.shape
    size = value_dim if value_weights is None else value_weights.shape[1]
    given = [] if sinks is None else [sinks.astype(jnp.float32)]
    given += [] if value_weights is None else [value_weights]
    body = functools.partial(_kernel, group, sinks is not None, value_weights is not None, dtype)
    return pl.pallas_call(
        body,
        grid=(kv_heads * group, pl.cdiv(slots, ROWS), pl.cdiv(size, OUTPUTS)),
        out_shape=jax.ShapeDtypeStruct((slots, kv_heads, group, size), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="combine_parts",
    )(*parts, kv_lens, *given)


def _kernel(
    group: int,
    with_sinks: bool,
    with_weights: bool,
    dtype: Any,
    top_ref: Any,
    total_ref: Any,
    values_ref: Any,
    lens: Any,
    *refs: Any,
) -> None:
    out, member = refs[-1], pl.program_id(0)
    head, own = member // group, member % group
    row = pl.program_id(1) * ROWS + jnp.arange(ROWS)
    real = row < out.shape[0]
    live = real & (plgpu.load(lens.at[row], mask=real, other=0) > 0)
    splits, value_dim = values_ref.shape[2], values_ref.shape[4]

    def found(ref: Any, part: int, other: float) -> Any:
        return plgpu.load(ref.at[row, head, part, own], mask=live, other=other)

    tops = [found(top_ref, part, MASKED) for part in range(splits)]
    highest = functools.reduce(jnp.maximum, tops)
    whole = jnp.zeros_like(highest)
    if with_sinks:
        sink = plgpu.load(refs[0].at[head, own])
        highest = jnp.maximum(highest, sink)
        whole += jnp.exp(sink - highest)
    shares = [jnp.exp(top - highest) for top in tops]
    whole += sum(share * found(total_ref, part, 0.0) for part, share in enumerate(shares))
    factor = 1 / jnp.where(whole == 0, 1.0, whole)  # NaN stays: the row failed

    def combined(dims: Any) -> Any:
        mask = live[:, None] & (dims < value_dim)[None, :]
        total = jnp.zeros(mask.shape, jnp.float32)
        for part, share in enumerate(shares):
            at = values_ref.at[row[:, None], head, part, own, dims[None, :]]
            total += share[:, None] * plgpu.load(at, mask=mask, other=0.0)
        return (total * factor[:, None]).astype(dtype)

    outputs = pl.program_id(2) * OUTPUTS + jnp.arange(OUTPUTS)
    inside = (outputs < out.shape[3])[None, :]
    if with_weights:
        size = min(MOST_DIMENSIONS, max(FEWEST, power_of_two(value_dim)))

        def turn(i: Any, result: Any) -> Any:
            dims = i * size + jnp.arange(size)
            at = refs[-2].at[member, outputs[:, None], dims[None, :]]
            mask = inside.T & (dims < value_dim)[None, :]
            matrix = plgpu.load(at, mask=mask, other=jnp.zeros((), dtype))
            return result + plgpu.dot(combined(dims), matrix, trans_b=True)

        start = jnp.zeros((ROWS, OUTPUTS), jnp.float32)
        result = lax.fori_loop(0, pl.cdiv(value_dim, size), turn, start)
    else:
        result = combined(outputs)
    place = out.at[row[:, None], head, own, outputs[None, :]]
    plgpu.store(place, result.astype(dtype), mask=real[:, None] & inside)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(combine, static_argnames=("group", "dtype", "interpret"))
