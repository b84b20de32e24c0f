"""Products of activations with weights stored in few bits: one contract, several bodies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul import mosaic, reference, triton
from pallas_kernels.quantised_matmul.dispatch import Body, Implementation, choose_body, problem
from pallas_kernels.quantised_matmul.weight import (
    Activations,
    Codes,
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
    interpret = implementation.endswith("_interpreted")
    _check(x, weight, implementation)
    out_dtype = out_dtype or x.dtype
    if implementation == "reference":
        return reference.quantised_matmul(x, weight, out_dtype=out_dtype)
    how: dict[str, Any] = {"out_dtype": out_dtype, "interpret": interpret}
    if isinstance(weight, QuantisedWeight) and _by_mosaic(x, weight, implementation):
        return mosaic.quantised_matmul(x, weight, **how)
    return triton.quantised_matmul(x, weight, splits=splits, **how)


def _check(x: Array, weight: Any, implementation: Implementation) -> None:
    """Raise ValueError for what does not fit each other, and what a kernel does not multiply."""
    if isinstance(weight, QuantisedWeight):
        weight.check()
    if len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"weight: a matrix {list(weight.shape)} for x of {list(x.shape)}")
    compiled = implementation != "reference" and not implementation.endswith("_interpreted")
    if compiled and (why := problem(weight, x.dtype)):
        raise ValueError(f"weight: {why}")


def _by_mosaic(x: Array, weight: Any, implementation: Implementation) -> bool:
    hopper = implementation.startswith("mosaic") and isinstance(weight, QuantisedWeight)
    return hopper and mosaic.takes(x, weight)


def matmul_in_parts(
    x: Float[Array, "M K"],
    weight: QuantisedWeight | Float[Array, "N K"],
    *,
    implementation: Implementation,
) -> Float[Array, "P M N"]:
    """`quantised_matmul` as float32 parts that add up, one for each program that shares the
    columns: whatever takes the product can add them, and spare a launch."""
    if implementation != "reference":
        interpret = implementation.endswith("_interpreted")
        _check(x, weight, implementation)
        if not _by_mosaic(x, weight, implementation):
            return triton.matmul_in_parts(x, weight, interpret=interpret)
    how: dict[str, Any] = {"implementation": implementation, "out_dtype": jnp.float32}
    return quantised_matmul(x, weight, **how)[None]


__all__ = [
    "Activations",
    "Body",
    "Codes",
    "Implementation",
    "QuantisedWeight",
    "choose_body",
    "dequantise",
    "matmul_in_parts",
    "pack_int4",
    "quantised_matmul",
]
