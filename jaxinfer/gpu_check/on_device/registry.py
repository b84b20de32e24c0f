"""The kernels that are run on a device: one declarative case a kernel and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Array

from jaxinfer.roofline.kernels import Work
from pallas_kernels.tuning import Tiling

Purpose = Literal["tiny", "check", "time"]
Sizes = Mapping[str, int]
Inputs = dict[str, Any]  # arrays by name, None for what a case does without
Capability = tuple[int, int]


@dataclass(frozen=True)
class Baseline:
    """Another implementation to be timed beside a kernel.

    Attributes:
        prepare: makes what it takes of the kernel's inputs; not timed.
        run: computes with that, in JAX; or else
        timed: times itself: (what was prepared, launches, runs) -> `timing.Timing`.
        gpu_only: whether it cannot be tried on a CPU.
    """

    prepare: Callable[[Inputs], Any]
    run: Callable[[Any], Any] | None = None
    timed: Callable[[Any, int, int], Any] | None = None
    gpu_only: bool = False


@dataclass(frozen=True)
class DeviceCase:
    """A kernel with the shapes of some models; see the package for its fields.

    Attributes:
        kernel / case: what it computes and whose shapes these are; together they name the case.
        compared: what of (inputs, result) must be alike; None: the result.
        oldest / newest: compute capabilities of the GPUs that have the kernel.
        interpretable: whether `run` can be interpreted on a CPU.
    """

    kernel: str
    case: str
    sizes: Mapping[Purpose, Sizes]
    make: Callable[[Sizes, Array], Inputs]
    run: Callable[[Inputs, bool, Tiling | None], Any]
    reference: Callable[[Inputs], Any]
    work: Callable[[Sizes], Work]
    tolerance: float
    tuned: tuple[str, str] | None = None
    tilings: tuple[Tiling, ...] = ()
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    feed: Callable[[Inputs, Any], Inputs] | None = None
    target: float | None = None
    compared: Callable[[Inputs, Any], Any] | None = None
    oldest: Capability = (8, 0)
    newest: Capability | None = None
    interpretable: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.case}"

    def runs_on(self, capability: Capability) -> bool:
        """Whether GPUs of this compute capability have the kernel."""
        return self.oldest <= capability and (self.newest is None or capability <= self.newest)


def device_cases() -> Iterator[DeviceCase]:
    """Every case there is."""
    # All build on this module.
    from jaxinfer.gpu_check.on_device.attention import attention_device_cases
    from jaxinfer.gpu_check.on_device.latents import latent_device_cases
    from jaxinfer.gpu_check.on_device.others import other_device_cases
    from jaxinfer.gpu_check.on_device.products import product_cases
    from jaxinfer.gpu_check.on_device.xla import xla_cases

    yield from attention_device_cases()
    yield from latent_device_cases()
    yield from product_cases()
    yield from other_device_cases()
    yield from xla_cases()


def case_called(name: str) -> DeviceCase:
    """The case of that name. Raises ValueError when there is none."""
    for case in device_cases():
        if case.name == name:
            return case
    raise ValueError(f"there is no case {name!r} for a device")
