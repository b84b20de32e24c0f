"""Temperature, min-p, top-k and top-p of every row as one number: how far a token may be below
the most likely one. One contract, several bodies, one dispatch.

All three filters keep the most likely tokens, so together they keep those down to a threshold. It
is found without a sort, by counting tokens, or adding up what they weigh, within several distances
at a time.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Body, Implementation
from pallas_kernels.sampling_threshold import reference, triton_threshold
from pallas_kernels.sampling_threshold.dispatch import choose_body
from pallas_kernels.sampling_threshold.reference import Filters


def sampling_threshold(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    implementation: Implementation,
) -> Float[Array, " R"]:
    """float32: a token stays if its logit is at most so far below the largest of its row.

    First min-p, then top-k, then top-p of what is left, each of weights
    exp((logit - largest) / temperature); tokens that tie at a threshold all stay, and the most
    likely one always does. A `min_p` of 0, a `top_k` of 0 or of the whole vocabulary and a `top_p`
    of 1 keep everything: infinity. So do rows of temperature 0, which draw nothing. A row with NaN
    or infinite logits may yield any number.

    Bodies differ by the rounding of weights and their sums, which min-p and top-p depend on.
    """
    filters = Filters(temperature, min_p, top_k, top_p)
    if implementation.startswith("triton"):
        interpret = implementation == "triton_interpreted"
        return triton_threshold.sampling_threshold(logits, *filters, interpret=interpret)
    return reference.sampling_threshold(logits, filters, implementation == "reference")


__all__ = ["Body", "Implementation", "choose_body", "sampling_threshold"]
