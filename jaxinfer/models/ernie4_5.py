"""ERNIE 4.5: Llama in which neighbouring pairs rotate."""

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
    require("ernie4_5", hf, hidden_act=("silu",))
    bias, tied = bool(hf.get("use_bias")), bool(hf.get("tie_word_embeddings", True))
    biases: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    how: dict[str, Any] = {"rope_pairs": "neighbours", "tie_embeddings": tied}
    return dense_config("ernie4_5", hf, rope, **biases, **how)
