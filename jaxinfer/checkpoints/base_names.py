"""Files whose names begin otherwise than those of a whole model of the family.

Of a model that was saved without its head names lack what all others begin with: GPT-2 as published
has `wte.weight` where a whole model's file has `transformer.wte.weight`. In those of a model that
takes pictures too the text part is `language_model.…` or, since transformers 4.52,
`model.language_model.…`.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from jaxinfer.checkpoints.packed import Packed
from jaxinfer.checkpoints.source import Tensors
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.rounding import Rounded

logger = logging.getLogger(__name__)

_TEXT = {"language_model.": "", "model.language_model.": "model."}
_PICTURES = ("vision_tower", "multi_modal_projector")


def text_tensors(tensors: Tensors, config: ModelConfig) -> tuple[Tensors, ModelConfig]:
    """Those of the text part of a model that takes pictures too, any other's as they are.

    Whether the part has a head of its own is seen from its tensors: such files' configs contradict
    themselves about it.
    """
    begins = next((p for p in _TEXT if any(name.startswith(p) for name in tensors.shapes)), None)
    if begins is None:
        return tensors, config
    own, ignored = {}, set[str]()
    for name in tensors.shapes:
        part = name.removeprefix("model.").partition(".")[0]
        if part in _PICTURES:
            ignored.add(part)
        else:
            inner = name.removeprefix(begins)
            own[name if inner == name else _TEXT[begins] + inner] = name
    if ignored:
        logger.info("%s: ignored: the text part alone is served", ", ".join(sorted(ignored)))
    tied = "lm_head.weight" not in own
    return _renamed(tensors, own), dataclasses.replace(config, tie_embeddings=tied)


def complete_names(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The same tensors under the names of a whole model, if that is all that is wrong with them."""
    wanted = family_of(config.family).hf_sources(config)
    (embed,) = wanted["embed"].tensors
    prefix, _, rest = embed.partition(".")
    if embed in tensors.shapes or rest not in tensors.shapes:
        return tensors
    known = {name for source in wanted.values() for name in source.tensors}
    own = {name if name in known else f"{prefix}.{name}": name for name in tensors.shapes}
    return _renamed(tensors, own)


def _renamed(tensors: Tensors, own: dict[str, str]) -> Tensors:
    if isinstance(tensors, Packed):
        return _RenamedPacked(tensors, tensors, own)
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


class _RenamedPacked(_Renamed):
    """Tensors under other names of which some are stored in few bits; see `packed.Packed`."""

    def __init__(self, tensors: Tensors, packed: Packed, own: dict[str, str]):
        super().__init__(tensors, own)
        self._packed, self.kind, self.notes = packed, packed.kind, packed.notes

    def layout(self, name: str) -> Layout | None:
        return self._packed.layout(self._own[name])

    def packed(self, name: str) -> Rounded:
        return self._packed.packed(self._own[name])

    def order(self, name: str) -> np.ndarray | None:
        return self._packed.order(self._own[name])
