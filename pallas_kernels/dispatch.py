"""What tables of bodies have in common: devices, and why kernels cannot be used on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.experimental.pallas import triton

# "reference" may loop as long as the data says, which the host need not know: right for CPUs.
# "reference_static" always does the most there can be: no condition is computed on the device.
# "triton" are kernels for NVIDIA GPUs, "mosaic" those for compute capability 9.0 alone, with Triton
# for what they do not take; "…_interpreted" runs them anywhere, for tests.
Implementation = Literal[
    "reference",
    "reference_static",
    "triton",
    "triton_interpreted",
    "mosaic",
    "mosaic_interpreted",
]

Capability = tuple[int, int]  # CUDA's compute capability
TENSOR_CORES: Capability = (8, 0)
MOST_ELEMENTS = 1 << 31  # that offsets of 32 bits reach: they are signed
MOST_BYTES = 1 << 32  # of an array, up to which Pallas computes offsets for Triton in 32 bits


@dataclass(frozen=True, slots=True)
class Body[Name]:
    """An implementation, and why it is no kernel where kernels would be expected."""

    implementation: Name
    why: str = ""


class Device(NamedTuple):
    """What decides which kernels run on a device.

    Attributes:
        platform: "cpu", "cuda" or another name that JAX has for it.
        kind: what the device calls itself.
        capability: its compute capability, None where there is no such thing.
    """

    platform: str
    kind: str = ""
    capability: Capability | None = None

    def problem(self) -> str:
        """Why no Triton kernel runs on it; empty if they do."""
        if self.capability is None:
            return f"there are kernels for NVIDIA GPUs only, not for {self.platform}"
        if self.capability < TENSOR_CORES:
            return "the GPU is older than compute capability 8.0"
        if not _known(self.kind):
            return f"this version of JAX does not know {self.kind!r} well enough"
        return ""


def out_of_reach(elements: int, itemsize: int) -> bool:
    """Whether Triton kernels would miss some elements of an array: Pallas makes their offsets too
    narrow where it has few bytes but many elements."""
    return elements > MOST_ELEMENTS and elements * itemsize <= MOST_BYTES


def _known(kind: str) -> bool:
    """Whether Pallas can compile for GPUs that call themselves so."""
    words = f" {kind.replace('-', ' ')} "
    return any(f" {gpu.value} " in words for gpu in triton.GpuVersion)
