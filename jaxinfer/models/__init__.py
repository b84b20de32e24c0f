"""Model families by name. A new family is a new file and one line here."""

from __future__ import annotations

from typing import cast

from jaxinfer.models import llama
from jaxinfer.models.base import Family

FAMILIES: dict[str, Family] = {"llama": cast(Family, llama)}


def family_of(name: str) -> Family:
    """The family of that name. Raises ValueError naming the known ones."""
    if name not in FAMILIES:
        raise ValueError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
