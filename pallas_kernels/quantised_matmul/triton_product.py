"""What the Triton kernels of products share: one block of outputs times one block of rows.

The product is taken transposed: outputs are the long side of the tensor cores' tile, so a decode
step of few rows wastes nothing, and what is made of stored values stays in registers. Values become
what x is without rounding (integers and float8 fit into 16 bits); scales are applied to float32
sums, so nothing is rounded on the way. Columns are summed in one order whatever the other rows are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.quantised_matmul.weight import ZERO_OF_INT4, Activations, QuantisedWeight

MOST_COLUMNS = 128  # of x in one turn of the loop; half of it for weights of 16 bits
# Rows that share weights, at most: rows and outputs of a block, warps, and stages of the loop.
BLOCKS = (
    (16, (16, 64, 4, 4)),
    (32, (32, 64, 4, 4)),
    (64, (64, 64, 4, 3)),
    (1 << 31, (128, 128, 8, 3)),
)
FEWEST_COLUMNS = 32  # in two products of 16, if packed, or in one of 8 bits: a tensor core's own


class Options(NamedTuple):
    """What a kernel is specialised for.

    Attributes:
        bits: of a stored value, 4, 8 or 16.
        columns: of x in one turn of the loop.
        group: columns that share a scale, or 0 if all do and it can be applied at the end.
        scale_rows: outputs that share a scale.
        rows / outputs: of one block.
    """

    bits: int
    columns: int
    group: int
    scale_rows: int
    rows: int
    outputs: int


class Refs(NamedTuple):
    """References to weights [E, N, K'], scales and zero points [E, groups, N'], see
    `QuantisedWeight`; without scales values are numbers."""

    values: Any
    scales: Any = None
    zeros: Any = None


def step_columns(columns: int, group: int) -> int:
    """Columns of one turn of the loop: a power of two that divides a group; 0 if there is none."""
    size = group if group < columns else columns
    step = min(MOST_COLUMNS, size & -size)
    return step if step >= FEWEST_COLUMNS else 0


def options(bits: int, columns: int, block: tuple[int, int], rows: int, outputs: int) -> Options:
    """What a kernel is specialised for, by a weight's kind and the size of the kernel's blocks."""
    scale_rows, group = block
    step = step_columns(columns, group)
    if not step:
        raise ValueError(f"weight: kernels take no {columns} columns in groups of {group}")
    if bits == 16:  # or two turns of large blocks exceed the shared memory of smaller GPUs
        step = min(step, MOST_COLUMNS // 2)
    return Options(bits, step, group if group < columns else 0, scale_rows, rows, outputs)


def block_sizes(rows: int, dtype: Any) -> tuple[int, int, int, int]:
    """Rows and outputs of a block, warps and stages where so many rows of that dtype share weights.

    Where tensor cores get float8 as float16, both sides are in registers twice: more warps share a
    block of 64 rows then, or they would spill.
    """
    height, outputs, warps, stages = next(sizes for most, sizes in BLOCKS if rows <= most)
    if jnp.dtype(dtype).name == "float8_e4m3fn" and height == 64:
        warps = 8
    return height, outputs, warps, stages


def stored(
    weights: QuantisedWeight | Num[Array, "*E N K"],
) -> tuple[tuple[int, tuple[int, int], Activations], list[Array]]:
    """(bits, block, activations) of weights, and their arrays in the order of `Refs`."""
    if not isinstance(weights, QuantisedWeight):
        return (16, (1, weights.shape[-1]), "as_given"), [weights]
    arrays = [weights.values, weights.scales, weights.zeros]
    kind = (weights.bits, weights.block, weights.activations)
    return kind, [array for array in arrays if array is not None]


def load(at: Any, mask: Any) -> Any:
    """What a reference refers to; zero where a mask says so."""
    if mask is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=mask, other=jnp.zeros((), at.dtype))


def store(at: Any, total: Float[Array, "N R"], real: Any, inside: Any) -> None:
    """Write a block of outputs and rows: those that are real, and inside."""
    masks = [real[None, :]] if real is not None else []
    masks += [inside[:, None]] if inside is not None else []
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    plgpu.store(at, total.astype(at.dtype), mask=mask)


def product(
    o: Options,
    x: Any,
    weight: Refs,
    expert: Any,
    rows: Int[Array, " R"],
    real: Bool[Array, " R"] | None,
    outputs: Int[Array, " N"],
    inside: Bool[Array, " N"] | None,
    begin: Any,
    end: Any,
) -> Float[Array, "N R"]:
    """Outputs of an expert by rows of x, over turns `begin` to `end` of the columns.

    Rows that are not `real` and outputs that are not `inside` are not read and count as zero.
    """

    def load_x(first: Any, count: int) -> Num[Array, "R K"]:
        at = x.at[rows[:, None], (first + jnp.arange(count))[None, :]]
        return load(at, None if real is None else real[:, None])

    def by_output(array: Any, group: Any) -> Num[Array, " N"]:
        return load(array.at[expert, group, outputs // o.scale_rows], inside)

    def load_values(first: Any, count: int) -> Num[Array, "N K"]:
        at = weight.values.at[expert, outputs[:, None], (first + jnp.arange(count))[None, :]]
        return load(at, None if inside is None else inside[:, None])

    def of_group(i: Any) -> Any:
        return i * o.columns // o.group if o.group else 0

    def one(i: Any) -> Num[Array, "N R"]:
        first = i * o.columns
        if o.bits != 4:
            values = load_values(first, o.columns).astype(x.dtype)
            return plgpu.dot(values, load_x(first, o.columns), trans_b=True)
        half, group = o.columns // 2, o.group or x.shape[1]
        packed = load_values(i * half, half)
        turns = group // o.columns  # of one group; what is multiplied is known to be aligned
        low = i * o.columns if turns == 1 else i // turns * group + i % turns * half
        zero: Any = jnp.int8(ZERO_OF_INT4)
        if weight.zeros is not None:
            zero = by_output(weight.zeros, of_group(i)).astype(jnp.int8)[:, None]
        halves = ((packed & 15).astype(jnp.int8) - zero, (packed >> 4).astype(jnp.int8) - zero)
        return sum(
            plgpu.dot(values.astype(x.dtype), load_x(start, half), trans_b=True)
            for values, start in zip(halves, (low, low + group // 2))
        )

    def turn(i: Any, total: Num[Array, "N R"]) -> Num[Array, "N R"]:
        if not o.group:
            return total + one(i)
        scales = by_output(weight.scales, of_group(i)).astype(jnp.float32)
        return total + one(i).astype(jnp.float32) * scales[:, None]

    whole = jnp.issubdtype(x.dtype, jnp.integer) and not o.group
    start = jnp.zeros((o.outputs, o.rows), jnp.int32 if whole else jnp.float32)
    total = lax.fori_loop(begin, end, turn, start).astype(jnp.float32)
    if weight.scales is not None and not o.group:
        total = total * by_output(weight.scales, 0).astype(jnp.float32)[:, None]
    return total
