"""Gemma 2: soft caps, norms on both sides, windows on every other layer (arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, layer_windows, require
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
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
SHARED: dict[str, Any] = {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh"}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("gemma2", hf, hidden_activation=("gelu_pytorch_tanh",), attention_bias=(False, None))
    kinds = tuple(map(LayerKind, layer_windows(hf, lambda i: i % 2 == 0)))
    return dense_config(
        "gemma2",
        hf,
        rope,
        kinds=kinds,
        embedding_multiplier=hf["hidden_size"] ** 0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=hf.get("attn_logit_softcapping"),
        logit_soft_cap=hf.get("final_logit_softcapping"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
        **SHARED,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, NORMS)
