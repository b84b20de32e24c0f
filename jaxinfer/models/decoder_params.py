"""What the shared decoder is made of, and which Hugging Face tensors that comes from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import HfSource
from jaxinfer.models.layers import fuse_gate_up, mlp_block
from jaxinfer.models.mla import mla_sources, mla_specs
from jaxinfer.models.moe import QWEN_NAMES, Names, moe_sources, moe_specs
from jaxinfer.params import ParamSpec, Tree

# Our norms → the checkpoint's, as most families name them.
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def param_specs(c: ModelConfig) -> Tree:
    """Query, key and value rows are fused by key/value head, so one axis shards all three."""
    tree: dict[str, Any] = {
        "embed": ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed"), inputs=1),
        "layers": [_layer_specs(c, c.kind(i)) for i in range(c.num_layers)],
        **_norm_specs(c, "final_norm"),
    }
    if not c.tie_embeddings:
        tree["head"] = tree["embed"]
    if c.head_bias:
        tree["head_bias"] = ParamSpec((c.vocab_size,), ("vocab",), "zeros")
    if c.learned_positions:
        tree["positions"] = ParamSpec((c.max_position, c.hidden_size), (None, "embed"))
    return tree


def _norm(size: int, axis: str | None = "embed") -> ParamSpec:
    return ParamSpec((size,), (axis,), "ones")


def _norm_specs(c: ModelConfig, *names: str) -> dict[str, ParamSpec]:
    """Weights and biases of norms over the width, as far as the model's have them."""
    specs = {name: _norm(c.hidden_size) for name in names if c.norm_weight}
    bias = ParamSpec((c.hidden_size,), ("embed",), "zeros")
    return specs | {f"{name}_bias": bias for name in names if c.norm_bias}


def _layer_specs(c: ModelConfig, kind: LayerKind) -> dict[str, ParamSpec]:
    specs = mla_specs(c, c.mla) if c.mla else _attention_specs(c)
    specs |= moe_specs(c, c.moe) if c.moe and kind.moe else _mlp_specs(c)
    specs |= _norm_specs(c, *norm_names(c))
    if c.o_bias:
        specs["o_bias"] = ParamSpec((c.hidden_size,), ("embed",), "zeros")
    return specs


def _attention_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    heads = (c.num_kv_heads, c.group_size + 2, c.head_dim)
    specs = {
        "qkv": ParamSpec((*heads, c.hidden_size), ("kv_heads", None, None, "embed"), inputs=1),
        "o": ParamSpec(
            (c.hidden_size, c.num_kv_heads, c.group_size * c.head_dim),
            ("embed", "kv_heads", None),
            inputs=2,
        ),
    }
    if c.qkv_bias:
        specs["qkv_bias"] = ParamSpec(heads, ("kv_heads", None, None), "zeros")
    if c.attention_sinks:
        sinks = (c.num_kv_heads, c.group_size)
        specs["sinks"] = ParamSpec(sinks, ("kv_heads", None), "zeros", "float32")
    if c.qk_norm == "head":
        specs |= {"q_norm": _norm(c.head_dim, None), "k_norm": _norm(c.head_dim, None)}
    elif c.qk_norm == "each":
        for name, own in {"q_norm": c.group_size, "k_norm": 1}.items():
            shape = (c.num_kv_heads, own, c.head_dim)
            specs[name] = ParamSpec(shape, ("kv_heads", None, None), "ones")
    elif c.qk_norm == "all":
        specs["q_norm"] = _norm(c.num_heads * c.head_dim, None)
        specs["k_norm"] = _norm(c.num_kv_heads * c.head_dim, None)
    return specs


