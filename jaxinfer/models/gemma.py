"""Gemma 1: scaled embeddings and norms that multiply by weight + 1 (arXiv:2403.08295)."""

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


TANH = "gelu_pytorch_tanh"


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`. The first files say "gelu" and mean its tanh form, as they were trained."""
    require("gemma", hf, hidden_act=(TANH, "gelu"), hidden_activation=(None, TANH))
    require("gemma", hf, attention_bias=(False, None), use_bidirectional_attention=(None, False))
    return dense_config(
        "gemma",
        hf,
        rope,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_multiplier=hf["hidden_size"] ** 0.5,
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )
