"""GGUF metadata → the words of a Hugging Face config.json, for every architecture we serve.

What files of an architecture leave out is filled in as it was published with the models. Every key
of the architecture must have been read, or have a value that means nothing: what is not understood
is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxinfer.checkpoints import gguf_older_architectures as older
from jaxinfer.checkpoints.gguf_deepseek import deepseek2
from jaxinfer.checkpoints.gguf_metadata import HfConfig, Metadata
from jaxinfer.checkpoints.gguf_reader import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of an architecture are read.

    Attributes:
        model_type: of the config.json they correspond to.
        rotates_neighbours: rows of queries and keys lie pair by pair, as the rotary code of the
            files' own runtime wants them, while ours and config.json's models pair halves.
        norm_offset: what was added to every norm's weight.
        eps: what its config.json calls the norms' epsilon, if they are layer norms.
        transposed: names of modules whose weights its safetensors hold the other way round.
        fused: the module whose rows are all queries, then all keys, then all values, while its
            safetensors hold those of one key/value head after those of another.
        latent: heads have sizes of their own, which `more` tells.
        more: what its config.json has beside the sizes.
    """

    model_type: str
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    eps: str = ""
    transposed: tuple[str, ...] = ()
    fused: str = ""
    latent: bool = False
    more: Callable[[Metadata], HfConfig] = field(default=lambda get: {})


def hf_config(file: GgufFile) -> tuple[HfConfig, Architecture]:
    """The config.json a file corresponds to, and how to read its tensors.

    Raises ValueError naming the key that is missing, contradictory or not supported.
    """
    get = Metadata(file)
    if get.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture = {get.arch!r} is not supported; known: {known}")
    architecture = ARCHITECTURES[get.arch]
    config: HfConfig = {"model_type": architecture.model_type} | _sizes(get, architecture)
    if not architecture.latent:
        config |= _heads(get, config["num_attention_heads"], architecture)
    config |= architecture.more(get)
    get.check_all_read()
    return config, architecture


