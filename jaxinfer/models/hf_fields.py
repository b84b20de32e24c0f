"""Every field of config.json that a family reads, and what it may be: the one place that says it.

A family reads its fields through `HfConfig`, which knows no others, so no value reaches the
arithmetic of a config unchecked. Upper bounds are far above any model there is: larger values are
damaged files, and would make the model answer NaN.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.field_rules import (
    FLAG,
    SETTINGS,
    TEXT,
    Rule,
    integer,
    list_of,
    number,
    one_of,
)

VOCABULARY = integer(1, 1 << 24)
WIDTH = integer(1, 1 << 20)
INNER = integer(1, 1 << 22)
LAYERS = integer(1, 1 << 12)
LAYER = integer(0, 1 << 12)  # a layer, or how many layers
HEADS = integer(1, 1 << 14)
POSITIONS = integer(1, 1 << 30)
EXPERTS = integer(1, 1 << 16)
EPSILON = number(0, 1, above=True)
FACTOR = number(1e-6, 1e4)  # within float16, and its inverse too in float32
BASE = number(1, 1e15, above=True)
PART = number(0, 1, above=True)

_FLAGS = (
    "attention_bias", "attention_out_bias", "bias", "mlp_bias", "multi_query",
    "new_decoder_architecture", "norm_topk_prob", "parallel_attn", "qk_layernorm", "qkv_bias",
    "rope_interleave", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "tie_word_embeddings", "truncate", "use_bias", "use_parallel_residual", "use_qk_norm",
    "use_qkv_bias", "use_sliding_window",
)  # fmt: skip
_BY_RULE: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    # null is false, as transformers has it where it takes null at all
    (FLAG.or_null(), _FLAGS),
    (TEXT, ("model_type",)),
    (TEXT.or_null(), ("dtype", "torch_dtype", "rope_type", "topk_method", "type")),
    (list_of(TEXT).or_null(), ("architectures", "layer_types")),
    (
        SETTINGS.or_null(),
        (
            "compression_config", "dual_chunk_attention_config", "full_attention",
            "quantization_config",
            "rope_parameters", "rope_scaling", "sliding_attention", "text_config",
        ),
    ),
    (VOCABULARY, ("vocab_size",)),
    (WIDTH, ("hidden_size", "n_embd")),
    (INNER, ("ffn_dim", "intermediate_size", "moe_intermediate_size")),
    (INNER.or_null(), ("ffn_hidden_size", "n_inner")),
    (integer(0, 1 << 22), ("shared_expert_intermediate_size",)),
    (LAYERS, ("n_layer", "num_hidden_layers")),
    (LAYERS, ("decoder_sparse_step", "no_rope_layer_interval", "sliding_window_pattern")),
    (LAYER, ("max_window_layers",)),
    (LAYER.or_null(), ("first_k_dense_replace",)),
    (list_of(LAYER).or_null(), ("mlp_only_layers",)),
    (list_of(one_of(0, 1)).or_null(), ("no_rope_layers",)),
    (HEADS, ("n_head", "num_attention_heads")),
    (HEADS.or_null(), ("head_dim", "num_key_value_heads", "num_kv_heads")),
    (HEADS, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "v_head_dim")),
    (HEADS.or_null(), ("q_lora_rank",)),
    (one_of(1, 2).or_null(), ("num_ln_in_parallel_attn",)),
    (POSITIONS, ("chunk_size", "max_position_embeddings", "n_ctx", "n_positions")),
    (POSITIONS.or_null(), ("original_max_position_embeddings", "sliding_window")),
    (EXPERTS, ("n_routed_experts", "num_experts", "num_experts_per_tok", "num_local_experts")),
    (EXPERTS, ("n_group", "topk_group")),
    (integer(0, 1 << 10).or_null(), ("n_shared_experts",)),
    (
        EPSILON,
        ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"),
    ),
    (
        FACTOR,
        (
            "attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling",
            "query_pre_attn_scalar", "residual_multiplier", "routed_scaling_factor",
            "swiglu_alpha", "swiglu_limit",
        ),
    ),
    (FACTOR.or_null(), ("attn_logit_softcapping", "clip_qkv", "final_logit_softcapping")),
    (BASE.or_null(), ("rope_local_base_freq", "rope_theta", "rotary_emb_base")),
    (PART.or_null(), ("partial_rotary_factor", "rotary_pct")),
    (
        FACTOR.or_null(),
        (
            "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
            "low_freq_factor",
        ),
    ),
    (number(0, 100).or_null(), ("mscale", "mscale_all_dim")),
    (list_of(FACTOR).or_null(), ("divisors", "long_factor", "short_factor")),
)  # fmt: skip
FIELDS: dict[str, Rule] = {name: rule for rule, names in _BY_RULE for name in names}


class HfConfig(dict[str, Any]):
    """A parsed config.json, or settings within it, whose fields are checked as they are read.

    Reading raises ValueError naming the field: it is missing, null where it must not be, or has a
    value that it cannot have. A field without a rule cannot be read (LookupError).
    """

    def __getitem__(self, key: str) -> Any:
        """The value of a field that must be there."""
        if key not in self:
            raise ValueError(f"config.json lacks {key!r}")
        value = _rule(key).check(key, super().__getitem__(key))
        if value is None:
            raise ValueError(f"{key} is null; expected {_rule(key).what}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, null included where it means something; `default` without it."""
        rule = _rule(key)
        return rule.check(key, super().__getitem__(key)) if key in self else default

    def settings(self, key: str) -> HfConfig:
        """The settings by name that a field has; none when it is absent or null."""
        return type(self)(self.get(key) or {})

    def __or__(self, other: Any) -> HfConfig:  # type: ignore[override]
        return type(self)({**self, **other})


def _rule(key: str) -> Rule:
    if key not in FIELDS:
        raise LookupError(f"no rule says what {key!r} may be; FIELDS should")
    return FIELDS[key]
