"""Files of a model that was saved without its head: names lack what all others begin with.

GPT-2 as published has `wte.weight` where a whole model's file has `transformer.wte.weight`.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.checkpoints.source import Tensors
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of


def complete_names(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The same tensors under the names of a whole model, if that is all that is wrong with them."""
    wanted = family_of(config.family).hf_sources(config)
    (embed,) = wanted["embed"].tensors
    prefix, _, rest = embed.partition(".")
    if embed in tensors.shapes or rest not in tensors.shapes:
        return tensors
    known = {name for source in wanted.values() for name in source.tensors}
    own = {name if name in known else f"{prefix}.{name}": name for name in tensors.shapes}
    return _Renamed(tensors, own)


class _Renamed:
    """Tensors under other names: `own` maps those to the tensors' own."""

    def __init__(self, tensors: Tensors, own: dict[str, str]):
        self._tensors, self._own = tensors, own
        self.shapes = {name: tensors.shapes[inner] for name, inner in own.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors.read(self._own[name])

    def storage(self, name: str) -> tuple[str, int]:
        return self._tensors.storage(self._own[name])

    def where(self, name: str) -> str:
        return self._tensors.where(self._own[name])
