"""Which body multiplies with a quantised weight on a device: one table, by device and feature."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.dispatch import Body, Capability, Device, out_of_reach
from pallas_kernels.quantised_matmul.triton_product import FEWEST_COLUMNS, step_columns
from pallas_kernels.quantised_matmul.weight import QuantisedWeight

# "reference" is XLA's; "triton" are the kernels for NVIDIA GPUs, "mosaic" the one for compute
# capability 9.0, with Triton for what it does not take; "…_interpreted" runs them anywhere, for
# tests.
Implementation = Literal[
    "reference", "triton", "triton_interpreted", "mosaic", "mosaic_interpreted"
]
HOPPER: Capability = (9, 0)
# The body for Hopper. Its own kernel has never run on a GPU; "mosaic" here would prefer it.
ON_HOPPER: Implementation = "triton"

# Element types of x that tensor cores take without rounding.
ROWS = ("bfloat16", "float16")
# Element types that kernels read, and the oldest GPUs that can convert them.
STORED: dict[str, Capability] = {
    "bfloat16": (8, 0),
    "float16": (8, 0),
    "int8": (8, 0),
    "uint8": (8, 0),
    "float8_e4m3fn": (8, 9),
}


def choose_body(device: Device, weight: QuantisedWeight, x_dtype: Any) -> Body[Implementation]:
    """The best body for products of x with such a weight; its arrays may be abstract."""
    if device.platform == "cpu":
        return Body("reference")
    why = device.problem() or problem(weight, x_dtype, device.capability)
    best = ON_HOPPER if device.capability == HOPPER else "triton"
    return Body("reference" if why else best, why)


def problem(weight: Any, x_dtype: Any, capability: Capability | None = None) -> str:
    """Why kernels do not take this weight, quantised or an array, and x; empty if they do.

    Without a `capability`, on any GPU.
    """
    quantised = isinstance(weight, QuantisedWeight)
    values = weight.values if quantised else weight
    group = weight.block[1] if quantised else weight.shape[-1]
    stored, x_name, columns = values.dtype.name, jnp.dtype(x_dtype).name, weight.shape[-1]
    newest = STORED.get(stored)
    if x_name not in ROWS:
        return f"tensor cores would round {x_name} activations"
    if newest is None or not (quantised or stored == x_name):
        return f"kernels do not multiply {x_name} with {stored} weights"
    if capability is not None and capability < newest:
        return f"{stored} weights need a newer GPU"
    if not step_columns(columns, group):
        return f"{columns} columns in groups of {group} are no multiples of {FEWEST_COLUMNS}"
    if out_of_reach(values.size, values.dtype.itemsize):
        return f"Pallas would compute offsets into {values.size} elements of 1 byte in 32 bits"
    return ""
