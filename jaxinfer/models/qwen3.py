"""Qwen 3: Llama with normed queries and keys (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.qwen2 import window_kinds

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
    require("qwen3", hf, hidden_act=("silu",))
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "kinds": window_kinds(hf),
    }
    return dense_config("qwen3", hf, rope, **features)
