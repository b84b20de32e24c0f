"""OLMoE: experts in every layer, normed queries and keys (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, MoeConfig
from jaxinfer.models.base import dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
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
    """See `Family`."""
    require("olmoe", hf, hidden_act=("silu",), clip_qkv=(None,))
    moe = MoeConfig(
        num_experts=hf["num_local_experts" if "num_local_experts" in hf else "num_experts"],
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf["intermediate_size"],
        normalised=bool(hf.get("norm_topk_prob", False)),
    )
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {"qk_norm": "all", "qkv_bias": bias, "o_bias": bias}
    kinds = (LayerKind(moe=True),) * hf["num_hidden_layers"]
    return dense_config("olmoe", hf, rope, kinds=kinds, moe=moe, **features)
