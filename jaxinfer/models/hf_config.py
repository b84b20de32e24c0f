"""Hugging Face config.json → ModelConfig: the family is chosen by `model_type`.

What we do not compute is refused by name, never ignored. What a field may be: `hf_fields.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from jaxinfer.config import ModelConfig, MoeConfig, RopeConfig
from jaxinfer.field_rules import Rule, integer, number, shown
from jaxinfer.models import family_of
from jaxinfer.models.base import require
from jaxinfer.models.hf_fields import (
    BASE,
    EPSILON,
    EXPERTS,
    FACTOR,
    HEADS,
    INNER,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    HfConfig,
)
from jaxinfer.models.hf_quantization import hf_storage
from jaxinfer.models.rope_config import rope_config
from jaxinfer.models.text_part import text_settings

logger = logging.getLogger(__name__)

# What fields of a ModelConfig may be, whatever they come from.
_MODEL: dict[str, Rule] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": HEADS,
    "head_dim": integer(1, 1 << 15),  # of latents: two parts
    "max_position": POSITIONS,
    "rms_norm_eps": EPSILON,
    "embedding_multiplier": FACTOR,
    "residual_multiplier": FACTOR,
    "logit_multiplier": number(1e-6, 1e6),  # or the inverse of a factor
    "scale": number(1e-6, 1e6),
    "attention_soft_cap": FACTOR.or_null(),
    "logit_soft_cap": FACTOR.or_null(),
    "qkv_clip": FACTOR.or_null(),
}
_MOE: dict[str, Rule] = {
    "num_experts": EXPERTS,
    "top_k": EXPERTS,
    "intermediate_size": INNER,
    "shared_size": integer(0, 1 << 22),
    "weight_scale": FACTOR,
    "swiglu_limit": FACTOR.or_null(),
    "swiglu_alpha": FACTOR,
}
_ROPE: dict[str, Rule] = {
    "theta": BASE,
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "original_max_position": POSITIONS,
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "attention_factor": FACTOR.or_null(),
}
_WHOLE_MODELS = ("ForCausalLM", "LMHeadModel")  # GPT-2's is from before there was a common one
_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}  # model_type of the same model by another name
# They change what a model computes, without a tensor of their own, and no family here follows them.
_UNCOMPUTED = (
    "add_cross_attention", "attention_chunk_size", "attn_temperature_tuning", "index_topk",
    "is_encoder_decoder", "rope_interleaved", "use_bidirectional_attention", "use_dynamic_ntk",
    "use_logn_attn",
)  # fmt: skip


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json.

    Raises ValueError naming the key: unknown model_type or architecture, missing keys, values that
    a key cannot have, features the family does not compute, quantised storage, contradictions.
    """
    if not isinstance(hf, dict):
        raise ValueError(f"config.json is {shown(hf)}, expected settings by name")
    text = text_settings(hf)
    try:
        config = _model_config(HfConfig(text))
        check_sizes(config)
    except ValueError as error:
        raise ValueError(f"text_config: {error}" if text is not hf else str(error)) from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json has a value of the wrong kind: {error}") from error
    return config


def _model_config(hf: HfConfig) -> ModelConfig:
    if hf.get("model_type", "") == "":
        raise ValueError("config.json has no model_type")
    name = _OTHER_NAMES.get(hf["model_type"], hf["model_type"])
    family = family_of(name)
    _check_architecture(name, hf.get("architectures") or [])
    require(name, hf, **dict.fromkeys(_UNCOMPUTED, (None, False)))
    hf_storage(hf)  # refuses what no reader knows
    return family.config_from_hf(_one_chunk(hf), rope_config(hf))


def _check_architecture(model_type: str, architectures: list[str]) -> None:
    """Raise ValueError unless the model's class is the one of its type, where it is named."""
    whole = [name for name in architectures if name.endswith(_WHOLE_MODELS)]
    if architectures and not whole:
        raise ValueError(f"architectures = {architectures}: only ...ForCausalLM models are served")
    wanted = {name.replace("_", "") for name in (model_type, model_type.removesuffix("_text"))}
    classes = {name.removesuffix(end) for name in whole for end in _WHOLE_MODELS}
    if whole and not wanted & {name.replace("_", "").lower() for name in classes}:
        raise ValueError(
            f"architectures = {whole} contradicts model_type = {model_type!r}: they name different "
            "models; correct the one that is wrong"
        )


def _one_chunk(hf: HfConfig) -> HfConfig:
    """The same model as far as its first chunk goes, where it has dual chunk attention (An et al.
    2024, arXiv:2402.17463): until there that is plain attention, and beyond not what we compute."""
    chunks = hf.settings("dual_chunk_attention_config")
    if not chunks:
        return hf
    if "chunk_size" not in chunks:
        raise ValueError("dual_chunk_attention_config lacks 'chunk_size'")
    longest = min(chunks["chunk_size"], hf["max_position_embeddings"])
    logger.info("dual_chunk_attention_config: served for the first chunk, of %d tokens", longest)
    return hf | {"max_position_embeddings": longest}


def check_sizes(c: ModelConfig) -> None:
    """Raise ValueError for sizes that no model can have, or that contradict one another."""
    for name, rule in _MODEL.items():
        rule.check(name, getattr(c, name))
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"num_kv_heads = {c.num_kv_heads} does not divide num_heads = {c.num_heads}"
        )
    if c.head_dim % 2 and any(c.kind(i).rope != "none" for i in range(c.num_layers)):
        raise ValueError(f"head_dim = {c.head_dim} is odd; RoPE rotates pairs")
    if c.rotary_dim is not None and not (0 < c.rotary_dim < c.head_dim and c.rotary_dim % 2 == 0):
        raise ValueError(
            f"{c.rotary_dim} of {c.head_dim} values of a head rotate, expected pairs and not all; "
            "see rotary_dim, rotary_pct or partial_rotary_factor"
        )
    for kind in c.kinds:
        POSITIONS.or_null().check("sliding_window", kind.window)
    for rope in (c.rope, c.local_rope):
        if rope is not None:
            _check_rope(rope, (c.rotary_dim or c.head_dim) // 2)
    if c.moe is not None:
        _check_moe(c.moe)


def _check_moe(m: MoeConfig) -> None:
    for name, rule in _MOE.items():
        rule.check(f"experts: {name}", getattr(m, name))
    if m.top_k > m.num_experts:
        raise ValueError(f"num_experts_per_tok = {m.top_k} of only {m.num_experts} experts")


def _check_rope(rope: RopeConfig, pairs: int) -> None:
    for name, rule in _ROPE.items():
        rule.check(f"RoPE {name}", getattr(rope, name))
    lists = {"divisors (short_factor)": rope.divisors, "long_factor": rope.long_divisors}
    wanted = {"divisors": 1, "longrope": 2}.get(rope.scaling, 0)
    for i, (name, divisors) in enumerate(lists.items()):
        for value in divisors:
            FACTOR.check(f"RoPE {name}", value)
        if len(divisors) != (pairs if i < wanted else 0):
            raise ValueError(f"RoPE {name} has {len(divisors)} values, expected {pairs}")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(
            f"RoPE low_freq_factor = {rope.low_freq_factor} is not below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
