"""dots.llm1: Qwen 3's attention and experts as DeepSeek V3 chooses them (arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import dense_config, layer_windows, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.deepseek_v2 import MOE_DEFAULTS, moe_config, moe_layers
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
    # Its files call the way of choosing by the name that DeepSeek's have for the method.
    require("dots1", hf, hidden_act=("silu",), scoring_func=("noaux_tc", "sigmoid", None))
    defaults = MOE_DEFAULTS | {"norm_topk_prob": False}
    hf = hf | {key: value for key, value in defaults.items() if key not in hf}
    first, window = hf.get("max_window_layers", 62), hf.get("sliding_window")
    windows = layer_windows(hf, lambda i: window is not None and i >= first)
    sparse = moe_layers(hf, first=0)
    bias = bool(hf.get("attention_bias"))
    features: dict[str, Any] = {
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "moe": moe_config(hf, "sigmoid", True),
        "kinds": tuple(LayerKind(w, moe=m) for w, m in zip(windows, sparse, strict=True)),
    }
    return dense_config("dots1", hf, rope, **features)
