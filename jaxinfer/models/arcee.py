"""AFM of Arcee: Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import activation, dense_config
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
    bias = bool(hf.get("attention_bias"))
    return dense_config(
        "arcee",
        hf,
        rope,
        gated=False,
        activation=activation("arcee", hf, "hidden_act", "relu2"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )
