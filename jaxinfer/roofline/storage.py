"""Ways of storing weights and pages, and the bytes they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.page_dtypes import in_8_bits
from jaxinfer.quantization.kinds import KINDS, NONE, Activations, Kind, Layout, kinds_on

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


_UNITS = {"int8": "int8", "float8_e4m3fn": "float8"}  # by what activations are rounded to


def kind_called(name: str | None) -> Kind | None:
    """The kind of weights of that name; None for none. Raises ValueError naming what is known."""
    if name in (None, NONE):
        return None
    if name not in (known := kinds_on("cuda")):
        raise ValueError(f"quantization is {name!r}; known: {NONE}, {', '.join(known)}")
    return KINDS[name]


def stored_so(layout: Layout, activations: Activations) -> Storage:
    """How weights in a layout lie in memory that meet such activations."""
    sizes = (jnp.dtype(part).itemsize for part in (layout.scales, layout.zeros) if part)
    bits, unit = layout.bits * layout.terms, _UNITS.get(activations)
    return Storage(bits, layout.group or None, layout.rows, 8 * sum(sizes), unit)


def page_entry_bytes(dtype: str, dims: int) -> int:
    """Bytes of a key or value of one head: quantised ones have a scale beside them."""
    return dims * jnp.dtype(dtype).itemsize + (SCALE_BYTES if in_8_bits(dtype) else 0)
