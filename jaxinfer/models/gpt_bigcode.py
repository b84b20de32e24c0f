"""StarCoder 1 and SantaCoder: GPT-2 with one key/value head (arXiv:2305.06161)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.gpt2 import FEATURES, MODULES, NORMS, sizes
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
    """See `Family`. Whatever it says of softmax, ours is in float32."""
    require("gpt_bigcode", hf, add_cross_attention=(False, None), rope_scaling=(None,))
    one = {"num_key_value_heads": 1} if hf.get("multi_query", True) else {}
    return dense_config(
        "gpt_bigcode",
        sizes("gpt_bigcode", hf) | one,
        rope,
        kinds=(LayerKind(rope="none"),) * hf["n_layer"],
        activation=activation("gpt_bigcode", hf, "activation_function", "gelu_pytorch_tanh"),
        attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
        **FEATURES,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`. Rows of one head follow each other, be it one for all queries or each one's."""
    sources = decoder_params.hf_sources(c, NORMS, fused_qkv="qkv_proj", modules=MODULES)
    return {
        path: dataclasses.replace(source, combine=None) if ".qkv" in path else source
        for path, source in sources.items()
    }
