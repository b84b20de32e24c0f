"""The families' oracles as GGUF files, written apart from the loader's tables.

Names and metadata keys are those of the `gguf` package; what converters do to weights (rows of
queries and keys side by side, 1 added to Gemma's norms, experts in one tensor) is done here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_gguf_older as older
from gguf import MODEL_ARCH as ARCH
from gguf import MODEL_TENSOR as T
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import ORACLE, add_tokenizer, rotate_rows, write_tokenizer

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
ARCHITECTURES = {
    "mistral": ARCH.LLAMA,
    "mixtral": ARCH.LLAMA,
    "qwen2": ARCH.QWEN2,
    "qwen2_moe": ARCH.QWEN2MOE,
    "qwen3": ARCH.QWEN3,
    "qwen3_moe": ARCH.QWEN3MOE,
    "gemma2": ARCH.GEMMA2,
    "gemma3_text": ARCH.GEMMA3,
    "phi3": ARCH.PHI3,
    "olmo2": ARCH.OLMO2,
    "olmoe": ARCH.OLMOE,
    "granite": ARCH.GRANITE,
    "smollm3": ARCH.SMOLLM3,
    "glm4": ARCH.GLM4,
    "gpt_oss": ARCH.GPT_OSS,
} | older.ARCHITECTURES
SIDE_BY_SIDE = {"llama", "mistral", "mixtral", "granite", "smollm3", "olmo", "arcee"}
PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}
LATENT = {"deepseek_v2", "deepseek_v3"}
NAMES = older.NAMES | {
    "model.embed_tokens": T.TOKEN_EMBD,
    "model.norm": T.OUTPUT_NORM,
    "lm_head": T.OUTPUT,
    "input_layernorm": T.ATTN_NORM,
    "post_attention_layernorm": T.FFN_NORM,
    "self_attn.q_proj": T.ATTN_Q,
    "self_attn.k_proj": T.ATTN_K,
    "self_attn.v_proj": T.ATTN_V,
    "self_attn.qkv_proj": T.ATTN_QKV,
    "self_attn.o_proj": T.ATTN_OUT,
    "self_attn.q_norm": T.ATTN_Q_NORM,
    "self_attn.k_norm": T.ATTN_K_NORM,
    "mlp.gate_proj": T.FFN_GATE,
    "mlp.up_proj": T.FFN_UP,
    "mlp.down_proj": T.FFN_DOWN,
    "mlp.gate_up_proj": T.FFN_UP,
    "mlp.gate": T.FFN_GATE_INP,
    "mlp.experts.gate_proj": T.FFN_GATE_EXP,
    "mlp.experts.up_proj": T.FFN_UP_EXP,
    "mlp.experts.down_proj": T.FFN_DOWN_EXP,
    "mlp.router": T.FFN_GATE_INP,
    "self_attn.sinks": T.ATTN_SINKS,
    "mlp.shared_expert.gate_proj": T.FFN_GATE_SHEXP,
    "mlp.shared_expert.up_proj": T.FFN_UP_SHEXP,
    "mlp.shared_expert.down_proj": T.FFN_DOWN_SHEXP,
    "mlp.shared_expert_gate": T.FFN_GATE_INP_SHEXP,
    "block_sparse_moe.gate": T.FFN_GATE_INP,
    "block_sparse_moe.experts.w1": T.FFN_GATE_EXP,
    "block_sparse_moe.experts.w3": T.FFN_UP_EXP,
    "block_sparse_moe.experts.w2": T.FFN_DOWN_EXP,
}
_POST = {
    "post_attention_layernorm": T.ATTN_POST_NORM,
    "post_feedforward_layernorm": T.FFN_POST_NORM,
}
_GEMMA = _POST | {"pre_feedforward_layernorm": T.FFN_PRE_NORM}
NORMS = older.NORMS | {  # of families that name or place them otherwise
    "olmo2": _POST,
    "gpt_oss": {"post_attention_layernorm": T.ATTN_POST_NORM},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4": {"post_self_attn_layernorm": T.ATTN_POST_NORM, "post_mlp_layernorm": T.FFN_POST_NORM},
}


def model_for_gguf(family: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and float32 tensors of a family's oracle.

    But for what GGUF cannot say: windows of qwen2, layers of qwen2_moe without experts, a rhythm of
    smollm3 other than one in four (of cohere2 too), another activation of gpt_oss than the
    published one, two magnitude scales of DeepSeek, and biases of its and of falcon.
    """
    folder = ORACLE.parent / family
    hf = json.loads((folder / "config.json").read_text())
    tensors = {n: t.astype(np.float32) for n, t in load_file(folder / "model.safetensors").items()}
    if family == "qwen2":
        del hf["layer_types"]
        return hf | {"use_sliding_window": False}, tensors
    if family == "gpt_oss":
        return hf | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, tensors
    if family == "qwen2_moe":
        del hf["layer_types"]
        return hf | {"num_hidden_layers": 1, "mlp_only_layers": []}, _layers(tensors, [1])
    if family == "smollm3":
        del hf["layer_types"]
        more = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
        return hf | more, _layers(tensors, [0, 1, 1, 0])
    if family == "cohere2":
        del hf["layer_types"]
        return hf | {"num_hidden_layers": 4}, _layers(tensors, [0, 0, 0, 1])
    if family == "falcon":
        modules = ("dense", "query_key_value", "dense_h_to_4h", "dense_4h_to_h")
        return hf | {"bias": False}, older.without_biases(tensors, *modules)
    if family in LATENT:
        rope = hf["rope_parameters"] | {"mscale": 0.707, "mscale_all_dim": 0.707}
        more = {"attention_bias": False, "rope_parameters": rope}
        modules = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        return hf | more, older.without_biases(tensors, *modules)
    return hf, tensors


