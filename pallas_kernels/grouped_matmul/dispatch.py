"""Which body multiplies rows with their experts' matrices: one table, by device and feature."""

from __future__ import annotations

from typing import Any, Literal

from pallas_kernels.dispatch import Body, Device
from pallas_kernels.quantised_matmul.dispatch import problem

# "segments" computes tiles of rows of one expert: its work is that of the rows there are. Right for
# CPUs. "segments_static" computes as many tiles as there could be: no condition is computed on the
# device. "ragged" is XLA's own ragged product, which on GPUs makes numbers of all experts' weights
# at once, and a copy of the rows for each expert. "triton" are the kernels for NVIDIA GPUs;
# "triton_interpreted" runs them anywhere, for tests.
Implementation = Literal["segments", "segments_static", "ragged", "triton", "triton_interpreted"]


def choose_body(device: Device, weights: Any, x_dtype: Any) -> Body[Implementation]:
    """The best body for products of x with such weights [E, N, K], quantised or not."""
    if device.platform == "cpu":
        return Body("segments")
    why = device.problem() or problem(weights, x_dtype, device.capability)
    return Body("segments_static" if why else "triton", why)
