"""GPUs as their makers describe them: memory, and rates of memory, arithmetic and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.platform import allocator_fraction

T = 1e12
GB = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Bytes, bytes a second, operations a second.

    Attributes:
        name: what the device calls itself.
        memory: what a driver reports as usable, rounded down, not the number on the box.
        memory_bandwidth: bytes a second from and to its memory.
        rates: operations a second by the type of what is multiplied, without sparsity. Types of
            16 bits run on tensor cores with float32 sums; "float32" is that of the other cores.
        link_bandwidth: bytes a second that it can send to the others of its host, one direction.
        source: where the figures are from.
    """

    name: str
    memory: int
    memory_bandwidth: float
    rates: Mapping[str, float]
    link_bandwidth: float
    source: str

    # The interface `memory_plan.plan_memory` reads of a device.
    platform = "cuda"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(self.memory * allocator_fraction())}

    def rate(self, dtype: str) -> float:
        """Operations a second on that type. Raises ValueError where no unit takes it."""
        rate = self.rates.get("bfloat16" if dtype == "float16" else dtype)
        if rate is None:
            raise ValueError(
                f"{self.name} has no unit for products of {dtype}; it has some for "
                f"{', '.join(self.rates)}"
            )
        return rate


def _rates(
    bfloat16: float, int8: float, float32: float, float8: float | None = None
) -> dict[str, float]:
    given = {"bfloat16": bfloat16, "int8": int8, "float8": float8, "float32": float32}
    return {name: rate * T for name, rate in given.items() if rate is not None}


DEVICES = {
    "h200": Device(
        "NVIDIA H200", 139 << 30, 4800 * GB, _rates(790, 1979, 67, 1979), 450 * GB,
        "H200 data sheet; bfloat16 as measured on such a card (the sheet has 989)",
    ),
    "h100": Device(
        "NVIDIA H100 SXM", 79 << 30, 3350 * GB, _rates(989, 1979, 67, 1979), 450 * GB,
        "H100 data sheet",
    ),
    "h20": Device(
        "NVIDIA H20", 95 << 30, 4000 * GB, _rates(148, 296, 44, 296), 450 * GB, "H20 data sheet"
    ),
    "b200": Device(
        "NVIDIA B200", 178 << 30, 8000 * GB, _rates(2250, 4500, 75, 4500), 900 * GB,
        "HGX B200 data sheet, an eighth of it",
    ),
    "a100": Device(
        "NVIDIA A100 SXM", 79 << 30, 2039 * GB, _rates(312, 624, 19.5), 300 * GB,
        "A100 80GB data sheet",
    ),
    "l40": Device(
        "NVIDIA L40", 44 << 30, 864 * GB, _rates(181, 362, 90.5, 362), 32 * GB,
        "L40 data sheet; links are PCIe 4",
    ),
    "l40s": Device(
        "NVIDIA L40S", 44 << 30, 864 * GB, _rates(362, 733, 91.6, 733), 32 * GB,
        "L40S data sheet; links are PCIe 4",
    ),
    "l4": Device(
        "NVIDIA L4", 22 << 30, 300 * GB, _rates(121, 242.5, 30.3, 242.5), 32 * GB,
        "L4 data sheet; links are PCIe 4",
    ),
    "a10": Device(
        "NVIDIA A10", 22 << 30, 600 * GB, _rates(125, 250, 31.2), 32 * GB,
        "A10 data sheet; links are PCIe 4",
    ),
    "rtx4090": Device(
        "NVIDIA GeForce RTX 4090", 23 << 30, 1008 * GB, _rates(165, 661, 82.6, 330), 32 * GB,
        "Ada architecture paper, 16- and 8-bit floats with float32 sums; links are PCIe 4",
    ),
    "rtx5090": Device(
        "NVIDIA GeForce RTX 5090", 31 << 30, 1792 * GB, _rates(209, 838, 105, 419), 64 * GB,
        "Blackwell RTX architecture paper, floats with float32 sums; links are PCIe 5",
    ),
}  # fmt: skip


# What devices call themselves, where that is not their name here. Others of the same family (PCIe,
# NVL, 40 GB) have other rates and are not known.
_KINDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}


def device_called(name: str) -> Device:
    """The device of that short name, or that calls itself so.

    Raises ValueError naming those that are known.
    """
    short = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    by_kind = {device.name: short for short, device in DEVICES.items()} | _KINDS
    found = DEVICES.get(by_kind.get(name, short))
    if found is None:
        raise ValueError(f"{name!r} is no known device; known: {', '.join(DEVICES)}")
    return found
