"""GLM 4 of the first release and GLM-Edge: as GLM 4 without norms after the halves."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
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
    require("glm", hf, hidden_act=("silu",))
    features: dict[str, Any] = {
        "qkv_bias": bool(hf.get("attention_bias", True)),
        "rope_pairs": "neighbours",
    }
    return dense_config("glm", hf, rope, rotary_part=0.5, **features)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, fused_gate_up="gate_up_proj")
