"""Qwen 2 and 2.5: Llama with biased queries, keys and values (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_windows, require
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
    require("qwen2", hf, hidden_act=("silu",))
    return dense_config("qwen2", hf, rope, qkv_bias=True, kinds=window_kinds(hf))


def window_kinds(hf: HfConfig) -> tuple[LayerKind, ...]:
    """Layers from `max_window_layers` on see a window, if the model uses one at all."""
    used, first = bool(hf.get("use_sliding_window")), hf.get("max_window_layers", 0)
    windows = layer_windows(hf, lambda i: used and i >= first)
    return tuple(map(LayerKind, windows)) if used else ()
