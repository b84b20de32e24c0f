"""What the GGUF files of DeepSeek's architecture say: latent attention and many small experts."""

from __future__ import annotations

from jaxinfer.checkpoints.gguf_metadata import HfConfig, Metadata

_SOFTMAX, _SIGMOID = 1, 2
# Older files do not tell groups. As published, by the number of experts: V3 and R1, V2, Kimi K2,
# and the small ones.
_PUBLISHED_GROUPS = {256: (8, 4), 160: (8, 3), 384: (1, 1), 64: (1, 1)}


def deepseek2(get: Metadata) -> HfConfig:
    """V2 chooses experts by softmax, V3 by sigmoid. A file says what a head's key and value
    measure; newer ones in keys of their own, and of the latent they share under the usual ones.

    Raises ValueError naming the key that contradicts that, or without which nothing is known.
    """
    rotary, rank = get("rope.dimension_count"), get("attention.kv_lora_rank")
    latent = get("attention.key_length"), get("attention.value_length")
    key = get("attention.key_length_mla", 0) or latent[0]
    value = get("attention.value_length_mla", 0) or latent[1]
    kv_heads, heads = get.one("attention.head_count_kv"), get.one("attention.head_count")
    shared = latent == (rank + rotary, rank) and kv_heads == 1
    if not shared and (latent != (key, value) or kv_heads != heads):
        raise ValueError(
            f"deepseek2.attention.key_length, value_length = {latent} and head_count_kv = "
            f"{kv_heads} are neither those of a head nor of the latent"
        )
    scoring = get("expert_gating_func", _SOFTMAX) or _SOFTMAX
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise ValueError(f"deepseek2.expert_gating_func = {scoring} is not supported")
    groups, most = _groups(get)
    limited = "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "model_type": "deepseek_v2" if scoring == _SOFTMAX else "deepseek_v3",
        "topk_method": limited if scoring == _SOFTMAX else "noaux_tc",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": rotary,
        "q_lora_rank": get("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "first_k_dense_replace": get("leading_dense_block_count", 0),
        "n_routed_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get.one("expert_feed_forward_length"),
        "n_shared_experts": get("expert_shared_count", 0),
        "norm_topk_prob": bool(get("expert_weights_norm", False)),
        "routed_scaling_factor": get.number("expert_weights_scale"),
        "n_group": groups,
        "topk_group": most,
        "rope_parameters": _rope(get),
    }


def _groups(get: Metadata) -> tuple[int, int]:
    experts = get("expert_count")
    if not get("expert_group_count", 0):
        if experts not in _PUBLISHED_GROUPS:
            raise ValueError(
                f"deepseek2.expert_group_count is missing, and of {experts} experts no published "
                "model tells it"
            )
        return _PUBLISHED_GROUPS[experts]
    return get("expert_group_count"), get("expert_group_used_count")


def _rope(get: Metadata) -> HfConfig:
    """YaRN's magnitude scales, always equal, are told as a tenth of them."""
    rope = get.rope()
    if rope["rope_type"] == "yarn":
        scale = round(10 * get.number("rope.scaling.yarn_log_multiplier"), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope
