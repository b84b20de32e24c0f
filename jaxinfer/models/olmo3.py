"""OLMo 3: OLMo 2 with windows, whose layers do not scale their rotation."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, layer_windows, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.olmo2 import NORMS
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


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("olmo3", hf, hidden_act=("silu",))
    windows, bias = layer_windows(hf, lambda i: (i + 1) % 4 != 0), bool(hf.get("attention_bias"))
    features: dict[str, Any] = {"norms": "post", "qk_norm": "all", "qkv_bias": bias, "o_bias": bias}
    return dense_config(
        "olmo3",
        hf,
        rope,
        kinds=tuple(LayerKind(w, "global" if w is None else "local") for w in windows),
        local_rope=local_rope_config(hf, rope.theta),
        **features,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, NORMS)