def _sizes(get: Metadata, architecture: Architecture) -> HfConfig:
    tensors, eps = get.file.tensors, architecture.eps
    heads = get.one("attention.head_count")
    if heads < 1:
        raise ValueError(f"{get.arch}.attention.head_count = {heads}: expected a positive number")
    return {
        "vocab_size": get("vocab_size", len(get.file.metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get.one("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": get("context_length"),
        eps or "rms_norm_eps": _epsilon(get, layer_norms=bool(eps)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": get.rope(),
    }


def _epsilon(get: Metadata, layer_norms: bool) -> float:
    """Of the norms; files with layer norms may tell it under both keys."""
    rms, layer = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    value: float = get.number(layer if layer_norms else rms)
    if layer_norms and get.number(rms, value) != value:
        raise ValueError(f"{get.arch}.{rms} and {layer} differ")
    return value


def _heads(get: Metadata, heads: int, architecture: Architecture) -> HfConfig:
    """Sizes of heads whose queries, keys and values are all as wide."""
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{get.arch}.attention.value_length differs from the key length {head_dim}"
        )
    rotary = get("rope.dimension_count", head_dim)
    if rotary != head_dim and architecture.rotates_neighbours:
        raise ValueError(f"{get.arch}.rope.dimension_count differs from the head size {head_dim}")
    return {
        "num_key_value_heads": get.one("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotary / head_dim,
    }


def _llama(get: Metadata) -> HfConfig:
    """Llama, Mistral and Mixtral are one architecture, told apart by what they have."""
    more: HfConfig = {"sliding_window": get("attention.sliding_window", 0) or None}
    if more["sliding_window"]:
        more["model_type"] = "mistral"
    if get("expert_count", 0):
        more |= {"model_type": "mixtral", "num_local_experts": get("expert_count")}
        more["num_experts_per_tok"] = get("expert_used_count")
    if "model_type" in more and "blk.0.attn_q.bias" in get.file.tensors:
        raise ValueError(f"blk.0.attn_q.bias: a {more['model_type']} model has no such tensor")
    return more


def _experts(normalised: bool) -> Callable[[Metadata], HfConfig]:
    """Experts as Qwen and OLMoE have them; `normalised` unless the file says otherwise."""

    def more(get: Metadata) -> HfConfig:
        return {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get.one("expert_feed_forward_length", _expert_size(get)),
            "norm_topk_prob": bool(get("expert_weights_norm", normalised)),
        }

    return more


def _expert_size(get: Metadata) -> int:
    """Of files that do not say it, from their first expert tensor."""
    name = "blk.0.ffn_gate_exps.weight"
    shape = get.file.shape(name) if name in get.file.tensors else ()
    size: int = shape[1] if len(shape) == 3 else get.one("feed_forward_length")
    return size


def _qwen2moe(get: Metadata) -> HfConfig:
    shared = get("expert_shared_feed_forward_length", get.one("feed_forward_length"))
    biased = "blk.0.attn_q.bias" in get.file.tensors
    more = {"shared_expert_intermediate_size": shared, "qkv_bias": biased}
    return _experts(normalised=False)(get) | more


def _olmoe(get: Metadata) -> HfConfig:
    more = _experts(normalised=False)(get)
    return more | {"intermediate_size": more["moe_intermediate_size"]}


def _gemma(get: Metadata, largest: int, every: int) -> HfConfig:
    """What Gemma 2 and 3 share. Scores are scaled by the head size, but in their `largest` models
    (known by their layers) by hidden size over heads; each `every`-th layer sees everything."""
    heads, layers = get.one("attention.head_count"), get("block_count")
    scalar = get("attention.key_length", get("embedding_length") // heads)
    if layers == largest:
        scalar = get("embedding_length") // heads
    if scale := get.number("attention.scale", 0.0):
        scalar = scale**-2
    pattern = get("attention.sliding_window_pattern", every)
    if not isinstance(pattern, list):
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    names = {True: "sliding_attention", False: "full_attention"}
    return {
        "query_pre_attn_scalar": scalar,
        "layer_types": [names[bool(slides)] for slides in pattern],
    }


def _gemma2(get: Metadata) -> HfConfig:
    return _gemma(get, largest=46, every=2) | {
        "sliding_window": get("attention.sliding_window", 4096),
        "attn_logit_softcapping": get.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get.number("final_logit_softcapping", 30.0),
    }


def _gemma3(get: Metadata) -> HfConfig:
    """The rotary base of layers with a window is not in most files."""
    more = _gemma(get, largest=62, every=6)
    window = get("attention.sliding_window", 0)
    if not window:
        more["layer_types"] = ["full_attention"] * get("block_count")
    local = {"rope_type": "default", "rope_theta": get.number("rope.freq_base_swa", 10_000.0)}
    return more | {
        "sliding_window": window or get("context_length"),
        "final_logit_softcapping": get.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "full_attention": get.rope(),
            "sliding_attention": local,
        },
    }


def _phi3(get: Metadata) -> HfConfig:
    return {
        "sliding_window": get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": get(
            "rope.scaling.original_context_length", get("context_length")
        ),
    }


def _granite(get: Metadata) -> HfConfig:
    if not get("rope.scaling.finetuned", True):
        raise ValueError("granite.rope.scaling.finetuned = False: without RoPE it is not supported")
    heads = get.one("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    return {
        "embedding_multiplier": get.number("embedding_scale", 1.0),
        "residual_multiplier": get.number("residual_scale", 1.0),
        "attention_multiplier": get.number("attention.scale", 0.0) or head_dim**-0.5,
        "logits_scaling": get.number("logit_scale", 1.0),
    }


def _gpt_oss(get: Metadata) -> HfConfig:
    """The bounds of YaRN and the limit of the activation are not in its files."""
    return {
        "sliding_window": get("attention.sliding_window"),
        "intermediate_size": get.one("expert_feed_forward_length", get.one("feed_forward_length")),
        "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "rope_parameters": get.rope() | {"truncate": False},
    }


# By `general.architecture`.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", rotates_neighbours=True, more=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", more=_qwen2moe),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", more=_experts(normalised=True)),
    "gemma2": Architecture("gemma2", norm_offset=1.0, more=_gemma2),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0, more=_gemma3),
    "phi3": Architecture("phi3", more=_phi3),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", more=_olmoe),
    "granite": Architecture("granite", rotates_neighbours=True, more=_granite),
    "smollm3": Architecture("smollm3", rotates_neighbours=True),
    "glm4": Architecture("glm4"),
    "gpt-oss": Architecture("gpt_oss", more=_gpt_oss),
    "gpt2": Architecture(
        "gpt2",
        eps="layer_norm_epsilon",
        transposed=("c_attn", "c_proj", "c_fc"),
        more=older.gpt2,
    ),
    "starcoder": Architecture("gpt_bigcode", eps="layer_norm_epsilon", more=older.starcoder),
    "gptneox": Architecture(
        "gpt_neox", eps="layer_norm_eps", fused="query_key_value", more=older.gptneox
    ),
    "deepseek2": Architecture("deepseek_v3", latent=True, more=deepseek2),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "starcoder2": Architecture("starcoder2", eps="norm_epsilon", more=older.starcoder2),
    "stablelm": Architecture("stablelm", eps="layer_norm_eps", more=older.stablelm),
    "phi2": Architecture("phi", eps="layer_norm_eps"),
    "command-r": Architecture("cohere", eps="layer_norm_eps", more=older.command_r),
    "cohere2": Architecture("cohere2", eps="layer_norm_eps", more=older.cohere2),
    "falcon": Architecture(
        "falcon", eps="layer_norm_epsilon", fused="query_key_value", more=older.falcon
    ),
    "olmo": Architecture("olmo", rotates_neighbours=True, eps="layer_norm_eps", more=older.olmo),
    "nemotron": Architecture("nemotron", norm_offset=1.0, eps="norm_eps", more=older.nemotron),
    "arcee": Architecture("arcee", rotates_neighbours=True),
    "ernie4_5": Architecture("ernie4_5", more=older.ernie4_5),
    "seed_oss": Architecture("seed_oss", more=older.seed_oss),
}
