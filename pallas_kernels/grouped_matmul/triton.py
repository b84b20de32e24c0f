"""Grouped products for GPUs by Triton: as much work as there are rows, planned on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.grouped_matmul.triton_tiles import tile_table
from pallas_kernels.quantised_matmul.triton_product import (
    Options,
    Refs,
    block_sizes,
    load,
    options,
    product,
    store,
    stored,
)
from pallas_kernels.quantised_matmul.triton_rounding import rounded
from pallas_kernels.quantised_matmul.weight import QuantisedWeight


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: QuantisedWeight | Num[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """See the package. A program computes a block of outputs for one tile of an expert's rows."""
    kind, arrays = stored(weights)
    experts, outputs, columns = weights.shape
    taken = rounded(x, kind.activations, interpret=interpret)
    count, dtype = taken.values.shape[0], x.dtype if taken.terms == 1 else jnp.float32
    rows, width, warps, stages = block_sizes(count // experts, taken.values.dtype)
    o = options(kind, columns, rows, width)
    tiles = tile_table(group_sizes * taken.terms, count, rows, interpret=interpret)
    scales = () if taken.scales is None else (taken.scales,)
    out = pl.pallas_call(
        functools.partial(_kernel, o, len(arrays)),
        grid=(tiles.shape[0], pl.cdiv(outputs, width)),
        out_shape=jax.ShapeDtypeStruct((count, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="grouped_matmul",
    )(tiles, taken.values, *arrays, *scales)
    return taken.total(out).astype(x.dtype)


def _kernel(o: Options, weights: int, tiles: Any, x: Any, *refs: Any) -> None:
    weight, x_scales, out = Refs(*refs[:weights]), refs[weights:-1], refs[-1]
    tile = pl.program_id(0)
    expert, first, count = (plgpu.load(tiles.at[tile, jnp.int32(i)]) for i in range(3))
    member = jnp.arange(o.rows)
    rows, real = first + member, member < count
    outputs = pl.program_id(1) * o.outputs + jnp.arange(o.outputs)
    inside = outputs < out.shape[1] if out.shape[1] % o.outputs else None
    # Tiles without rows, and rows of no expert, which are zero, read no weights.
    known = expert < weight.values.shape[0]
    turns, none = jnp.int32(x.shape[1] // o.columns), jnp.int32(0)
    end = jnp.where((count > 0) & known, turns, none)
    expert = jnp.where(known, expert, 0)
    total = product(o, x, weight, expert, rows, real, outputs, inside, none, end)
    if x_scales:
        total = total * load(x_scales[0].at[rows], real & known)[None, :]
    store(out.at[rows[None, :], outputs[:, None]], total, real, inside)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(grouped_matmul, static_argnames=("interpret",))