def _layers(tensors: dict[str, np.ndarray], chosen: list[int]) -> dict[str, np.ndarray]:
    """A model whose layers are the chosen ones of another."""
    made = {name: t for name, t in tensors.items() if ".layers." not in name}
    for new, old in enumerate(chosen):
        before = f"model.layers.{old}."
        for name, tensor in tensors.items():
            if name.startswith(before):
                made[f"model.layers.{new}.{name.removeprefix(before)}"] = tensor
    return made


def family_hf_folder(folder: Path, family: str) -> Path:
    """That model as a Hugging Face folder."""
    folder.mkdir(parents=True)
    hf, tensors = model_for_gguf(family)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_family_gguf(
    path: Path,
    family: str,
    quantisation: gguf.GGMLQuantizationType = F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    experts_apart: bool = False,
    **split: Any,
) -> Path:
    """That model as a GGUF file.

    `metadata` changes keys (None: takes them away), `tensors` those of the file by their names
    there; `experts_apart` stores experts as the first such files did; `split` goes to the writer.
    """
    hf, held = model_for_gguf(family)
    arch = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], **split)
    add_metadata(writer, family, hf)
    add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    made = gguf_tensors(family, hf, held, experts_apart) | rope_tensors(hf) | (tensors or {})
    for name, value in made.items():
        if value is not None:
            matrix = value.ndim > 1 and not name.endswith(".bias")
            fits = matrix and value.shape[-1] % 32 == 0
            kind = quantisation if fits else F32
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(
    family: str, hf: dict[str, Any], held: dict[str, np.ndarray], experts_apart: bool = False
) -> dict[str, np.ndarray]:
    """The tensors as a converter stores them."""
    if family == "gpt_oss":
        held = _apart(held)
    allowed = set(gguf.MODEL_TENSORS[ARCHITECTURES[family]]) | {T.OUTPUT}
    made: dict[str, np.ndarray] = {}
    experts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, value in held.items():
        layer, rest, suffix = _parts(name)
        if found := re.search(r"\.experts\.(\d+)\.", rest):
            rest = rest.replace(found[0], ".experts.")
        elif found := re.search(r"\.norms\.(\d+)", rest):
            rest = rest.replace(found[0], "")
        tensor = NORMS.get(family, {}).get(rest) or NAMES[rest]
        assert tensor in allowed, (family, name)
        own = gguf.TENSOR_NAMES[tensor].format(bid=layer) + suffix
        if found and experts_apart:
            made[own.replace("_exps", f".{found[1]}")] = value
        elif found:
            experts.setdefault(own, []).append((int(found[1]), value))
        else:
            made[own] = _converted(family, hf, rest + suffix, value)
    for own, parts in experts.items():
        made[own] = np.stack([value for _, value in sorted(parts, key=lambda part: part[0])])
    return made


