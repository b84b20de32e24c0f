"""What the GGUF files of families with layer norms leave to the architecture.

None names its activation: it is the one that the family was published with.
"""

from __future__ import annotations

from jaxinfer.checkpoints.gguf_metadata import HfConfig, Metadata

_NEOX_20B_LAYERS = 44
_STARCODER2_WINDOW = 4096  # of all three published sizes
_OLMO_EPS = 1e-5


def gpt2(get: Metadata) -> HfConfig:
    """GPT-2 and GPT BigCode: learned positions, and names of their own for sizes."""
    rope = get.rope()
    if rope["rope_type"] != "default":
        raise ValueError(f"{get.arch}.rope.scaling.type: it has learned positions, and no RoPE")
    return {
        "n_embd": get("embedding_length"),
        "n_positions": get("context_length"),
        "n_inner": get.one("feed_forward_length"),
        "n_layer": get("block_count"),
        "n_head": get.one("attention.head_count"),
    }


def starcoder(get: Metadata) -> HfConfig:
    if get.one("attention.head_count_kv", 0) != 1:
        raise ValueError("starcoder.attention.head_count_kv: only 1 is supported")
    return gpt2(get) | {"multi_query": True}


def gptneox(get: Metadata) -> HfConfig:
    """The 20B's GELU is the tanh form, that of Pythia and its relatives is exact."""
    return {
        "hidden_act": "gelu_fast" if get("block_count") == _NEOX_20B_LAYERS else "gelu",
        "use_parallel_residual": get("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in get.file.tensors,
    }


def starcoder2(get: Metadata) -> HfConfig:
    return {
        "sliding_window": get("attention.sliding_window", _STARCODER2_WINDOW) or None,
        "use_bias": "blk.0.attn_q.bias" in get.file.tensors,
    }


def stablelm(get: Metadata) -> HfConfig:
    """`use_parallel_residual` is true in files of models that are not: their norms tell."""
    tensors = get.file.tensors
    get("use_parallel_residual", None)
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


def command_r(get: Metadata) -> HfConfig:
    return {
        "logit_scale": get.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in get.file.tensors,
    }


def cohere2(get: Metadata) -> HfConfig:
    """Every fourth layer sees everything, and has no RoPE."""
    return {
        "logit_scale": get.number("logit_scale"),
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": get("attention.sliding_window_pattern", 4),
    }


def falcon(get: Metadata) -> HfConfig:
    """Two norms side by side, or one for both halves. Its files have no biases but norms'."""
    return {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in get.file.tensors),
        "num_kv_heads": get.one("attention.head_count_kv", get.one("attention.head_count")),
        "ffn_hidden_size": get.one("feed_forward_length"),
        "bias": False,
    }


def olmo(get: Metadata) -> HfConfig:
    eps = get.number("attention.layer_norm_epsilon")
    if eps != _OLMO_EPS:
        raise ValueError(f"olmo.attention.layer_norm_epsilon = {eps}: only {_OLMO_EPS} is known")
    return {"clip_qkv": get.number("attention.clamp_kqv", 0.0) or None}


def nemotron(get: Metadata) -> HfConfig:
    """Half of a head rotates in every published model; where heads are not as wide as all of them
    together leave, files may say otherwise."""
    heads = get.one("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    if get("rope.dimension_count") * 2 != head_dim:
        raise ValueError(f"nemotron.rope.dimension_count: expected half of a head's {head_dim}")
    return {}


def ernie4_5(get: Metadata) -> HfConfig:
    return {"use_bias": "blk.0.attn_q.bias" in get.file.tensors}


def seed_oss(get: Metadata) -> HfConfig:
    return {"attention_out_bias": "blk.0.attn_output.bias" in get.file.tensors}
