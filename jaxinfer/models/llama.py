"""Llama 1 to 3.3 and plain descendants: SmolLM2, TinyLlama, Yi and others.

Touvron et al. 2023 (arXiv:2302.13971).
"""

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
    require("llama", hf, hidden_act=("silu",))
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias")),
    }
    return dense_config("llama", hf, rope, **features)
