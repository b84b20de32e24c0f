"""Falcon: halves side by side, few key/value heads (arXiv:2311.16867)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import NORMS, param_specs
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
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`. Of the newer architecture are any number of key heads, and two norms."""
    newer, heads = bool(hf.get("new_decoder_architecture")), hf["num_attention_heads"]
    norms = hf.get("num_ln_in_parallel_attn") or (2 if newer else 1)
    require("falcon", hf, alibi=(False, None), parallel_attn=(True,) if newer else (True, False))
    if norms == 2 and not newer:
        raise ValueError("falcon: num_ln_in_parallel_attn = 2 without new_decoder_architecture")
    bias, width = bool(hf.get("bias")), hf["hidden_size"]
    if newer or not hf.get("multi_query", True):
        groups = (hf.get("num_kv_heads") if newer else None) or heads
    else:
        groups = 1
    sizes = hf | {
        "num_key_value_heads": groups,
        "intermediate_size": hf.get("ffn_hidden_size") or 4 * width,
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
    }
    shared = norms == 1 and hf.get("parallel_attn", True)
    return dense_config(
        "falcon",
        sizes,
        rope,
        eps="layer_norm_epsilon",
        norm_type="layer",
        norm_bias=True,
        norms="shared" if shared else "pre",
        parallel=norms == 2,
        gated=False,
        activation=activation("falcon", hf, "activation", "gelu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`. Rows of a key/value head and its queries follow each other, as ours do."""
    norms = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"} if c.parallel else NORMS
    sources = decoder_params.hf_sources(c, norms, fused_qkv="qkv_proj", modules=MODULES)
    return {
        path: dataclasses.replace(source, combine=None) if ".qkv" in path else source
        for path, source in sources.items()
    }
