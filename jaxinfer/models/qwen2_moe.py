"""Qwen 1.5 and 2 with experts, one of them shared (arXiv:2407.10671)."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, MoeConfig
from jaxinfer.models.base import dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.qwen2 import window_kinds

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
    require("qwen2_moe", hf, hidden_act=("silu",))
    moe = dataclasses.replace(moe_config(hf), shared_size=hf["shared_expert_intermediate_size"])
    bias = bool(hf.get("qkv_bias", True))
    return dense_config("qwen2_moe", hf, rope, qkv_bias=bias, kinds=moe_kinds(hf), moe=moe)


def moe_config(hf: HfConfig) -> MoeConfig:
    """The mixture as Qwen's files describe it."""
    return MoeConfig(
        num_experts=hf["num_local_experts" if "num_local_experts" in hf else "num_experts"],
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf["moe_intermediate_size"],
        normalised=bool(hf.get("norm_topk_prob", False)),
    )


def moe_kinds(hf: HfConfig) -> tuple[LayerKind, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    count, step = hf["num_hidden_layers"], hf.get("decoder_sparse_step", 1)
    dense, windows = hf.get("mlp_only_layers") or (), window_kinds(hf)
    return tuple(
        LayerKind(
            windows[i].window if windows else None,
            moe=i not in dense and (i + 1) % step == 0,
        )
        for i in range(count)
    )
