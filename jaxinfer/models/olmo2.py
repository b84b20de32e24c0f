"""OLMo 2: norms after each half, and of all queries and keys together (arXiv:2501.00656)."""

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
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("olmo2", hf, hidden_act=("silu",), clip_qkv=(None,))
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {"norms": "post", "qk_norm": "all", "qkv_bias": bias, "o_bias": bias}
    return dense_config("olmo2", hf, rope, **features)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, NORMS)
