"""What the GGUF files of older families, and of those with latent attention, look like.

Beside `tiny_gguf.py`, and as it apart from the loader's tables.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH as ARCH
from gguf import MODEL_TENSOR as T

ARCHITECTURES = {
    "gpt2": ARCH.GPT2,
    "gpt_bigcode": ARCH.STARCODER,
    "gpt_neox": ARCH.GPTNEOX,
    "deepseek_v2": ARCH.DEEPSEEK2,
    "deepseek_v3": ARCH.DEEPSEEK2,
    "gemma": ARCH.GEMMA,
    "starcoder2": ARCH.STARCODER2,
    "stablelm": ARCH.STABLELM,
    "phi": ARCH.PHI2,
    "cohere": ARCH.COMMAND_R,
    "cohere2": ARCH.COHERE2,
    "falcon": ARCH.FALCON,
    "olmo": ARCH.OLMO,
    "nemotron": ARCH.NEMOTRON,
    "arcee": ARCH.ARCEE,
    "ernie4_5": ARCH.ERNIE4_5,
    "seed_oss": ARCH.SEED_OSS,
}
NAMES = {
    "transformer.wte": T.TOKEN_EMBD,
    "transformer.wpe": T.POS_EMBD,
    "transformer.ln_f": T.OUTPUT_NORM,
    "transformer.word_embeddings": T.TOKEN_EMBD,
    "gpt_neox.embed_in": T.TOKEN_EMBD,
    "gpt_neox.final_layer_norm": T.OUTPUT_NORM,
    "embed_out": T.OUTPUT,
    "model.final_layernorm": T.OUTPUT_NORM,
    "ln_1": T.ATTN_NORM,
    "ln_2": T.FFN_NORM,
    "ln_attn": T.ATTN_NORM_2,
    "ln_mlp": T.ATTN_NORM,
    "attn.c_attn": T.ATTN_QKV,
    "attn.c_proj": T.ATTN_OUT,
    "attention.query_key_value": T.ATTN_QKV,
    "attention.dense": T.ATTN_OUT,
    "self_attention.query_key_value": T.ATTN_QKV,
    "self_attention.dense": T.ATTN_OUT,
    "self_attn.dense": T.ATTN_OUT,
    "self_attn.q_layernorm": T.ATTN_Q_NORM,
    "self_attn.k_layernorm": T.ATTN_K_NORM,
    "self_attn.q_a_proj": T.ATTN_Q_A,
    "self_attn.q_b_proj": T.ATTN_Q_B,
    "self_attn.kv_a_proj_with_mqa": T.ATTN_KV_A_MQA,
    "self_attn.kv_b_proj": T.ATTN_KV_B,
    "self_attn.q_a_layernorm": T.ATTN_Q_A_NORM,
    "self_attn.kv_a_layernorm": T.ATTN_KV_A_NORM,
    "mlp.c_fc": T.FFN_UP,
    "mlp.c_proj": T.FFN_DOWN,
    "mlp.dense_h_to_4h": T.FFN_UP,
    "mlp.dense_4h_to_h": T.FFN_DOWN,
    "mlp.fc1": T.FFN_UP,
    "mlp.fc2": T.FFN_DOWN,
    "mlp.shared_experts.gate_proj": T.FFN_GATE_SHEXP,
    "mlp.shared_experts.up_proj": T.FFN_UP_SHEXP,
    "mlp.shared_experts.down_proj": T.FFN_DOWN_SHEXP,
    "mlp.gate.e_score_correction": T.FFN_EXP_PROBS_B,
}
NORMS = {"seed_oss": {"post_attention_layernorm": T.ATTN_POST_NORM}}
TRANSPOSED = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
EPS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


def usual(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with the usual names of sizes beside its own, and what it leaves out."""
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }
    hf = hf | {ours: hf[own] for ours, own in names.items() if own in hf}
    inner = hf.get("ffn_hidden_size") or hf.get("n_inner") or hf.get("intermediate_size")
    kv_heads = hf.get("num_kv_heads") or hf.get("num_key_value_heads")
    filled = {
        "head_dim": hf["hidden_size"] // hf["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return filled | hf | {
        "intermediate_size": inner,
        "num_key_value_heads": kv_heads or hf["num_attention_heads"],
    }  # fmt: skip


def without_biases(held: dict[str, np.ndarray], *modules: str) -> dict[str, np.ndarray]:
    return {n: t for n, t in held.items() if not n.endswith(tuple(f"{m}.bias" for m in modules))}


def grouped_last(hf: dict[str, Any], value: np.ndarray) -> np.ndarray:
    """Rows that lie by key/value head: all queries, then all keys, then all values."""
    hf = usual(hf)
    kv = hf["num_key_value_heads"]
    rows = value.reshape(kv, hf["num_attention_heads"] // kv + 2, hf["head_dim"], *value.shape[1:])
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])


def latents_apart(hf: dict[str, Any], held: dict[str, np.ndarray]) -> dict[str, Any]:
    """The file's tensors as newer ones have them: what makes keys transposed, and what values."""
    made: dict[str, Any] = {}
    heads, nope = hf["num_attention_heads"], hf["qk_nope_head_dim"]
    for i in range(hf["num_hidden_layers"]):
        both = held[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        both = both.reshape(heads, -1, hf["kv_lora_rank"])
        made[f"blk.{i}.attn_kv_b.weight"] = None
        made[f"blk.{i}.attn_k_b.weight"] = both[:, :nope].swapaxes(1, 2)
        made[f"blk.{i}.attn_v_b.weight"] = both[:, nope:]
    return made


def of_latents(hf: dict[str, Any]) -> dict[str, Any]:
    """The metadata that goes with them."""
    rank, rotary = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    sizes = {
        "head_count_kv": 1,
        "key_length": rank + rotary,
        "value_length": rank,
        "key_length_mla": hf["qk_nope_head_dim"] + rotary,
        "value_length_mla": hf["v_head_dim"],
    }
    return {f"deepseek2.attention.{name}": size for name, size in sizes.items()}


def add_latents(writer: gguf.GGUFWriter, family: str, hf: dict[str, Any]) -> None:
    """What converters write for DeepSeek's models, beside the sizes."""
    writer.add_key_length(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
    writer.add_value_length(hf["v_head_dim"])
    if hf["q_lora_rank"]:
        writer.add_q_lora_rank(hf["q_lora_rank"])
    writer.add_kv_lora_rank(hf["kv_lora_rank"])
    writer.add_leading_dense_block_count(hf["first_k_dense_replace"])
    writer.add_expert_count(hf["n_routed_experts"])
    writer.add_expert_used_count(hf["num_experts_per_tok"])
    writer.add_expert_shared_count(hf["n_shared_experts"])
    writer.add_expert_group_count(hf["n_group"])
    writer.add_expert_group_used_count(hf["topk_group"])
    writer.add_expert_weights_scale(hf["routed_scaling_factor"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * hf["rope_parameters"]["mscale_all_dim"])
    if family == "deepseek_v3":
        writer.add_expert_weights_norm(hf["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
