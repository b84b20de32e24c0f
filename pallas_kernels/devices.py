"""What every dispatch asks of a device: whether Pallas has kernels for it at all."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jax.experimental.pallas import triton

# "reference" may loop as long as the data says, which the host need not know: right for CPUs.
# "reference_static" always does the most there can be: no condition is computed on the device.
# "triton" are kernels for NVIDIA GPUs; "triton_interpreted" runs them anywhere, for tests.
Implementation = Literal["reference", "reference_static", "triton", "triton_interpreted"]

Capability = tuple[int, int]  # CUDA's compute capability
OLDEST: Capability = (8, 0)


class Body(NamedTuple):
    """An implementation, and why it is no kernel where kernels would be expected."""

    implementation: Implementation
    why: str = ""


def why_no_kernels(platform: str, kind: str, capability: Capability | None) -> str:
    """Why Triton cannot be used on a device, or "".

    `kind` is what the device calls itself, `capability` its compute capability, None where there
    is no such thing.
    """
    if capability is None:
        return f"there are kernels for NVIDIA GPUs only, not for {platform}"
    if capability < OLDEST:
        return "the GPU is older than compute capability 8.0"
    words = f" {kind.replace('-', ' ')} "
    if not any(f" {gpu.value} " in words for gpu in triton.GpuVersion):
        return f"this version of JAX does not know {kind!r} well enough"
    return ""
