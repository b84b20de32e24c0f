"""GPT-2: learned positions, layer norms, plain MLPs, biases everywhere (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable
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


NORMS = {"attn_norm": "ln_1", "mlp_norm": "ln_2"}
MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
}
TRANSPOSED = ("qkv", "o", "up", "down")  # its files hold them (in, out)
FEATURES: dict[str, Any] = {
    "norm_type": "layer",
    "norm_bias": True,
    "learned_positions": True,
    "gated": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
}


def config_from_hf(hf: HfConfig, rope: Any) -> ModelConfig:
    """See `Family`.

    `reorder_and_upcast_attn` asks for scores in float32 where the model is in half precision,
    which they always are here.
    """
    require("gpt2", hf, add_cross_attention=(False, None), rope_scaling=(None,))
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx"))
    return dense_config(
        "gpt2",
        sizes("gpt2", hf),
        rope,
        kinds=tuple(
            LayerKind(rope="none", query_scale=1 / (i + 1) if by_layer else 1.0)
            for i in range(hf["n_layer"])
        ),
        activation=activation("gpt2", hf, "activation_function", "gelu_new"),
        attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
        **FEATURES,
    )


def sizes(family: str, hf: HfConfig, tied: bool = True) -> HfConfig:
    """The sizes as others name them; `tied` is what a file that does not say means."""
    width, positions = hf["n_embd"], hf["n_positions"]
    if hf.get("n_ctx", positions) != positions:
        raise ValueError(f"{family}: n_ctx = {hf['n_ctx']} contradicts n_positions = {positions}")
    sizes = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": width,
        "intermediate_size": hf.get("n_inner") or 4 * width,
        "num_hidden_layers": hf["n_layer"],
        "num_attention_heads": hf["n_head"],
        "max_position_embeddings": positions,
        "rms_norm_eps": hf["layer_norm_epsilon"],
        "tie_word_embeddings": hf.get("tie_word_embeddings", tied),
    }
    return HfConfig(sizes)


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    sources = decoder_params.hf_sources(c, NORMS, fused_qkv="qkv_proj", modules=MODULES)
    return {
        path: _transposed(source) if path.rpartition(".")[2] in TRANSPOSED else source
        for path, source in sources.items()
    }


def _transposed(source: HfSource) -> HfSource:
    """The same from tensors that are stored the other way round."""
    combine: Callable[..., Any] = source.combine or (lambda weight: weight)
    return HfSource(
        {name: shape[::-1] for name, shape in source.tensors.items()},
        lambda *parts: combine(*(part.T for part in parts)),
    )
