"""Products with quantised weights for GPUs by Triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Num

from pallas_kernels.quantised_matmul.activations import Rounded
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

DECODE_ROWS = 64  # up to so many, columns are split over several programs
MOST_SPLITS = 8
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
SPLIT_TURNS = 16  # turns of the loop that are worth a program of their own, and adding its sums


def quantised_matmul(
    x: Float[Array, "M K"],
    weight: QuantisedWeight | Num[Array, "N K"],
    *,
    out_dtype: Any,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """See the package. Columns are divided over as many programs as shapes alone say, and their
    sums added in order, so a row's result does not depend on its neighbours."""
    taken, out = _launch(x, weight, out_dtype, splits, interpret)
    if out.shape[0] == taken.terms == 1:
        return out[0]
    return taken.total(out.sum(axis=0)).astype(out_dtype)


def matmul_in_parts(
    x: Float[Array, "M K"],
    weight: QuantisedWeight | Num[Array, "N K"],
    *,
    interpret: bool = False,
) -> Float[Array, "P M N"]:
    """See the package."""
    taken, out = _launch(x, weight, jnp.float32, None, interpret)
    return out.reshape(-1, x.shape[0], taken.terms, out.shape[2]).sum(axis=2)


def _launch(
    x: Float[Array, "M K"],
    weight: QuantisedWeight | Num[Array, "N K"],
    out_dtype: Any,
    splits: int | None,
    interpret: bool,
) -> tuple[Rounded, Float[Array, "P R N"]]:
    """x as it was taken, and what the programs that share the columns found."""
    kind, arrays = stored(weight)
    outputs, columns = weight.shape
    decode, order = x.shape[0] <= DECODE_ROWS, getattr(weight, "order", None)
    taken = rounded(x, kind.activations, order, interpret=interpret)
    count = taken.values.shape[0]
    rows, width, warps, stages = block_sizes(count, taken.values.dtype)
    o = options(kind, columns, rows, width)
    grid = (pl.cdiv(count, rows), pl.cdiv(outputs, width))
    if splits is None:
        splits = num_splits(grid[1], columns // o.columns) if decode else 1
    dtype = out_dtype if splits == taken.terms == 1 else jnp.float32
    scales = () if taken.scales is None else (taken.scales,)
    out = pl.pallas_call(
        functools.partial(_kernel, o, splits, len(arrays)),
        grid=(*grid, splits),
        out_shape=jax.ShapeDtypeStruct((splits, count, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="quantised_matmul",
    )(taken.values, *(array[None] for array in arrays), *scales)
    return taken, out


def num_splits(programs: int, turns: int) -> int:
    """Programs that share the columns: enough to fill a device, none for few columns."""
    return max(1, min(pl.cdiv(WANTED_PROGRAMS, programs), MOST_SPLITS, turns // SPLIT_TURNS))


def _kernel(o: Options, splits: int, weights: int, x: Any, *refs: Any) -> None:
    weight, x_scales, out = Refs(*refs[:weights]), refs[weights:-1], refs[-1]
    rows = pl.program_id(0) * o.rows + jnp.arange(o.rows)
    outputs = pl.program_id(1) * o.outputs + jnp.arange(o.outputs)
    split = pl.program_id(2)
    real = rows < x.shape[0] if x.shape[0] % o.rows else None
    inside = outputs < out.shape[2] if out.shape[2] % o.outputs else None
    turns = x.shape[1] // o.columns
    share = pl.cdiv(turns, splits)
    begin, end = split * share, jnp.minimum((split + 1) * share, turns)
    total = product(o, x, weight, 0, rows, real, outputs, inside, begin, end)
    if x_scales:
        total = total * load(x_scales[0].at[rows], real)[None, :]
    store(out.at[split, rows[None, :], outputs[:, None]], total, real, inside)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(quantised_matmul, static_argnames=("out_dtype", "splits", "interpret"))
