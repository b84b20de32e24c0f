"""GLM 4: norms on both sides, half of each head rotates in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, require
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


NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("glm4", hf, hidden_act=("silu",))
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {"qkv_bias": bias, "norms": "both", "rope_pairs": "neighbours"}
    return dense_config("glm4", hf, rope, rotary_part=0.5, **features)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, NORMS, fused_gate_up="gate_up_proj")
