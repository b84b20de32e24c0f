"""Products of rows with the matrix of the expert each belongs to: one contract, one dispatch."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference

# "segments" computes tiles of rows of one expert: its work is that of the rows there are. Right for
# CPUs. "ragged" is XLA's own ragged product, without a loop condition on the device.
Implementation = Literal["segments", "ragged"]


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation,
) -> Float[Array, "R N"]:
    """Row r times the transposed matrix of its expert, summed in float32.

    Rows are in order of their expert, `group_sizes` of each. Rows past the groups' sum are zero.
    """
    if implementation == "segments":
        return reference.segments(x, weights, group_sizes)
    return reference.ragged(x, weights, group_sizes)


__all__ = ["Implementation", "grouped_matmul"]
