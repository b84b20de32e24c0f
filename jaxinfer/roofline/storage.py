"""Ways of storing weights and pages, and the bytes they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.page_dtypes import in_8_bits

SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Storage:
    """How a quantised weight [N, K] lies in memory, and what its products run on.

    Attributes:
        bits: of an entry.
        group: consecutive entries of a row that share a scale; None: the whole row does.
        rows: rows that share it.
        scale_bits: of a scale, with its zero point if there is one.
        unit: the type that is multiplied; None: entries become numbers of the activations' type.
    """

    bits: int
    group: int | None = None
    rows: int = 1
    scale_bits: int = 8 * SCALE_BYTES
    unit: str | None = None

    def weight_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight [rows, columns], scales included."""
        scales = math.ceil(rows / self.rows) * math.ceil(columns / (self.group or columns))
        return math.ceil((rows * columns * self.bits + scales * self.scale_bits) / 8)


STORAGES = {
    "int8": Storage(8),
    "int4": Storage(4, group=128, scale_bits=16 + 4),
    "fp8": Storage(8),
    "fp8-block": Storage(8, group=128, rows=128),
    "w8a8-int8": Storage(8, unit="int8"),
    "w8a8-fp8": Storage(8, unit="float8"),
}


def storage_called(name: str | None) -> Storage | None:
    """The way of that name; None for none. Raises ValueError naming those that are known."""
    if name in (None, "none"):
        return None
    if name not in STORAGES:
        raise ValueError(f"quantization is {name!r}; known: none, {', '.join(STORAGES)}")
    return STORAGES[name]


def page_entry_bytes(dtype: str, dims: int) -> int:
    """Bytes of a key or value of one head: quantised ones have a scale beside them."""
    return dims * jnp.dtype(dtype).itemsize + (SCALE_BYTES if in_8_bits(dtype) else 0)
