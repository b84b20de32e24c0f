"""SmolLM3: Llama in which some layers do not rotate."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_windows, require
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
    require("smollm3", hf, hidden_act=("silu",))
    count, bias = hf["num_hidden_layers"], bool(hf.get("attention_bias"))
    interval = hf.get("no_rope_layer_interval", 4)
    # A list of ones and zeros: 1 rotates. Without it every interval-th layer does not.
    rotates = hf.get("no_rope_layers")
    if rotates is None:
        rotates = [(i + 1) % interval != 0 for i in range(count)]
    if len(rotates) != count:
        raise ValueError(
            f"no_rope_layers has {len(rotates)} entries for num_hidden_layers = {count}"
        )
    slides = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
    windows = layer_windows(hf, lambda i: slides and not rotates[i])
    kinds = tuple(
        LayerKind(window, "global" if turn else "none") for window, turn in zip(windows, rotates)
    )
    features: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias")),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
    }
    return dense_config("smollm3", hf, rope, kinds=kinds, **features)
