"""Command R: halves side by side after one layer norm without bias, scaled logits."""

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
    """See `Family`."""
    require("cohere", hf, hidden_act=("silu",))
    qk_norm = "each" if hf.get("use_qk_norm") else "none"
    return dense_config("cohere", hf, rope, qk_norm=qk_norm, **features(hf))


def features(hf: HfConfig) -> dict[str, Any]:
    """What all Command models have."""
    bias = bool(hf.get("attention_bias"))
    return {
        "eps": "layer_norm_eps",
        "norm_type": "layer",
        "norms": "shared",
        "rope_pairs": "neighbours",
        "qkv_bias": bias,
        "o_bias": bias,
        "logit_multiplier": float(hf["logit_scale"]),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
    }
