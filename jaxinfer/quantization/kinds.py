"""The ways to store weights in few bits: one table. Host only, so that help is instant."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.field_rules import FLAG, integer, one_of

Activations = Literal["as_given", "int8", "int8_pair", "float8_e4m3fn"]
Values = Literal["int8", "float8_e4m3fn", "int4", "float4_e2m1fn"]
BITS: dict[str, int] = {"int8": 8, "float8_e4m3fn": 8, "int4": 4, "float4_e2m1fn": 4}
SMALLEST_GROUP = 16  # columns: with fewer, scales take what the values save


@dataclass(frozen=True, slots=True)
class Layout:
    """How one matrix [N, K] is stored.

    Attributes:
        values: what an entry is. int4: 0 to 15, meant as the difference from a zero point;
            float4_e2m1fn: MXFP4's (OCP Microscaling Formats specification 1.0).
        group: consecutive columns that share a scale; 0: all of a row.
        rows: rows that share it.
        terms: values an entry is the sum of; the second is for what the first leaves over.
        zeros: groups have zero points of their own, of this dtype, in place of 8; of int4 only.
        order: columns are sorted by group, and a product's other operand has to be as well.
        scales: their dtype.
    """

    values: Values = "int8"
    group: int = 0
    rows: int = 1
    terms: int = 1
    zeros: Literal["", "uint8", "float32"] = ""
    order: bool = False
    scales: str = "float32"

    @property
    def bits(self) -> int:
        """Of a value."""
        return BITS[self.values]

    @property
    def storage(self) -> tuple[str, int]:
        """What kinds that can serve each other's weights have in common."""
        return self.values, self.terms

    def fitted(self, columns: int) -> Layout | None:
        """It with groups that divide so many columns; None: there are none."""
        if self.bits == 4 and columns % 2:
            return None
        if self.values == "float4_e2m1fn":
            return self if columns % self.group == 0 else None
        group = self.group
        while group and columns % group:
            group = group // 2 if group > SMALLEST_GROUP else 0
        rows = self.rows if group else 1
        return (
            None if self.group and not group else dataclasses.replace(self, group=group, rows=rows)
        )

    def describe(self) -> str:
        """In words."""
        block = f"{self.rows} x {self.group} blocks" if self.rows > 1 else f"groups of {self.group}"
        extra = [
            block if self.group else "one scale a row",
            *(["two terms"] if self.terms == 2 else []),
            *(["zero points"] if self.zeros else []),
            *(["sorted columns"] if self.order else []),
        ]
        return f"{self.values}, {', '.join(extra)}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layout:
        """Raises ValueError for what is no layout."""
        for name, rule in _RULES.items():
            rule.check(f"layout {data}: {name}", data.get(name))
        layout = Layout(**data)
        if layout.zeros and layout.values != "int4":
            raise ValueError(f"layout {data}: zero points are of int4 only")
        return layout


_RULES = {  # of a layout's fields
    "values": one_of(*BITS),
    "group": integer(0, 1 << 30),
    "rows": integer(1, 1 << 30),
    "terms": one_of(1, 2),
    "zeros": one_of("", "uint8", "float32"),
    "order": FLAG,
    "scales": one_of("float32", "bfloat16", "float16"),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How the weights of products are stored, and how they are multiplied.

    Attributes:
        layout: of every weight, as far as it fits; weights that were read so may have others of
            the same storage.
        activations: how the other operand is rounded before a product: not at all, to int8 or
            float8 with a scale a token (Dettmers et al. 2022, arXiv:2208.07339), or to two int8
            terms.
        platforms: of devices that it is served on.
        what: in words.
        vocabulary: of the embedding and the head, which answers depend on most; None: they stay
            numbers.
    """

    layout: Layout
    activations: Activations
    platforms: tuple[str, ...]
    what: str
    vocabulary: Layout | None = None

    @property
    def stored(self) -> Values:
        """What an entry of its own layout is."""
        return self.layout.values

    @property
    def products(self) -> int:
        """Products of one term with another that a product is made of."""
        return self.layout.terms * (2 if self.activations == "int8_pair" else 1)


NONE, AUTO = "none", "auto"
_INT8, _PAIRS, _FLOAT8 = Layout(), Layout(terms=2), Layout("float8_e4m3fn")
_INT4 = Layout("int4", 128, zeros="uint8")
_MXFP4 = Layout("float4_e2m1fn", 32, scales="bfloat16")
_BLOCKS = Layout("float8_e4m3fn", 128, 128)
_CPU, _ALL = ("cpu",), ("cpu", "cuda")
KINDS = {
    "int8": Kind(_INT8, "as_given", _ALL, "int8 weights; activations as they are", _INT8),
    "w8a8": Kind(_INT8, "int8", _ALL, "int8 weights and activations", _INT8),
    "w8a8-hl": Kind(_INT8, "int8_pair", _CPU, "int8 weights, activations in two int8 terms", _INT8),
    "w16a16": Kind(
        _PAIRS, "int8_pair", _CPU, "weights and activations in two int8 terms each", _PAIRS
    ),
    "int4": Kind(_INT4, "as_given", _ALL, "int4 weights in groups of up to 128", _INT8),
    "mxfp4": Kind(_MXFP4, "as_given", _ALL, "4-bit floats in groups of 32"),
    "fp8": Kind(_FLOAT8, "as_given", _ALL, "float8 weights"),
    "fp8-block": Kind(_BLOCKS, "as_given", _ALL, "float8 weights, 128 x 128 blocks"),
    "w8a8-fp8": Kind(_FLOAT8, "float8_e4m3fn", _ALL, "float8 weights and activations"),
}
# By platform, as measured (docs/quantisation.md): the fastest whose answers stay close.
_AUTO = {"cpu": "w8a8-hl"}


def kinds_on(platform: str) -> list[str]:
    """Names of the kinds that devices of a platform serve."""
    return [name for name, kind in KINDS.items() if platform in kind.platforms]


def check_name(name: str | None) -> None:
    """Raise ValueError for a name that is no kind, none or auto."""
    if name is not None and name not in (NONE, AUTO, *KINDS):
        raise ValueError(f"quantization is {name!r}; choose {NONE}, {AUTO}, {', '.join(KINDS)}")


def alike(one: str, other: str) -> bool:
    """Whether weights that are stored in one kind can be served in the other."""
    return KINDS[one].layout.storage == KINDS[other].layout.storage


def choose(asked: str | None, stored: str, platform: str) -> str:
    """The kind to serve in: as `asked` (None: as stored), for weights that are stored in a kind.

    Raises ValueError when the stored weights or the platform do not allow it.
    """
    check_name(asked)
    if asked is None or (asked == AUTO and stored != NONE):
        asked = stored
    elif asked == AUTO:
        asked = _AUTO.get(platform, NONE)
    if NONE not in (stored, asked) and not alike(asked, stored):
        same = [name for name in KINDS if alike(name, stored)]
        raise ValueError(
            f"quantization is {asked!r}, but the checkpoint's weights are stored as {stored}, "
            f"which can be served as {', '.join(same)} or {NONE}; for others, take the original "
            "checkpoint"
        )
    if asked != NONE and platform not in (allowed := KINDS[asked].platforms):
        raise ValueError(
            f"quantization is {asked!r}, which is served on {', '.join(allowed)} only so far, not "
            f"on {platform}; serve without (--quantization {NONE})"
        )
    return asked
