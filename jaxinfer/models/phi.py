"""Phi 1, 1.5 and 2: halves side by side after one norm, biases everywhere (arXiv:2309.05463)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
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


MODULES = {
    "model.norm": "model.final_layernorm",
    "o_proj": "dense",
    "up_proj": "fc1",
    "down_proj": "fc2",
}
FEATURES: dict[str, Any] = {
    "norm_type": "layer",
    "norm_bias": True,
    "norms": "shared",
    "gated": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "head_bias": True,
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("phi", hf, qk_layernorm=(False, None))
    gelu = activation("phi", hf, "hidden_act", "gelu_new")
    how: dict[str, Any] = {"rotary_part": 0.5, "eps": "layer_norm_eps", "activation": gelu}
    return dense_config("phi", hf, rope, **how, **FEATURES)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, modules=MODULES)
