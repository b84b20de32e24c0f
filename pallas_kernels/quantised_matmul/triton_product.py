"""What the Triton kernels of products share: one block of outputs times one block of rows.

The product is taken transposed: outputs are the long side of the tensor cores' tile, so a decode
step of few rows wastes nothing, and what is made of stored values stays in registers. Values become
what x is without rounding (integers and float8 fit into 16 bits); scales are applied to float32
sums, so nothing is rounded on the way. Columns are summed in one order whatever the other rows are.
Zero points that are no integers are taken off the sum: that of x's columns times theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Num, UInt8

from pallas_kernels.quantised_matmul.weight import (
    TWICE_E2M1,
    ZERO_OF_INT4,
    Activations,
    Codes,
    QuantisedWeight,
)

MOST_COLUMNS = 128  # of x in one turn of the loop; half of it for weights of 16 bits
# Rows that share weights, at most: rows and outputs of a block, warps, and stages of the loop.
BLOCKS = (
    (16, (16, 64, 4, 4)),
    (32, (32, 64, 4, 4)),
    (64, (64, 64, 4, 3)),
    (1 << 31, (128, 128, 8, 3)),
)
E2M1_TABLE = sum(number << 4 * code for code, number in enumerate(TWICE_E2M1))  # of 8 times 4 bits
FEWEST_COLUMNS = 32  # in two products of 16, if packed, or in one of 8 bits: a tensor core's own


class Options(NamedTuple):
    """What a kernel is specialised for.

    Attributes:
        bits: of a stored value, 4, 8 or 16; codes: what 4 of them say.
        columns: of x in one turn of the loop.
        group: columns that share a scale, or 0 if all do and it can be applied at the end.
        scale_rows: outputs that share a scale.
        rows / outputs: of one block.
    """

    bits: int
    codes: Codes
    columns: int
    group: int
    scale_rows: int
    rows: int
    outputs: int


class Kind(NamedTuple):
    """How weights are stored and multiplied, see `QuantisedWeight`; 16 bits are numbers."""

    bits: int
    block: tuple[int, int]
    activations: Activations = "as_given"
    codes: Codes = "integers"


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


def options(kind: Kind, columns: int, rows: int, outputs: int) -> Options:
    """What a kernel is specialised for, by a weight's kind and the size of the kernel's blocks."""
    scale_rows, group = kind.block
    step = step_columns(columns, group)
    if not step:
        raise ValueError(f"weight: kernels take no {columns} columns in groups of {group}")
    if kind.bits == 16:  # or two turns of large blocks exceed the shared memory of smaller GPUs
        step = min(step, MOST_COLUMNS // 2)
    group = group if group < columns else 0
    return Options(kind.bits, kind.codes, step, group, scale_rows, rows, outputs)


def block_sizes(rows: int, dtype: Any) -> tuple[int, int, int, int]:
    """Rows and outputs of a block, warps and stages where so many rows of that dtype share weights.

    Where tensor cores get float8 as float16, both sides are in registers twice: more warps share a
    block of 64 rows then, or they would spill.
    """
    height, outputs, warps, stages = next(sizes for most, sizes in BLOCKS if rows <= most)
    if jnp.dtype(dtype).name == "float8_e4m3fn" and height == 64:
        warps = 8
    return height, outputs, warps, stages


def stored(weights: QuantisedWeight | Num[Array, "*E N K"]) -> tuple[Kind, list[Array]]:
    """The kind of weights, and their arrays in the order of `Refs`."""
    if not isinstance(weights, QuantisedWeight):
        return Kind(16, (1, weights.shape[-1])), [weights]
    arrays = [weights.values, weights.scales, weights.zeros]
    kind = Kind(weights.bits, weights.block, weights.activations, weights.codes)
    return kind, [array for array in arrays if array is not None]


def load(at: Any, mask: Any) -> Any:
    """What a reference refers to; zero where a mask says so."""
    if mask is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=mask, other=jnp.zeros((), at.dtype))


def e2m1(codes: UInt8[Array, "N K"]) -> Int[Array, "N K"]:
    """Twice the numbers of codes, looked up in a register."""
    bits = codes.astype(jnp.uint32)
    number = (jnp.uint32(E2M1_TABLE) >> ((bits & 7) * 4) & 15).astype(jnp.int32)
    return jnp.where(bits > 7, -number, number)


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
        zeros: Any = None
        if weight.zeros is not None:
            zeros = by_output(weight.zeros, of_group(i))[:, None]
        halves = (load_x(start, half) for start in (low, low + group // 2))
        return _of_nibbles(o, packed, zeros, halves)

    def scales_of(group: Any) -> Float[Array, "N 1"]:
        scales = by_output(weight.scales, group).astype(jnp.float32)[:, None]
        return scales / 2 if o.codes == "e2m1" else scales

    def turn(i: Any, total: Num[Array, "N R"]) -> Num[Array, "N R"]:
        if not o.group:
            return total + one(i)
        scales = scales_of(of_group(i))  # loaded first: registers are fewer so
        return total + one(i).astype(jnp.float32) * scales

    whole = jnp.issubdtype(x.dtype, jnp.integer) and not o.group
    start = jnp.zeros((o.outputs, o.rows), jnp.int32 if whole else jnp.float32)
    total = lax.fori_loop(begin, end, turn, start).astype(jnp.float32)
    return total if weight.scales is None or o.group else total * scales_of(0)


def _of_nibbles(
    o: Options, packed: UInt8[Array, "N K"], zeros: Any, halves: Iterator[Num[Array, "R K"]]
) -> Num[Array, "N R"]:
    """Two values in a byte times the columns of x that each belongs to; zeros [N, 1] or None.

    Of x one half is loaded when the other was multiplied, unless both are needed: fewer registers.
    """
    apart = zeros is not None and zeros.dtype != jnp.uint8  # no integers
    zero = jnp.int8(ZERO_OF_INT4) if zeros is None or apart else zeros.astype(jnp.int8)

    def numbers(nibbles: UInt8[Array, "N K"]) -> Int[Array, "N K"]:
        return e2m1(nibbles) if o.codes == "e2m1" else nibbles.astype(jnp.int8) - zero

    values = [numbers(packed & 15), numbers(packed >> 4)]
    columns = list(halves) if apart else halves
    dots = [plgpu.dot(v.astype(x.dtype), x, trans_b=True) for v, x in zip(values, columns)]
    if not apart:
        return dots[0] + dots[1]
    sums = [jnp.sum(x.astype(jnp.float32), axis=1) for x in columns]
    return dots[0] + dots[1] - (zeros - ZERO_OF_INT4) * (sums[0] + sums[1])[None, :]
