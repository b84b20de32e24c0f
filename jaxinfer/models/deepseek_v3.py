"""DeepSeek V3 and R1: V2 with experts chosen by sigmoid scores and a learned correction
(arXiv:2412.19437)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.deepseek_v2 import deepseek_config, moe_config
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
    require(
        "deepseek_v3",
        hf,
        scoring_func=("sigmoid", None),
        topk_method=("noaux_tc", None),
    )
    pairs = "neighbours" if hf.get("rope_interleave", True) else "halves"
    return deepseek_config("deepseek_v3", hf, rope, pairs, moe_config(hf, "sigmoid", True))
