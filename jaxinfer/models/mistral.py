"""Mistral: Llama whose layers may see a sliding window (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
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
    require("mistral", hf, hidden_act=("silu",))
    window = hf.get("sliding_window", 4096)
    kinds = (LayerKind(window),) * hf["num_hidden_layers"] if window else ()
    return dense_config("mistral", hf, rope, kinds=kinds)
