"""Phi 3 and 4: Llama with fused projections in its files, and longrope (arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, require
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


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("phi3", hf, hidden_act=("silu",), attention_bias=(False, None))
    window = hf.get("sliding_window")
    kinds = (LayerKind(window),) * hf["num_hidden_layers"] if window else ()
    return dense_config("phi3", hf, rope, kinds=kinds)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, fused_qkv="qkv_proj", fused_gate_up="gate_up_proj")
