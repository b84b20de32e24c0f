"""StableLM: Llama with layer norms, of which part of each head rotates (arXiv:2402.17834)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config
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
    """See `Family`. Halves side by side share a norm."""
    return dense_config(
        "stablelm",
        hf,
        rope,
        rotary_part=0.25,
        eps="layer_norm_eps",
        activation=activation("stablelm", hf, "hidden_act", "silu"),
        norm_type="layer",
        norm_bias=True,
        norms="shared" if hf.get("use_parallel_residual") else "pre",
        qkv_bias=bool(hf.get("use_qkv_bias", False)),
        qk_norm="each" if hf.get("qk_layernorm") else "none",
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    sources = decoder_params.hf_sources(c)
    for i in range(c.num_layers if c.qk_norm == "each" else 0):
        for x, heads in (("q", c.num_heads), ("k", c.num_kv_heads)):
            norms = f"model.layers.{i}.self_attn.{x}_layernorm.norms."
            names: dict[str, tuple[int, ...]] = {
                f"{norms}{head}.weight": (c.head_dim,) for head in range(heads)
            }
            sources[f"layers.{i}.{x}_norm"] = HfSource(names, _stack)
    return sources


def _stack(*parts: Any) -> Any:
    return parts[0].__array_namespace__().stack(parts)
