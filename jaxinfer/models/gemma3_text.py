"""Gemma 3, text: five layers with a window and their own rotary base to one without
(arXiv:2503.19786).
"""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_windows, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.gemma2 import SHARED, hf_sources
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.rope_config import local_rope_config

__all__ = [
    "config_from_hf",
    "embed",
    "hf_sources",
    "layer",
    "layer_context",
    "param_specs",
    "unembed",
]


PATTERN = 6  # the last of so many layers sees everything


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require(
        "gemma3_text",
        hf,
        hidden_activation=("gelu_pytorch_tanh",),
        attention_bias=(False, None),
        use_bidirectional_attention=(False, None),
    )
    every = hf.get("sliding_window_pattern", PATTERN)
    windows = layer_windows(hf, lambda i: (i + 1) % every != 0)
    kinds = tuple(LayerKind(w, "global" if w is None else "local") for w in windows)
    return dense_config(
        "gemma3_text",
        hf,
        rope,
        kinds=kinds,
        local_rope=local_rope_config(hf, 10_000.0),
        qk_norm="head",
        embedding_multiplier=hf["hidden_size"] ** 0.5,
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=hf.get("attn_logit_softcapping"),
        logit_soft_cap=hf.get("final_logit_softcapping"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
        **SHARED,
    )
