"""Command R7B and A: as Command R; only layers with a window know positions."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_windows, require
from jaxinfer.models.cohere import features
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.hf_fields import HfConfig

__all__ = [
    "config_from_hf",
    "embed",
    "hf_sources",
    "layer",
    "layer_context",
    "param_specs",
    "unembed",
]


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("cohere2", hf, hidden_act=("silu",))
    pattern = hf.get("sliding_window_pattern", 4)
    windows = layer_windows(hf, lambda i: (i + 1) % pattern != 0)
    kinds = tuple(LayerKind(w, "none" if w is None else "global") for w in windows)
    return dense_config("cohere2", hf, rope, kinds=kinds, **features(hf))
