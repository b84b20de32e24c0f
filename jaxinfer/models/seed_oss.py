"""Seed-OSS: Llama with biases of queries, keys and values."""

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
    require("seed_oss", hf, hidden_act=("silu",))
    features: dict[str, Any] = {
        "qkv_bias": bool(hf.get("attention_bias", True)),
        "o_bias": bool(hf.get("attention_out_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
    }
    return dense_config("seed_oss", hf, rope, **features)
