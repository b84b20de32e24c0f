"""DeepSeek V2 and its Lite and Coder forms: latent attention and many small experts
(arXiv:2405.04434)."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import LayerKind, MlaConfig, ModelConfig, MoeConfig
from jaxinfer.models.base import dense_config, require
from jaxinfer.models.decoder import embed, layer, layer_context, unembed
from jaxinfer.models.decoder_params import hf_sources, param_specs
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.rope import yarn_magnitude
from jaxinfer.models.rope_config import rope_settings

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
    require(
        "deepseek_v2",
        hf,
        scoring_func=("softmax", None),
        topk_method=("greedy", "group_limited_greedy", None),
        mlp_bias=(False, None),
        # No published model has it, and those who compute it disagree about the scaling factor.
        norm_topk_prob=(False, None),
    )
    limited = hf.get("topk_method") == "group_limited_greedy"
    moe = moe_config(hf, "softmax", limited) if "n_routed_experts" in hf else None
    return deepseek_config("deepseek_v2", hf, rope, "neighbours", moe)


def deepseek_config(
    family: str, hf: HfConfig, rope: Any, rope_pairs: str, moe: MoeConfig | None
) -> ModelConfig:
    """What V2 and V3 have in common. The cached head is the latent and the shared key."""
    require(family, hf, hidden_act=("silu",), moe_layer_freq=(1, None))
    for settings in (hf, rope_settings(hf)):  # the part that rotates has a size of its own
        require(family, settings, partial_rotary_factor=(1, None))
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(
            f"{family}: num_key_value_heads = {kv_heads} is not supported (only "
            f"num_attention_heads = {heads}: all heads share one latent)"
        )
    bias = bool(hf.get("attention_bias"))
    mla = MlaConfig(
        kv_rank=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
        q_rank=hf.get("q_lora_rank"),
        bias=bias,
    )
    if mla.rope_dim % 2:
        raise ValueError(f"{family}: qk_rope_head_dim = {mla.rope_dim} is odd; RoPE rotates pairs")
    features: dict[str, Any] = {
        "mla": mla,
        "num_kv_heads": 1,
        "head_dim": mla.kv_rank + mla.rope_dim,
        "rotary_dim": mla.rope_dim,
        "rope_pairs": rope_pairs,
        "attention_scale": (mla.nope_dim + mla.rope_dim) ** -0.5 * _magnitude(hf) ** 2,
        "o_bias": bias,
        "moe": moe,
    }
    if moe:
        features["kinds"] = tuple(LayerKind(moe=sparse) for sparse in moe_layers(hf, first=0))
    return dense_config(family, hf, rope, **features)


# Of those that take V3's experts for their own, what files need not say.
MOE_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def moe_layers(hf: HfConfig, first: int) -> list[bool]:
    """Which layers have experts: from `first_k_dense_replace` on, or `first` without."""
    dense = hf.get("first_k_dense_replace", first) or 0
    return [i >= dense for i in range(hf["num_hidden_layers"])]


def moe_config(hf: HfConfig, scoring: Any, limited: bool) -> MoeConfig:
    """The mixture, whose choice is `limited` to some groups. Raises ValueError for sizes that
    leave too few experts to choose from."""
    moe = MoeConfig(
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf["moe_intermediate_size"],
        normalised=bool(hf.get("norm_topk_prob", scoring == "sigmoid")),
        shared_size=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
        shared_gated=False,
        scoring=scoring,
        groups=hf["n_group"] if limited else 1,
        top_groups=hf["topk_group"] if limited else 1,
        weight_scale=float(hf["routed_scaling_factor"]),
    )
    groups, most = moe.groups, moe.top_groups
    in_group = moe.num_experts // groups
    least = 2 if scoring == "sigmoid" and groups > 1 else 1
    if not 1 <= most <= groups or moe.num_experts % groups or in_group < least:
        raise ValueError(
            f"n_group = {groups}, topk_group = {most}: expected topk_group of at most n_group "
            f"groups, into which n_routed_experts = {moe.num_experts} divide, of {least} or more"
        )
    if not 1 <= moe.top_k <= most * in_group:
        raise ValueError(
            f"num_experts_per_tok = {moe.top_k}, expected 1 to {most * in_group}, the experts of "
            f"{most} of {groups} groups"
        )
    return moe


def _magnitude(hf: HfConfig) -> float:
    """YaRN's factor on queries and on keys, of which `mscale_all_dim` gives the weight; the
    rotary tables take what `mscale` says beyond it."""
    scaling = rope_settings(hf)
    all_dim = scaling.get("mscale_all_dim")
    return yarn_magnitude(float(scaling["factor"]), float(all_dim)) if all_dim else 1.0
