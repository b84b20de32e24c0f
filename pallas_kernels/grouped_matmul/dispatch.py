"""Which body multiplies rows with their experts' matrices: one table, by device and feature."""

from __future__ import annotations

from typing import Any, Literal

from pallas_kernels.dispatch import Body, Device
from pallas_kernels.quantised_matmul.dispatch import problem

# "segments" computes tiles of rows of one expert: its work is that of the rows there are. Right for
# CPUs. "ragged" is XLA's own ragged product, without a loop condition on the device. "triton" are
# the kernels for NVIDIA GPUs; "triton_interpreted" runs them anywhere, for tests.
Implementation = Literal["segments", "ragged", "triton", "triton_interpreted"]


def choose_body(device: Device, weights: Any, x_dtype: Any) -> Body[Implementation]:
    """The best body for products of x with such weights [E, N, K], quantised or not."""
    if device.platform == "cpu":
        return Body("segments")
    why = device.problem() or problem(weights, x_dtype, device.capability)
    return Body("ragged" if why else "triton", why)