def _apart(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss with each expert by itself: gates and ups alternate, weights are transposed."""
    made: dict[str, np.ndarray] = {}
    for name, value in held.items():
        experts, _, projection = name.rpartition(".experts.")
        kind = "bias" if projection.endswith("_bias") else "weight"
        if not experts:
            made[f"{name}.weight" if name.endswith("sinks") else name] = value
            continue
        for i, part in enumerate(value.swapaxes(1, -1) if kind == "weight" else value):
            halves = {"down": part}
            if "gate_up" in projection:
                halves = {"gate": part[0::2], "up": part[1::2]}
            for half, rows in halves.items():
                made[f"{experts}.experts.{i}.{half}_proj.{kind}"] = rows
    return made


def _parts(name: str) -> tuple[str, str, str]:
    """Layer ("" outside of any), what is between, and .weight or .bias."""
    stem, _, suffix = name.replace("e_score_correction_", "e_score_correction.").rpartition(".")
    found = re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)", stem)
    return (found[1], found[2], f".{suffix}") if found else ("", stem, f".{suffix}")


def _converted(family: str, hf: dict[str, Any], name: str, value: np.ndarray) -> np.ndarray:
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    rest, _, suffix = name.rpartition(".")
    if family in SIDE_BY_SIDE and rest in heads:
        return rotate_rows(value, hf[heads[rest]])
    if family in PLUS_ONE and rest.endswith("norm") and suffix == "weight":
        return value + 1
    if family == "gpt2" and rest in older.TRANSPOSED and suffix == "weight":
        return np.ascontiguousarray(value.T)
    if family in ("gpt_neox", "falcon") and rest.endswith("query_key_value"):
        return older.grouped_last(hf, value)
    return value.reshape(-1) if rest == "mlp.shared_expert_gate" else value


def rope_tensors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = hf.get("rope_parameters", {})
    return {
        f"rope_factors_{size}.weight": np.array(rope[f"{size}_factor"], np.float32)
        for size in ("long", "short")
        if f"{size}_factor" in rope
    }


def add_metadata(writer: gguf.GGUFWriter, family: str, hf: dict[str, Any]) -> None:
    """What converters write for the architecture."""
    hf = older.usual(hf)
    rope = hf["rope_parameters"]
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    if family in LATENT:
        older.add_latents(writer, family, hf)
    else:
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    if eps := hf.get("rms_norm_eps") or hf.get("norm_eps"):
        writer.add_layer_norm_rms_eps(eps)
    if "rms_norm_eps" not in hf:
        writer.add_layer_norm_eps(next((hf[name] for name in older.EPS if name in hf), 1e-5))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(hf["head_dim"] * rope.get("partial_rotary_factor", 1)))
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        extended = hf["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors((1 + np.log(extended) / np.log(original)) ** 0.5)
    _add_features(writer, family, hf)


def _add_features(writer: gguf.GGUFWriter, family: str, hf: dict[str, Any]) -> None:
    if hf.get("sliding_window") and family != "qwen2":
        writer.add_sliding_window(hf["sliding_window"])
    if experts := hf.get("num_experts") or hf.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    if "moe_intermediate_size" in hf:
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(hf["shared_expert_intermediate_size"])
    if family in ("gemma2", "gemma3_text"):  # their own scale is that of no published size
        writer.add_attention_scale(hf["query_pre_attn_scalar"] ** -0.5)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(hf["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(hf["final_logit_softcapping"])
    if family == "gemma3_text":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in hf["layer_types"]])
    if family == "granite":
        writer.add_embedding_scale(hf["embedding_multiplier"])
        writer.add_residual_scale(hf["residual_multiplier"])
        writer.add_attention_scale(hf["attention_multiplier"])
        writer.add_logit_scale(hf["logits_scaling"])
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(hf["logit_scale"])
    if "use_parallel_residual" in hf:
        writer.add_parallel_residual(hf["use_parallel_residual"])
    if family == "olmo":
        writer.add_clamp_kqv(hf["clip_qkv"])
