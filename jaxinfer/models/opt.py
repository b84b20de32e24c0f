"""OPT: learned positions, layer norms, plain MLPs, biases everywhere (arXiv:2205.01068)."""

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


NORMS = {"attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
MODULES = {
    "model.norm": "model.final_layer_norm",
    "model.": "model.decoder.",
    "o_proj": "out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
FIRST_POSITION = 2  # of its table; the rows before are padding's
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
    """See `Family`. Norms after each half, and embeddings of another width, are the 350M's only."""
    require("opt", hf, do_layer_norm_before=(True,), _remove_final_layer_norm=(False,))
    require("opt", hf, enable_bias=(True,), layer_norm_elementwise_affine=(True,))
    require("opt", hf, word_embed_proj_dim=(hf["hidden_size"],))
    sizes = hf | {"intermediate_size": hf["ffn_dim"], "layer_norm_eps": 1e-5}
    return dense_config(
        "opt",
        sizes,
        rope,
        eps="layer_norm_eps",
        kinds=(LayerKind(rope="none"),) * hf["num_hidden_layers"],
        activation=activation("opt", hf, "activation_function", "relu"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
        **FEATURES,
    )


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """See `Family`."""
    sources = decoder_params.hf_sources(c, NORMS, modules=MODULES)
    (name,) = sources["positions"].tensors
    size = (c.max_position + FIRST_POSITION, c.hidden_size)
    return sources | {"positions": HfSource({name: size}, lambda table: table[FIRST_POSITION:])}
