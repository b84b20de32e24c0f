"""OLMo 1: Llama with layer norms that have neither weight nor bias (arXiv:2402.00838)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import dense_config, require
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
    """See `Family`. Its files do not tell the norms' epsilon."""
    require("olmo", hf, hidden_act=("silu",))
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {
        "norm_type": "layer",
        "norm_weight": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "qkv_clip": hf.get("clip_qkv"),
    }
    return dense_config("olmo", hf | {"rms_norm_eps": 1e-5}, rope, **features)
