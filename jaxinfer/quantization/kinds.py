"""The ways to store weights in few bits: one table. Host only, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activations = Literal["as_given", "int8", "int8_pair"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How the weights of products are stored, and how they are multiplied.

    Attributes:
        terms: int8 values a weight is the sum of; the second is for what the first leaves over.
            All weights of an output share one scale.
        activations: how the other operand is rounded before a product: not at all, to int8 with a
            scale a token (Dettmers et al. 2022, arXiv:2208.07339), or to two int8 terms.
        platforms: of devices that it is served on.
        what: in words.
    """

    terms: int
    activations: Activations
    platforms: tuple[str, ...]
    what: str

    @property
    def products(self) -> int:
        """Products of one term with another that a product is made of."""
        return self.terms * (2 if self.activations == "int8_pair" else 1)


NONE, AUTO = "none", "auto"
KINDS = {
    "int8": Kind(1, "as_given", ("cpu",), "int8 weights; activations as they are"),
    "w8a8": Kind(1, "int8", ("cpu",), "int8 weights and activations"),
    "w8a8-hl": Kind(1, "int8_pair", ("cpu",), "int8 weights, activations in two int8 terms"),
    "w16a16": Kind(2, "int8_pair", ("cpu",), "weights and activations in two int8 terms each"),
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
    if asked == AUTO:
        asked = _best(stored, platform)
    elif asked is None:
        asked = stored
    if stored != NONE and (asked == NONE or KINDS[asked].terms != KINDS[stored].terms):
        same = [name for name, kind in KINDS.items() if kind.terms == KINDS[stored].terms]
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


def _best(stored: str, platform: str) -> str:
    """What `auto` takes. Weights that were stored to be multiplied in a way of their own stay so;
    "int8" says nothing of activations."""
    best = _AUTO.get(platform, NONE)
    if stored == NONE:
        return best
    free = KINDS[stored].activations == "as_given" and best != NONE
    return best if free and KINDS[best].terms == KINDS[stored].terms else stored
