"""Command R7B and A: as Command R; only layers with a window know positions."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_types, require
from jaxinfer.models.cohere import features
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs

__all__ = [
    "config_from_hf",
    "embed",
    "hf_sources",
    "layer",
    "layer_context",
    "param_specs",
    "unembed",
]


def config_from_hf(hf: dict[str, Any], rope: Any) -> ModelConfig:
    """See `Family`."""
    require("cohere2", hf, hidden_act=("silu",))
    pattern = hf.get("sliding_window_pattern", 4)
    slides = layer_types(hf, lambda i: (i + 1) % pattern != 0)
    window = LayerKind(hf["sliding_window"])
    kinds = tuple(window if slide else LayerKind(rope="none") for slide in slides)
    return dense_config("cohere2", hf, rope, kinds=kinds, **features(hf))
