"""Products with quantised weights for GPUs by Triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul.activations import rounded
from pallas_kernels.quantised_matmul.triton_product import (
    Options,
    Refs,
    load,
    options,
    product,
    store,
)
from pallas_kernels.quantised_matmul.weight import QuantisedWeight

# Rows of x, at most: rows and outputs of a block, warps, and stages of the loop.
BLOCKS = ((16, 16, 64, 4, 4), (32, 32, 64, 4, 4), (64, 64, 64, 4, 3), (1 << 31, 128, 128, 8, 3))
DECODE_ROWS = 64  # up to so many, columns are split over several programs
MOST_SPLITS = 8
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
SPLIT_TURNS = 8  # turns of the loop that are worth a program of their own


def quantised_matmul(
    x: Float[Array, "M K"], weight: QuantisedWeight, *, out_dtype: Any, interpret: bool = False
) -> Float[Array, "M N"]:
    """See the package. Columns are divided over as many programs as shapes alone say, and their
    sums added in order, so a row's result does not depend on its neighbours."""
    outputs, columns = weight.shape
    decode = x.shape[0] <= DECODE_ROWS
    taken = rounded(x if weight.order is None else x[:, weight.order], weight.activations)
    count = taken.values.shape[0]
    rows, width, warps, stages = next(block for most, *block in BLOCKS if count <= most)
    o = options(weight.bits, columns, weight.block, rows, width)
    grid = (pl.cdiv(count, rows), pl.cdiv(outputs, width))
    splits = num_splits(grid[1], columns // o.columns) if decode else 1
    plain = splits == taken.terms == 1
    dtype = out_dtype if plain else jnp.float32
    given = [array for array in (weight.scales, weight.zeros) if array is not None]
    arrays = [taken.values, weight.values[None], *(array[None] for array in given)]
    if taken.scales is not None:
        arrays.append(taken.scales)
    out = pl.pallas_call(
        functools.partial(_kernel, o, splits, weight.zeros is not None, taken.scales is not None),
        grid=(*grid, splits),
        out_shape=jax.ShapeDtypeStruct((splits, count, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="quantised_matmul",
    )(*arrays)
    return out[0] if plain else taken.total(out.sum(axis=0)).astype(out_dtype)


def num_splits(programs: int, turns: int) -> int:
    """Programs that share the columns: enough to fill a device, none for few columns."""
    return max(1, min(pl.cdiv(WANTED_PROGRAMS, programs), MOST_SPLITS, turns // SPLIT_TURNS))


def _kernel(o: Options, splits: int, with_zeros: bool, x_scaled: bool, x: Any, *refs: Any) -> None:
    weights, x_scales, out = refs[: 2 + with_zeros], refs[-2], refs[-1]
    rows = pl.program_id(0) * o.rows + jnp.arange(o.rows)
    outputs = pl.program_id(1) * o.outputs + jnp.arange(o.outputs)
    split = pl.program_id(2)
    real = rows < x.shape[0] if x.shape[0] % o.rows else None
    inside = outputs < out.shape[2] if out.shape[2] % o.outputs else None
    turns = x.shape[1] // o.columns
    share = pl.cdiv(turns, splits)
    begin, end = split * share, jnp.minimum((split + 1) * share, turns)
    total = product(o, x, Refs(*weights), 0, rows, real, outputs, inside, begin, end)
    if x_scaled:
        total = total * load(x_scales.at[rows], real)[None, :]
    store(out.at[split, rows[None, :], outputs[:, None]], total, real, inside)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(quantised_matmul, static_argnames=("out_dtype", "interpret"))
