"""A weight stored in few bits, and the numbers it stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

# How x is rounded before the product: not at all, to int8 or float8 with a scale a row, or to two
# int8 terms, the second for what the first leaves over.
Activations = Literal["as_given", "int8", "int8_pair", "float8_e4m3fn"]
Codes = Literal["integers", "e2m1"]
# Twice the numbers that e2m1's three lower bits stand for: integers.
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
ZERO_OF_INT4 = 8  # the stored value that means 0 where a weight has no zero points
VALUES = {8: ("int8", "float8_e4m3fn"), 4: ("uint8",)}  # element types by bits of a weight
SCALES = ("float32", "bfloat16", "float16")
ZEROS = ("uint8", "float32")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix [N, K], or one of each expert [E, N, K], as (values - zeros) * scales.

    Its arrays may be abstract, or whatever a tree of JAX holds in their place.

    Attributes:
        values: int8 or float8_e4m3fn [..., N, K]; of 4 bits uint8 [..., N, K / 2]: a byte holds two
            columns of one group, in its low bits one of the group's first half and in its high bits
            the one that is half a group further on.
        scales: floats [..., K / columns, ceil(N / rows)]: as kernels read them, those of one group
            of columns beside each other.
        zeros: uint8 or float32 like `scales`, the stored values that mean 0, for 4 bits only;
            without them it is `ZERO_OF_INT4`.
        order: i32[K], where the weight's columns are sorted: column i belongs to x[:, order[i]].
        bits: of a value, 8 or 4.
        block: (rows, columns) that share a scale: (1, K) is one scale a channel, (1, 128) a group,
            (128, 128) a block.
        activations: see `Activations`.
        codes: what 4 bits say: "integers" 0 to 15, or "e2m1" floats with the sign highest, as MXFP4
            has them.
    """

    values: Any
    scales: Any
    zeros: Any = None
    order: Any = None
    bits: int = field(default=8, metadata={"static": True})
    block: tuple[int, int] = field(default=(1, 0), metadata={"static": True})
    activations: Activations = field(default="as_given", metadata={"static": True})
    codes: Codes = field(default="integers", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it stands for."""
        *lead, columns = self.values.shape
        return (*lead, columns * (8 // self.bits))

    @property
    def integral(self) -> bool:
        """Whether `integers` are what it is made of."""
        return self.zeros is None or self.zeros.dtype == jnp.uint8

    @property
    def groups(self) -> int:
        """Groups of columns with a scale of their own."""
        return self.shape[-1] // self.block[1]

    def check(self) -> None:
        """Raise ValueError naming the part that does not fit the others."""
        if self.bits not in VALUES or self.values.dtype.name not in VALUES[self.bits]:
            known = " or ".join(f"{bits} in {names}" for bits, names in VALUES.items())
            raise ValueError(f"weight: {self.bits} bits in {self.values.dtype}; there are {known}")
        if self.values.ndim not in (2, 3):
            raise ValueError(f"weight: values of shape {self.values.shape}, expected 2 or 3 axes")
        *lead, outputs, columns = self.shape
        rows, group = self.block
        if rows < 1 or group < 1 or columns % group or (self.bits == 4 and group % 2):
            raise ValueError(f"weight: blocks of {self.block} do not divide {columns} columns")
        expected = (*lead, columns // group, math.ceil(outputs / rows))
        if self.scales.shape != expected or self.scales.dtype.name not in SCALES:
            raise ValueError(
                f"weight: scales are {self.scales.dtype}{list(self.scales.shape)}, expected "
                f"{list(expected)} of {', '.join(SCALES)}"
            )
        if self.zeros is not None and self.bits != 4:
            raise ValueError("weight: zero points are for values of 4 bits")
        if self.zeros is not None and (
            self.zeros.shape != expected or self.zeros.dtype.name not in ZEROS
        ):
            raise ValueError(
                f"weight: zeros are {self.zeros.dtype}{list(self.zeros.shape)}, expected "
                f"{list(expected)} of {' or '.join(ZEROS)}"
            )
        if self.codes == "e2m1" and (self.bits != 4 or self.zeros is not None):
            raise ValueError("weight: e2m1 codes are of 4 bits, without zero points")
        if self.order is not None and (self.order.shape != (columns,) or lead):
            raise ValueError(
                f"weight: order has shape {self.order.shape}, expected ({columns},) of one matrix"
            )
        self._check_activations()

    def _check_activations(self) -> None:
        fits = {"float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "int8_pair": "int8"}
        wanted = fits.get(self.activations)
        if wanted is not None and self.zeros is not None and self.zeros.dtype != jnp.uint8:
            raise ValueError(
                f"weight: activations in {self.activations} need integers as zero points; choose "
                "'as_given'"
            )
        stored = "int8" if self.bits == 4 else self.values.dtype.name
        if wanted is not None and wanted != stored:
            raise ValueError(
                f"weight: activations in {self.activations} need values in {wanted}, these are "
                f"{stored}; choose 'as_given'"
            )


def integers(weight: QuantisedWeight) -> Array:
    """Values minus zero points [..., N, K]: int8, or float8 as it is stored; float32 for zero
    points that are. Of e2m1 codes it is twice the numbers; see `scales_by_output`."""
    if weight.bits == 8:
        return weight.values
    *lead, outputs, _ = weight.shape
    group = weight.block[1]
    packed = weight.values.reshape(*lead, outputs, weight.groups, 1, group // 2)
    halves = jnp.concatenate([packed & 15, packed >> 4], axis=-2).astype(jnp.int8)
    if weight.codes == "e2m1":
        twice = jnp.array([*TWICE_E2M1, *(-number for number in TWICE_E2M1)], jnp.int8)
        return twice[halves].reshape(weight.shape)
    zeros: Any = jnp.int8(ZERO_OF_INT4)
    if weight.zeros is not None:
        zeros = _by_output(weight.zeros, weight)[..., None, None]
        if zeros.dtype == jnp.float32:
            return (halves.astype(jnp.float32) - zeros).reshape(weight.shape)
        zeros = zeros.astype(jnp.int8)
    return (halves - zeros).reshape(weight.shape)


def scales_by_output(weight: QuantisedWeight) -> Array:
    """float32 scales [..., N, groups] of `integers`."""
    scales = _by_output(weight.scales, weight).astype(jnp.float32)
    return scales / 2 if weight.codes == "e2m1" else scales


def _by_output(array: Array, weight: QuantisedWeight) -> Array:
    """Scales or zero points of every output: [..., N, groups]."""
    rows, outputs = weight.block[0], weight.shape[-2]
    every = array if rows == 1 else jnp.repeat(array, rows, axis=-1)[..., :outputs]
    return every.swapaxes(-1, -2)


def dequantise(weight: QuantisedWeight, dtype: Any = jnp.float32) -> Array:
    """The matrix [..., N, K], its columns in x's order."""
    *lead, columns = weight.shape
    values = integers(weight).astype(jnp.float32).reshape(*lead, weight.groups, weight.block[1])
    whole = (values * scales_by_output(weight)[..., None]).reshape(*lead, columns)
    if weight.order is not None:
        whole = whole[..., jnp.argsort(weight.order)]
    return whole.astype(dtype)


def pack_int4(values: Any, group: int) -> Any:
    """Bytes [..., N, K / 2] of values 0 to 15 [..., N, K]; see `QuantisedWeight.values`. Arrays are
    JAX's or NumPy's."""
    *lead, columns = values.shape
    halves = values.astype(jnp.uint8).reshape(*lead, columns // group, 2, group // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*lead, columns // 2)
