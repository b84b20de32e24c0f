"""Products of float8 rows with float8 weights for GPUs of compute capability 9.0 by Mosaic: one
warpgroup fetches for those that multiply (wgmma).

Hopper's tensor cores keep about 14 bits of a sum of float8 products. So no sum is longer than a
step's columns: it is then added to others in float32, as DeepSeek V3 was trained (arXiv:2412.19437,
section 3.3.2), where it meets the scale of its group.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul.triton_rounding import rounded
from pallas_kernels.quantised_matmul.weight import QuantisedWeight

ROWS, OUTPUTS, COLUMNS = 64, 128, 128  # of a warpgroup's product in one step
STAGES, MULTIPLIERS = 4, 2
FEW_ROWS = 64  # up to which weights are what takes time, and Triton's kernel divides their columns
REGISTERS_TO_MULTIPLY, REGISTERS_TO_FETCH = 224, 56
LAYOUT = plgpu.Layout.WGMMA
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


def takes(x: Float[Array, "M K"], weight: QuantisedWeight) -> bool:
    """Whether this kernel multiplies x with such a weight: many rows, for few only wait for it."""
    if weight.activations != "float8_e4m3fn":
        return False
    (outputs, columns), (rows, group) = weight.shape, weight.block
    whole = not (outputs % OUTPUTS or columns % COLUMNS or group % COLUMNS)
    return whole and rows in (1, OUTPUTS) and x.shape[0] > FEW_ROWS


def quantised_matmul(
    x: Float[Array, "M K"], weight: QuantisedWeight, *, out_dtype: Any, interpret: bool = False
) -> Float[Array, "M N"]:
    """See the package. A program computes 128 rows, or 64 if there are no more, by 128 outputs."""
    outputs, count = weight.shape[0], x.shape[0]
    multipliers = 1 if count <= ROWS else MULTIPLIERS
    height = multipliers * ROWS
    taken = rounded(x, weight.activations, weight.order, height=height, interpret=interpret)
    assert taken.scales is not None
    item = plgpu.TilingTransform((8, COLUMNS))  # type: ignore[abstract]
    swizzled = (item, plgpu.SwizzleTransform(COLUMNS))  # type: ignore[abstract]
    kernel = plgpu.kernel(
        functools.partial(_kernel, count, weight.block),
        out_type=jax.ShapeDtypeStruct((count, outputs), out_dtype),
        grid=(pl.cdiv(count, height), outputs // OUTPUTS),
        grid_names=("rows", "outputs"),
        num_threads=multipliers + 1,
        thread_name="warpgroup",
        kernel_name="quantised_matmul_mosaic",
        scratch_types=[
            plgpu.SMEM((STAGES, height, COLUMNS), jnp.float8_e4m3fn, transforms=swizzled),
            plgpu.SMEM((STAGES, OUTPUTS, COLUMNS), jnp.float8_e4m3fn, transforms=swizzled),
            plgpu.SMEM((multipliers, ROWS, OUTPUTS), out_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=multipliers, num_barriers=STAGES),
        ],
        interpret=INTERPRETED if interpret else None,
    )
    scales = weight.scales.astype(jnp.float32)
    return kernel(taken.values, taken.scales, weight.values, scales)


class Refs(NamedTuple):
    """What a program works on: arguments, the result, stages of both in shared memory, and the
    barriers that say when one is loaded and when it is free again."""

    x: Any
    x_scales: Any
    values: Any
    scales: Any
    out: Any
    x_stages: Any
    value_stages: Any
    result: Any
    loaded: Any
    consumed: Any


def _kernel(count: int, block: tuple[int, int], *arrays: Any) -> None:
    refs = Refs(*arrays)
    multipliers, height = refs.result.shape[0], refs.x_stages.shape[1]
    warpgroup = lax.axis_index("warpgroup")
    first = pl.multiple_of(lax.axis_index("rows") * height, height)
    outputs = pl.ds(pl.multiple_of(lax.axis_index("outputs") * OUTPUTS, OUTPUTS), OUTPUTS)

    @pl.when(warpgroup == multipliers)
    def _() -> None:
        if multipliers == 2:
            plgpu.set_max_registers(REGISTERS_TO_FETCH, action="decrease")
        _fetch(refs, pl.ds(first, height), outputs)

    @pl.when(warpgroup < multipliers)
    def _() -> None:
        if multipliers == 2:
            plgpu.set_max_registers(REGISTERS_TO_MULTIPLY, action="increase")
        total = _multiplied(refs, block, outputs)
        begin = pl.multiple_of(first + warpgroup * ROWS, ROWS)
        at = refs.x_scales.at[pl.ds(begin, ROWS)]
        down = plgpu.load(at, layout=LAYOUT.reduce(1), optimized=False)
        result = refs.result.at[warpgroup]
        result[...] = (total * lax.broadcast_in_dim(down, total.shape, [0])).astype(result.dtype)
        plgpu.commit_smem()

        @pl.when(begin + ROWS <= count)
        def _() -> None:
            plgpu.copy_smem_to_gmem(result, refs.out.at[pl.ds(begin, ROWS), outputs])

        if rest := count % ROWS:

            @pl.when((begin < count) & (begin + ROWS > count))
            def _() -> None:
                place = refs.out.at[pl.ds(count - rest, rest), outputs]
                plgpu.copy_smem_to_gmem(result.at[pl.ds(0, rest)], place)

        plgpu.wait_smem_to_gmem(0)


def _fetch(refs: Refs, rows: Any, outputs: Any) -> None:
    """Copy what is multiplied, a step into each stage as soon as it is free."""

    def fetch(step: Any, _: None) -> None:
        stage = lax.rem(step, jnp.int32(STAGES))

        @pl.when(step >= STAGES)
        def _wait() -> None:
            plgpu.barrier_wait(refs.consumed.at[stage])

        columns = pl.ds(pl.multiple_of(step * COLUMNS, COLUMNS), COLUMNS)
        sources = refs.x.at[rows, columns], refs.values.at[outputs, columns]
        for source, stages in zip(sources, (refs.x_stages, refs.value_stages)):
            plgpu.copy_gmem_to_smem(source, stages.at[stage], refs.loaded.at[stage])

    lax.fori_loop(0, refs.x.shape[1] // COLUMNS, fetch, None)


def _multiplied(refs: Refs, block: tuple[int, int], outputs: Any) -> Float[Array, "R N"]:
    """The sums of a warpgroup's own rows, by the weight's scales."""
    mine = pl.ds(pl.multiple_of(lax.axis_index("warpgroup") * ROWS, ROWS), ROWS)
    grouped = refs.scales.shape[0] > 1

    def scales(group: Any) -> Any:
        if block[0] == OUTPUTS:  # all of these have one
            return refs.scales[group, lax.axis_index("outputs")]
        at = refs.scales.at[group, outputs]
        along = plgpu.load(at, layout=LAYOUT.reduce(0), optimized=False)
        return lax.broadcast_in_dim(along, (ROWS, OUTPUTS), [1])

    def step(i: Any, total: Any) -> Any:
        stage = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(refs.loaded.at[stage])

        def multiply(accumulator: Any) -> Any:
            values = refs.value_stages.at[stage].transpose((1, 0))
            plgpu.wgmma(accumulator, refs.x_stages.at[stage, mine], values)
            return accumulator[...]

        part = pl.run_scoped(multiply, plgpu.ACC((ROWS, OUTPUTS), jnp.float32))
        plgpu.barrier_arrive(refs.consumed.at[stage])
        if grouped:
            part = part * scales(lax.div(i * COLUMNS, jnp.int32(block[1])))
        return total + part

    start = plgpu.layout_cast(jnp.zeros((ROWS, OUTPUTS), jnp.float32), LAYOUT)
    total = lax.fori_loop(0, refs.x.shape[1] // COLUMNS, step, start)
    return total if grouped else total * scales(0)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(quantised_matmul, static_argnames=("out_dtype", "interpret"))