def _mlp_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    down = ParamSpec((c.hidden_size, c.intermediate_size), ("embed", "mlp"), inputs=1)
    down_bias = ParamSpec((c.hidden_size,), ("embed",), "zeros")
    if not c.gated:
        up = ParamSpec(down.shape[::-1], ("mlp", "embed"), inputs=1)
        specs = {"up": up, "down": down}
        if c.mlp_bias:
            up_bias = ParamSpec((c.intermediate_size,), ("mlp",), "zeros")
            specs |= {"up_bias": up_bias, "down_bias": down_bias}
        return specs
    block = mlp_block(c.intermediate_size)
    shape = (c.intermediate_size // block, 2, block)
    specs = {
        "gate_up": ParamSpec((*shape, c.hidden_size), ("mlp", None, None, "embed"), inputs=1),
        "down": down,
    }
    if c.mlp_bias:
        specs["gate_up_bias"] = ParamSpec(shape, ("mlp", None, None), "zeros")
        specs["down_bias"] = down_bias
    return specs


def norm_names(c: ModelConfig) -> list[str]:
    """The norms of a layer."""
    if c.norms == "shared":
        return ["attn_norm"]
    before = ["attn_norm", "mlp_norm"] if c.norms != "post" else []
    after = ["attn_post_norm", "mlp_post_norm"] if c.norms != "pre" else []
    return before + after


def hf_sources(
    c: ModelConfig,
    norms: dict[str, str] = NORMS,
    fused_qkv: str = "",
    fused_gate_up: str = "",
    experts: Names = QWEN_NAMES,
    modules: Mapping[str, str] | None = None,
) -> dict[str, HfSource]:
    """For every parameter, by path: the Hugging Face tensors it is made of, and how.

    `norms` are the checkpoint's names of our norms, `fused_*` of projections that it holds in one,
    `experts` of a mixture's; `modules` what it calls parts that Llama's files call otherwise.
    """
    sources = _vocabulary_sources(c)
    for i in range(c.num_layers):
        hf = f"model.layers.{i}."
        layer_sources = _layer_sources(c, hf, norms)
        if fused_qkv:
            layer_sources["qkv"] = _fused_qkv(c, f"{hf}self_attn.{fused_qkv}.weight", c.hidden_size)
            if c.qkv_bias:
                layer_sources["qkv_bias"] = _fused_qkv(c, f"{hf}self_attn.{fused_qkv}.bias")
        if c.moe and c.kind(i).moe:
            layer_sources |= moe_sources(c, c.moe, hf, experts)
        elif fused_gate_up:
            layer_sources |= _mlp_sources(c, f"{hf}mlp.")
            layer_sources["gate_up"] = _fused_gate_up(c, f"{hf}mlp.{fused_gate_up}.weight")
        else:
            layer_sources |= _mlp_sources(c, f"{hf}mlp.")
        sources |= {f"layers.{i}.{name}": source for name, source in layer_sources.items()}
    return {path: _renamed(source, modules or {}) for path, source in sources.items()}


def _vocabulary_sources(c: ModelConfig) -> dict[str, HfSource]:
    """What stands before the layers and after them."""
    vocab = (c.vocab_size, c.hidden_size)
    sources = {"embed": HfSource({"model.embed_tokens.weight": vocab})}
    sources |= _norm_sources(c, {"final_norm": "model.norm"})
    if not c.tie_embeddings:
        sources["head"] = HfSource({"lm_head.weight": vocab})
    if c.head_bias:
        sources["head_bias"] = HfSource({"lm_head.bias": vocab[:1]})
    if c.learned_positions:
        size = (c.max_position, c.hidden_size)
        sources["positions"] = HfSource({"model.embed_positions.weight": size})
    return sources


def _norm_sources(c: ModelConfig, names: dict[str, str]) -> dict[str, HfSource]:
    """Weights and biases of our norms, from modules of those names."""
    size = (c.hidden_size,)
    weights = {ours: HfSource({f"{hf}.weight": size}) for ours, hf in names.items()}
    biases = {f"{ours}_bias": HfSource({f"{hf}.bias": size}) for ours, hf in names.items()}
    return (weights if c.norm_weight else {}) | (biases if c.norm_bias else {})


def _renamed(source: HfSource, modules: Mapping[str, str]) -> HfSource:
    def rename(name: str) -> str:
        for usual, own in modules.items():
            name = name.replace(usual, own)
        return name

    return dataclasses.replace(
        source,
        tensors={rename(name): shape for name, shape in source.tensors.items()},
        others=tuple(_renamed(other, modules) for other in source.others),
    )


def _fused_qkv(c: ModelConfig, name: str, *width: int) -> HfSource:
    """All query rows, then all key rows, then all value rows, in one tensor."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def combine(rows: Any) -> Any:
        return _fuse_qkv(c, rows[:q], rows[q : q + kv], rows[q + kv :])

    return HfSource({name: (q + 2 * kv, *width)}, combine)


def _fused_gate_up(c: ModelConfig, name: str) -> HfSource:
    """All gate rows, then all up rows, in one tensor."""
    half = c.intermediate_size
    return HfSource(
        {name: (2 * half, c.hidden_size)}, lambda rows: fuse_gate_up(rows[:half], rows[half:])
    )


def _fuse_qkv(c: ModelConfig, q: Any, k: Any, v: Any) -> Any:
    xp = q.__array_namespace__()
    shape = (c.num_kv_heads, -1, c.head_dim, *q.shape[1:])
    return xp.concat([part.reshape(shape) for part in (q, k, v)], axis=1)


def _layer_sources(c: ModelConfig, hf: str, norms: dict[str, str]) -> dict[str, HfSource]:
    attn, width = hf + "self_attn.", c.hidden_size
    sources = mla_sources(c, c.mla, attn) if c.mla else _attention_sources(c, attn)
    sources |= _norm_sources(c, {ours: f"{hf}{norms[ours]}" for ours in norm_names(c)})
    if c.o_bias:
        sources["o_bias"] = HfSource({attn + "o_proj.bias": (width,)})
    return sources


def _attention_sources(c: ModelConfig, attn: str) -> dict[str, HfSource]:
    width = c.hidden_size
    rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim}
    rows["v"] = rows["k"]
    fuse_qkv = functools.partial(_fuse_qkv, c)
    sources = {
        "qkv": HfSource(_projections(attn, rows, width), fuse_qkv),
        "o": HfSource({attn + "o_proj.weight": (width, rows["q"])}),
    }
    if c.qkv_bias:
        sources["qkv_bias"] = HfSource(_projections(attn, rows), fuse_qkv)
    if c.attention_sinks:
        sources["sinks"] = HfSource({attn + "sinks": (c.num_heads,)})
    if c.qk_norm != "none":
        sizes: dict[str, dict[str, tuple[int, ...]]] = {
            "head": {"q": (c.head_dim,), "k": (c.head_dim,)},
            "each": {"q": (c.num_heads, c.head_dim), "k": (c.num_kv_heads, c.head_dim)},
            "all": {"q": (rows["q"],), "k": (rows["k"],)},
        }
        size = sizes[c.qk_norm]
        sources |= {f"{x}_norm": HfSource({f"{attn}{x}_norm.weight": size[x]}) for x in "qk"}
    return sources


def _mlp_sources(c: ModelConfig, mlp: str) -> dict[str, HfSource]:
    if not c.gated:
        return _plain_mlp_sources(c, mlp)
    halves, width = {"gate": c.intermediate_size, "up": c.intermediate_size}, c.hidden_size
    sources = {
        "gate_up": HfSource(_projections(mlp, halves, width), fuse_gate_up),
        "down": HfSource({mlp + "down_proj.weight": (width, c.intermediate_size)}),
    }
    if c.mlp_bias:
        sources["gate_up_bias"] = HfSource(_projections(mlp, halves), fuse_gate_up)
        sources["down_bias"] = HfSource({mlp + "down_proj.bias": (width,)})
    return sources


def _plain_mlp_sources(c: ModelConfig, mlp: str) -> dict[str, HfSource]:
    inner, width = c.intermediate_size, c.hidden_size
    sources = {
        "up": HfSource({mlp + "up_proj.weight": (inner, width)}),
        "down": HfSource({mlp + "down_proj.weight": (width, inner)}),
    }
    if c.mlp_bias:
        sources["up_bias"] = HfSource({mlp + "up_proj.bias": (inner,)})
        sources["down_bias"] = HfSource({mlp + "down_proj.bias": (width,)})
    return sources


def _projections(
    prefix: str, rows: dict[str, int], width: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the projections' weights, or of their biases without a `width`."""
    if width is None:
        return {f"{prefix}{x}_proj.bias": (size,) for x, size in rows.items()}
    return {f"{prefix}{x}_proj.weight": (size, width) for x, size in rows.items()}
