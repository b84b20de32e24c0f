"""Products of activations with weights stored in few bits: one contract, several bodies."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul import mosaic, reference, triton
from pallas_kernels.quantised_matmul.dispatch import Body, Implementation, choose_body, problem
from pallas_kernels.quantised_matmul.weight import (
    Activations,
    QuantisedWeight,
    dequantise,
    pack_int4,
)


def quantised_matmul(
    x: Float[Array, "M K"],
    weight: QuantisedWeight | Float[Array, "N K"],
    *,
    implementation: Implementation,
    out_dtype: Any = None,
    splits: int | None = None,
) -> Float[Array, "M N"]:
    """x times the transposed matrix that the weight stands for, summed in float32 or int32.

    x is rounded as `weight.activations` says. The result has x's dtype unless `out_dtype` asks for
    another. `splits` are programs of a kernel that share the columns; None: as the shape says. To
    add what several found takes a launch more. Raises ValueError for a weight whose parts do not
    fit each other, or x, and by kernels for what they do not multiply.
    """
    if isinstance(weight, QuantisedWeight):
        weight.check()
    if len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"weight: a matrix {list(weight.shape)} for x of {list(x.shape)}")
    out_dtype = out_dtype or x.dtype
    if implementation == "reference":
        return reference.quantised_matmul(x, weight, out_dtype=out_dtype)
    interpret = implementation.endswith("_interpreted")
    read = not isinstance(weight, QuantisedWeight) or weight.integral
    if not (interpret and read) and (why := problem(weight, x.dtype)):
        raise ValueError(f"weight: {why}")
    how: dict[str, Any] = {"out_dtype": out_dtype, "interpret": interpret}
    hopper = implementation.startswith("mosaic")
    if hopper and isinstance(weight, QuantisedWeight) and mosaic.takes(x, weight):
        return mosaic.quantised_matmul(x, weight, **how)
    return triton.quantised_matmul(x, weight, splits=splits, **how)


__all__ = [
    "Activations",
    "Body",
    "Implementation",
    "QuantisedWeight",
    "choose_body",
    "dequantise",
    "pack_int4",
    "quantised_matmul",
]
