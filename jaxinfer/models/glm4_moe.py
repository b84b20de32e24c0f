"""GLM 4.5 to 4.7: grouped-query attention, half of each head rotates, and experts as DeepSeek V3
chooses them (arXiv:2508.06471)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.deepseek_v2 import MOE_DEFAULTS, moe_config, moe_layers
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
    """See `Family`. The layers that predict further tokens are no part of it."""
    require("glm4_moe", hf, hidden_act=("silu",), scoring_func=("sigmoid", None))
    hf = hf | {key: value for key, value in MOE_DEFAULTS.items() if key not in hf}
    features: dict[str, Any] = {
        "qkv_bias": bool(hf.get("attention_bias")),
        "qk_norm": "head" if hf.get("use_qk_norm") else "none",
        "moe": moe_config(hf, "sigmoid", True),
        "kinds": tuple(LayerKind(moe=sparse) for sparse in moe_layers(hf, first=1)),
    }
    return dense_config("glm4_moe", hf, rope, rotary_part=0.5, **features)
