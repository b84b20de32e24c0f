"""Products of rows with the matrix of the expert each belongs to: one contract, one dispatch."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference, triton
from pallas_kernels.grouped_matmul.dispatch import Body, Implementation, choose_body
from pallas_kernels.quantised_matmul import QuantisedWeight
from pallas_kernels.quantised_matmul.dispatch import problem


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E N K"] | QuantisedWeight,
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation,
) -> Float[Array, "R N"]:
    """Row r times the transposed matrix of its expert, summed in float32.

    Rows are in order of their expert, `group_sizes` of each. Rows past the groups' sum are zero.
    Of quantised weights, rows are rounded as `activations` says. Raises ValueError for weights
    whose parts do not fit each other, or x, and by kernels for what they do not multiply.
    """
    if isinstance(weights, QuantisedWeight):
        weights.check()
        if len(weights.shape) != 3 or weights.shape[2] != x.shape[1]:
            raise ValueError(f"weight: experts {list(weights.shape)} for x of {list(x.shape)}")
    if implementation.startswith("triton"):
        interpret = implementation == "triton_interpreted"
        if not interpret and (why := problem(weights, x.dtype)):
            raise ValueError(f"weight: {why}")
        return triton.grouped_matmul(x, weights, group_sizes, interpret=interpret)
    if implementation == "ragged":
        return reference.ragged(x, weights, group_sizes)
    return reference.segments(x, weights, group_sizes, static=implementation == "segments_static")


__all__ = ["Body", "Implementation", "choose_body", "grouped_matmul"]
