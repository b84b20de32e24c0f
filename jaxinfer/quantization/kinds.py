"""The ways to store weights in few bits: one table. Host only, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activations = Literal["as_given", "int8", "int8_pair", "float8_e4m3fn"]
Stored = Literal["int8", "int4", "float8_e4m3fn"]
CHANNEL = (1, 0)  # one scale for all weights of an output


@dataclass(frozen=True, slots=True)
class Kind:
    """How the weights of products are stored, and how they are multiplied.

    Attributes:
        terms: values a weight is the sum of; the second is for what the first leaves over.
        activations: how the other operand is rounded before a product: not at all, to 8 bits with
            a scale a token (Dettmers et al. 2022, arXiv:2208.07339), or to two int8 terms.
        platforms: of devices that it is served on.
        what: in words.
        stored: of what type a value is.
        block: outputs and inputs that share a scale, at most; `CHANNEL`: all inputs of one output.
        vocabulary: whether the embedding and the head are stored so too.
    """

    terms: int
    activations: Activations
    platforms: tuple[str, ...]
    what: str
    stored: Stored = "int8"
    block: tuple[int, int] = CHANNEL
    vocabulary: bool = True

    @property
    def products(self) -> int:
        """Products of one term with another that a product is made of."""
        return self.terms * (2 if self.activations == "int8_pair" else 1)

    @property
    def dequantised(self) -> bool:
        """Whether XLA makes numbers of the weights to multiply with them."""
        return self.activations == "as_given" or self.stored == "float8_e4m3fn"

    @property
    def storage(self) -> tuple[int, Stored, tuple[int, int], bool]:
        """What two kinds agree on whose weights are stored alike."""
        return self.terms, self.stored, self.block, self.vocabulary


NONE, AUTO = "none", "auto"
_CPU, _ALL = ("cpu",), ("cpu", "cuda")
_FLOAT8: Literal["float8_e4m3fn"] = "float8_e4m3fn"
KINDS = {
    "int8": Kind(1, "as_given", _ALL, "int8 weights; activations as they are"),
    "w8a8": Kind(1, "int8", _ALL, "int8 weights and activations"),
    "w8a8-hl": Kind(1, "int8_pair", _CPU, "int8 weights, activations in two int8 terms"),
    "w16a16": Kind(2, "int8_pair", _CPU, "weights and activations in two int8 terms each"),
    "int4": Kind(
        1, "as_given", _ALL, "int4 weights in groups of up to 128", "int4", (1, 128), False
    ),
    "fp8": Kind(1, "as_given", _ALL, "float8 weights", _FLOAT8, CHANNEL, False),
    "fp8-block": Kind(
        1, "as_given", _ALL, "float8 weights in blocks of 128 × 128", _FLOAT8, (128, 128), False
    ),
    "w8a8-fp8": Kind(1, _FLOAT8, _ALL, "float8 weights and activations", _FLOAT8, CHANNEL, False),
}
# By platform, as measured (docs/quantisation.md): the fastest whose answers stay close.
_AUTO = {"cpu": "w8a8-hl"}


def check_name(name: str | None) -> None:
    """Raise ValueError for a name that is no kind, none or auto."""
    if name is not None and name not in (NONE, AUTO, *KINDS):
        raise ValueError(f"quantization is {name!r}; choose {NONE}, {AUTO}, {', '.join(KINDS)}")


def choose(asked: str | None, stored: str, platform: str) -> str:
    """The kind to serve in: as `asked` (None: as stored), for weights that are stored in a kind.

    Raises ValueError when the stored weights or the platform do not allow it.
    """
    check_name(asked)
    if asked is None or (asked == AUTO and stored != NONE):
        asked = stored
    elif asked == AUTO:
        asked = _AUTO.get(platform, NONE)
    if stored != NONE and (asked == NONE or KINDS[asked].storage != KINDS[stored].storage):
        same = [name for name, kind in KINDS.items() if kind.storage == KINDS[stored].storage]
        raise ValueError(
            f"quantization is {asked!r}, but the checkpoint's weights are stored as {stored}, "
            f"which can be served as {' or '.join(same)}; for others, take the original checkpoint"
        )
    if asked != NONE and platform not in (allowed := KINDS[asked].platforms):
        raise ValueError(
            f"quantization is {asked!r}, which is served on {', '.join(allowed)} only so far, not "
            f"on {platform}; serve without (--quantization {NONE})"
        )
    return asked
