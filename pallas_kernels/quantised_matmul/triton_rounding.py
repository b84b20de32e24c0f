"""Rows of x rounded to 8 bits for GPUs by Triton, in one launch: a program takes one row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul.activations import LEAST_SCALE, PAIR, Rounded, most
from pallas_kernels.quantised_matmul.weight import Activations

COLUMNS, WARPS = 2048, 4
TO_NEAREST = 1.5 * 2.0**23  # added and taken away again, it leaves float32 no fraction


def rounded(
    x: Float[Array, "M K"],
    activations: Activations,
    order: Int[Array, " K"] | None = None,
    *,
    height: int = 1,
    interpret: bool = False,
) -> Rounded:
    """`activations.rounded` of x, its columns in that `order`. Where x is rounded there is room for
    a multiple of `height` rows; what is in those past x's may be anything."""
    if activations == "as_given":
        return Rounded(x if order is None else x[:, order])
    rows, columns = x.shape
    terms, dtype = 1 + (activations == "int8_pair"), jnp.int8
    if activations == "float8_e4m3fn":
        dtype = jnp.float8_e4m3fn
    room = pl.cdiv(rows, height) * height * terms
    out = [
        jax.ShapeDtypeStruct((room, columns), dtype),
        jax.ShapeDtypeStruct((room,), jnp.float32),
    ]
    values, scales = pl.pallas_call(
        functools.partial(_kernel, most(activations), terms, order is not None),
        grid=(rows,),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="rounded_rows",
    )(x, *([] if order is None else [order]))
    return Rounded(values, scales, terms)


def _kernel(largest: float, terms: int, ordered: bool, x: Any, *refs: Any) -> None:
    *order, values, scales = refs
    row, columns = pl.program_id(0), x.shape[1]
    size = min(COLUMNS, 1 << (columns - 1).bit_length())

    def load(block: Any) -> tuple[Any, Any, Any]:
        dims = block * size + jnp.arange(size)
        inside = dims < columns
        at = plgpu.load(order[0].at[dims], mask=inside, other=0) if ordered else dims
        return dims, inside, plgpu.load(x.at[row, at], mask=inside, other=0).astype(jnp.float32)

    def search(block: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        top, failed = found
        magnitude = jnp.abs(load(block)[2])
        finite = magnitude < jnp.inf
        top = jnp.maximum(top, jnp.where(finite, magnitude, 0.0))
        return top, jnp.maximum(failed, jnp.where(finite, 0.0, 1.0))

    blocks = pl.cdiv(columns, size)
    top, failed = lax.fori_loop(0, blocks, search, (jnp.zeros(size), jnp.zeros(size)))
    scale = jnp.maximum(jnp.max(top) / largest, LEAST_SCALE)
    unit = 1 / scale
    told = jnp.where(jnp.max(failed) > 0, jnp.nan, scale)  # integers know no NaN: their scale does

    def write(block: Any, _: None) -> None:
        dims, inside, part = load(block)
        units = jnp.where(jnp.abs(part) < jnp.inf, part, 0.0) * unit
        if values.dtype != jnp.int8:
            plgpu.store(values.at[row, dims], units.astype(values.dtype), mask=inside)
            return
        high = units + TO_NEAREST - TO_NEAREST
        plgpu.store(values.at[row * terms, dims], high.astype(jnp.int8), mask=inside)
        if terms == 2:
            low = (units - high) * PAIR + TO_NEAREST - TO_NEAREST
            plgpu.store(values.at[row * terms + 1, dims], low.astype(jnp.int8), mask=inside)

    lax.fori_loop(0, blocks, write, None)
    plgpu.store(scales.at[row * terms], told)
    if terms == 2:
        plgpu.store(scales.at[row * terms + 1], told / PAIR)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(rounded, static_argnames=("activations", "height", "interpret"))
