"""Tiny llama checkpoints for tests: the committed oracle in every format the loader reads."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.layers import rms_norm
from pallas_kernels.paged_attention import apply_rope

ORACLE = Path(__file__).parent / "fixtures" / "oracles" / "llama"
VARIANTS = ("default", "linear", "llama3", "yarn", "tied")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n")]


def expected(variant: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[40], logits f32[40, 96]) that transformers computes for a variant."""
    with np.load(ORACLE / "expected.npz") as data:
        return data["tokens"], data[variant]


def weights() -> dict[str, np.ndarray]:
    """The oracle's tensors as bfloat16."""
    with safe_open(ORACLE / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def vocabulary() -> list[str]:
    """96 byte-level tokens: special ones, single characters, a few merges."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 126, ord(c)))
    merged = ["".join(pair) for pair in MERGES]
    singles = [c for c in ("Ġ", "Ċ", *characters) if c.isprintable()]
    return [*SPECIAL, *dict.fromkeys(singles)][: 96 - len(merged)] + merged


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json of the tiny vocabulary."""
    vocab = {token: i for i, token in enumerate(vocabulary())}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))


def hf_config(variant: str) -> dict[str, Any]:
    return json.loads((ORACLE / f"config_{variant}.json").read_text())


def hf_folder(folder: Path, variant: str = "default") -> Path:
    """A Hugging Face folder of a variant."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(variant)))
    write_tokenizer(folder)
    if variant == "tied":
        kept = {k: v for k, v in weights().items() if k != "lm_head.weight"}
        save_file(kept, folder / "model.safetensors")
    else:
        shutil.copy(ORACLE / "model.safetensors", folder / "model.safetensors")
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor, spelled out apart from the loader's table."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
    return GGUF_NAMES[stem] + ".weight"


def rotate_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows from halves to side-by-side pairs, as llama GGUF files store them."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf(
    path: Path,
    variant: str = "default",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """The oracle as a GGUF file; `metadata` adds or (with None) takes away string-valued keys."""
    hf = hf_config(variant)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_rope_dimension_count(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_vocab_size(hf["vocab_size"])
    _add_rope(writer, hf["rope_parameters"])
    add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    for name, value in (tensors if tensors is not None else _float32(variant)).items():
        _add_tensor(writer, name, value, hf, quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _float32(variant: str) -> dict[str, np.ndarray]:
    tied = variant == "tied"
    kept = {k: v for k, v in weights().items() if not (tied and k == "lm_head.weight")}
    return {name: value.astype(np.float32) for name, value in kept.items()}


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    kind = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kind.CONTROL if t in SPECIAL else kind.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    value: np.ndarray,
    hf: dict[str, Any],
    quantisation: gguf.GGMLQuantizationType,
) -> None:
    if name.endswith("q_proj.weight"):
        value = rotate_rows(value, hf["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        value = rotate_rows(value, hf["num_key_value_heads"])
    kind = quantisation if value.ndim > 1 else gguf.GGMLQuantizationType.F32
    data = gguf.quantize(value, kind)
    writer.add_tensor(gguf_name(name), data, raw_dtype=kind)


def dense_logits(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """f32[T, vocab]: a plain causal forward over the whole sequence, with the family's functions.

    Attention is written out here, so nothing of the paged step takes part.
    """
    family = family_of(config.family)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    context = family.layer_context(config, positions)
    x = family.embed(params, config, jnp.asarray(tokens), positions)
    for i, layer in enumerate(params["layers"]):
        kind = config.kind(i)
        attend = functools.partial(dense_attention, config, kind.window)
        x = family.layer(layer, config, kind, x, context, attend)
    return np.asarray(family.unembed(params, config, x))


def dense_attention(
    config: ModelConfig,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    sinks: jax.Array | None = None,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Causal attention of all tokens to all, with a model's scale, cap, window and sinks."""
    if norms is not None:
        q, k = (
            rms_norm(
                x.reshape(-1, x.shape[-1]), weight, config.rms_norm_eps, config.norm_offset
            ).reshape(x.shape)
            for x, weight in zip((q, k), norms)
        )
    if rotary is not None:
        flat = apply_rope(q.reshape(len(q), -1, q.shape[-1]), *rotary, config.rope_pairs)
        q, k = flat.reshape(q.shape), apply_rope(k, *rotary, config.rope_pairs)
    if v is None:
        v = k[..., : config.value_dim]
    position = np.arange(len(q))
    seen = position[None, :] <= position[:, None]
    if window is not None:
        seen &= position[None, :] > position[:, None] - window
    scores = jnp.einsum("tkgd,skd->kgts", q, k).astype(jnp.float32) * config.scale
    if config.attention_soft_cap is not None:
        scores = jnp.tanh(scores / config.attention_soft_cap) * config.attention_soft_cap
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        last = jnp.broadcast_to(sinks[:, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, last], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)].astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", weights, v)
