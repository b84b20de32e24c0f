"""GPT-J: halves side by side after one norm, leading pairs of a head rotate."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.gpt2 import sizes
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
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn": "attn",
    "up_proj": "fc_in",
    "down_proj": "fc_out",
}
FEATURES: dict[str, Any] = {
    "norm_type": "layer",
    "norm_bias": True,
    "norms": "shared",
    "rope_pairs": "neighbours",
    "gated": False,
    "mlp_bias": True,
    "head_bias": True,
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("gptj", hf, rotary=(True,), scale_attn_weights=(True,))
    shape, rotary = sizes("gptj", hf, tied=False), hf["rotary_dim"]
    whole = rotary == shape["hidden_size"] // shape["num_attention_heads"]
    return dense_config(
        "gptj",
        shape,
        rope,
        rotary_dim=None if whole else rotary,
        activation=activation("gptj", hf, "activation_function", "gelu_new"),
        **FEATURES,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, {"attn_norm": "ln_1"}, modules=MODULES)
