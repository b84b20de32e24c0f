"""gpt-oss: attention sinks, windows on every other layer, experts with biases, stored as MXFP4
(OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, MoeConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, dense_config, layer_windows, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import param_specs
from jaxinfer.models.expert_tensors import interleaved_sources
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
    require("gpt_oss", hf, hidden_act=("silu",))
    windows = layer_windows(hf, lambda i: i % 2 == 0)
    bias = bool(hf.get("attention_bias", True))
    moe = MoeConfig(
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf["intermediate_size"],
        bias=True,
        swiglu_limit=float(hf.get("swiglu_limit", 7.0)),
        swiglu_alpha=float(hf.get("swiglu_alpha", 1.702)),
    )
    return dense_config(
        "gpt_oss",
        hf,
        rope,
        kinds=tuple(LayerKind(window, moe=True) for window in windows),
        moe=moe,
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    assert c.moe is not None
    sources = decoder_params.hf_sources(c)
    for i in range(c.num_layers):
        mlp = f"model.layers.{i}.mlp."
        apart = {x: sources[f"layers.{i}.{x}"] for x in ("experts_gate_up", "experts_down")}
        own = {
            "router": HfSource({f"{mlp}router.weight": (c.moe.num_experts, c.hidden_size)}),
            "router_bias": HfSource({f"{mlp}router.bias": (c.moe.num_experts,)}),
            **interleaved_sources(c, c.moe, f"{mlp}experts.", apart),
        }
        sources |= {f"layers.{i}.{name}": source for name, source in own.items()}
    return sources
