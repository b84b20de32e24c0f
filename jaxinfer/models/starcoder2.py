"""StarCoder 2: layer norms, plain MLPs, biases, a window (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import decoder_params
from jaxinfer.models.base import HfSource, activation, dense_config, require
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


MODULES = {"up_proj": "c_fc", "down_proj": "c_proj"}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`."""
    require("starcoder2", hf, mlp_type=("default",), norm_type=("layer_norm",))
    window, bias = hf.get("sliding_window"), bool(hf.get("use_bias", True))
    return dense_config(
        "starcoder2",
        hf,
        rope,
        eps="norm_epsilon",
        kinds=(LayerKind(window),) * hf["num_hidden_layers"] if window else (),
        activation=activation("starcoder2", hf, "hidden_act", "gelu_pytorch_tanh"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
        norm_type="layer",
        norm_bias=True,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    return decoder_params.hf_sources(c, modules=MODULES)
