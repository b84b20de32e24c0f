"""Mixtral: Mistral with experts (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, MoeConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.moe import MIXTRAL_NAMES

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
    require("mixtral", hf, hidden_act=("silu",))
    kind = LayerKind(hf.get("sliding_window"), moe=True)
    moe = MoeConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf["intermediate_size"],
    )
    return dense_config("mixtral", hf, rope, kinds=(kind,) * hf["num_hidden_layers"], moe=moe)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, experts=MIXTRAL_NAMES)
