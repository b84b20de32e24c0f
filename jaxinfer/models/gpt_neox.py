"""GPT-NeoX and Pythia: halves side by side, part of each head rotates (arXiv:2204.06745)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config
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
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "model.norm": "gpt_neox.final_layer_norm",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "lm_head": "embed_out",
}
FEATURES: dict[str, Any] = {
    "norm_type": "layer",
    "norm_bias": True,
    "gated": False,
    "mlp_bias": True,
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    bias = bool(hf.get("attention_bias", True))
    return dense_config(
        "gpt_neox",
        hf | {"partial_rotary_factor": hf.get("rotary_pct", hf.get("partial_rotary_factor"))},
        rope,
        rotary_part=0.25,
        eps="layer_norm_eps",
        activation=activation("gpt_neox", hf, "hidden_act", "gelu"),
        parallel=bool(hf.get("use_parallel_residual", True)),
        qkv_bias=bias,
        o_bias=bias,
        **FEATURES,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`. Rows of a head's query, key and value follow each other, as ours do."""
    sources = decoder_params.hf_sources(c, fused_qkv="qkv_proj", modules=MODULES)
    return {
        path: dataclasses.replace(source, combine=None) if ".qkv" in path else source
        for path, source in sources.items()
    }
