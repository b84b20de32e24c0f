"""The decoder block that most families share; their files say which of its features they use.

Pre-norm attention and gated MLP with residuals, as in Llama (Touvron et al. 2023,
arXiv:2302.13971), with grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Features,
by the fields of `ModelConfig`:

    qkv_bias, o_bias, mlp_bias   biases of the projections (Qwen2, GLM4)
    qk_norm                      RMSNorm of queries and keys: of each "head" (Qwen3, Gemma 3) or of
                                 "all" heads together (OLMo 2)
    norms                        "pre": before each half; "post": after it, before the residual is
                                 added (OLMo 2); "both" (Gemma 2 and 3, GLM4)
    norm_offset                  norms multiply by weight + 1 (Gemma)
    kinds, local_rope            layers that see a window, rotate otherwise or not at all
    rotary_dim, rope_pairs       part of a head rotates; neighbours are paired (GLM4)
    attention_scale, *_soft_cap  tanh caps of scores and logits (Gemma 2)
    *_multiplier                 scalars on embeddings, residuals and logits (Granite, Gemma)
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.models.base import Attend, HfSource, LayerContext
from jaxinfer.models.layers import activate, add_bias, fuse_gate_up, linear, mlp_block, rms_norm
from jaxinfer.models.layers import embed as embed_rows
from jaxinfer.models.rope import apply_rope, rope_tables
from jaxinfer.params import ParamSpec, Tree

# Our norms → the checkpoint's, as most families name them.
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def param_specs(c: ModelConfig) -> Tree:
    """Query, key and value rows are fused by key/value head, so one axis shards all three."""
    tree: dict[str, Any] = {
        "embed": ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed")),
        "layers": [_layer_specs(c) for _ in range(c.num_layers)],
        "final_norm": _norm(c.hidden_size),
    }
    if not c.tie_embeddings:
        tree["head"] = ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed"))
    return tree


def _norm(size: int, axis: str | None = "embed") -> ParamSpec:
    return ParamSpec((size,), (axis,), "ones")


def _layer_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    block, heads = mlp_block(c.intermediate_size), (c.num_kv_heads, c.group_size + 2, c.head_dim)
    specs = {
        "qkv": ParamSpec((*heads, c.hidden_size), ("kv_heads", None, None, "embed")),
        "o": ParamSpec(
            (c.hidden_size, c.num_kv_heads, c.group_size * c.head_dim), ("embed", "kv_heads", None)
        ),
        "gate_up": ParamSpec(
            (c.intermediate_size // block, 2, block, c.hidden_size), ("mlp", None, None, "embed")
        ),
        "down": ParamSpec((c.hidden_size, c.intermediate_size), ("embed", "mlp")),
    }
    specs |= {name: _norm(c.hidden_size) for name in _norm_names(c)}
    if c.qkv_bias:
        specs["qkv_bias"] = ParamSpec(heads, ("kv_heads", None, None), "zeros")
    if c.o_bias:
        specs["o_bias"] = ParamSpec((c.hidden_size,), ("embed",), "zeros")
    if c.mlp_bias:
        shape = (c.intermediate_size // block, 2, block)
        specs["gate_up_bias"] = ParamSpec(shape, ("mlp", None, None), "zeros")
        specs["down_bias"] = ParamSpec((c.hidden_size,), ("embed",), "zeros")
    if c.qk_norm == "head":
        specs |= {"q_norm": _norm(c.head_dim, None), "k_norm": _norm(c.head_dim, None)}
    elif c.qk_norm == "all":
        specs["q_norm"] = _norm(c.num_heads * c.head_dim, None)
        specs["k_norm"] = _norm(c.num_kv_heads * c.head_dim, None)
    return specs


def _norm_names(c: ModelConfig) -> list[str]:
    before = ["attn_norm", "mlp_norm"] if c.norms != "post" else []
    after = ["attn_post_norm", "mlp_post_norm"] if c.norms != "pre" else []
    return before + after


# -- checkpoints -----------------------------------------------------------------------------------


def hf_sources(
    c: ModelConfig,
    norms: dict[str, str] = NORMS,
    fused_qkv: str = "",
    fused_gate_up: str = "",
) -> dict[str, HfSource]:
    """For every parameter, by path: the Hugging Face tensors it is made of, and how.

    `norms` are the checkpoint's names of our norms, `fused_*` of projections that it holds in one.
    """
    vocab = (c.vocab_size, c.hidden_size)
    sources = {
        "embed": HfSource({"model.embed_tokens.weight": vocab}),
        "final_norm": HfSource({"model.norm.weight": (c.hidden_size,)}),
    }
    if not c.tie_embeddings:
        sources["head"] = HfSource({"lm_head.weight": vocab})
    for i in range(c.num_layers):
        hf = f"model.layers.{i}."
        layer_sources = _layer_sources(c, hf, norms)
        if fused_qkv:
            layer_sources["qkv"] = _fused_qkv(c, f"{hf}self_attn.{fused_qkv}.weight")
        if fused_gate_up:
            layer_sources["gate_up"] = _fused_gate_up(c, f"{hf}mlp.{fused_gate_up}.weight")
        sources |= {f"layers.{i}.{name}": source for name, source in layer_sources.items()}
    return sources


def _fused_qkv(c: ModelConfig, name: str) -> HfSource:
    """All query rows, then all key rows, then all value rows, in one tensor."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def combine(rows: Any) -> Any:
        return _fuse_qkv(c, rows[:q], rows[q : q + kv], rows[q + kv :])

    return HfSource({name: (q + 2 * kv, c.hidden_size)}, combine)


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
    attn, mlp, width = hf + "self_attn.", hf + "mlp.", c.hidden_size
    rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim}
    rows["v"] = rows["k"]
    halves = {"gate": c.intermediate_size, "up": c.intermediate_size}

    fuse_qkv = functools.partial(_fuse_qkv, c)

    def weights(prefix: str, sizes: dict[str, int], kind: str = "weight") -> dict[str, tuple]:
        tail = (width,) if kind == "weight" else ()
        return {f"{prefix}{x}_proj.{kind}": (size, *tail) for x, size in sizes.items()}

    sources = {
        "qkv": HfSource(weights(attn, rows), fuse_qkv),
        "o": HfSource({attn + "o_proj.weight": (width, rows["q"])}),
        "gate_up": HfSource(weights(mlp, halves), fuse_gate_up),
        "down": HfSource({mlp + "down_proj.weight": (width, c.intermediate_size)}),
    }
    sources |= {ours: HfSource({f"{hf}{norms[ours]}.weight": (width,)}) for ours in _norm_names(c)}
    if c.qkv_bias:
        sources["qkv_bias"] = HfSource(weights(attn, rows, "bias"), fuse_qkv)
    if c.o_bias:
        sources["o_bias"] = HfSource({attn + "o_proj.bias": (width,)})
    if c.mlp_bias:
        sources["gate_up_bias"] = HfSource(weights(mlp, halves, "bias"), fuse_gate_up)
        sources["down_bias"] = HfSource({mlp + "down_proj.bias": (width,)})
    if c.qk_norm != "none":
        size = {"head": {"q": c.head_dim, "k": c.head_dim}, "all": rows}[c.qk_norm]
        sources |= {f"{x}_norm": HfSource({f"{attn}{x}_norm.weight": (size[x],)}) for x in "qk"}
    return sources


# -- the computation -------------------------------------------------------------------------------


def embed(params: Tree, c: ModelConfig, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    x = embed_rows(params["embed"], tokens)
    # The factor in the model's dtype, as the models were trained.
    return x if c.embedding_multiplier == 1 else x * jnp.asarray(c.embedding_multiplier, x.dtype)


def layer_context(c: ModelConfig, positions: Int[Array, " T"]) -> LayerContext:
    """What every layer of a step shares: the rotary tables, by the name layers know them by."""
    size = c.rotary_dim or c.head_dim
    ropes: dict[str, RopeConfig | None] = {"global": c.rope, "local": c.local_rope}
    used = {c.kind(i).rope for i in range(c.num_layers)}
    return {
        name: rope_tables(rope, size, positions)
        for name, rope in ropes.items()
        if rope is not None and name in used
    }


def layer(
    params: Tree,
    c: ModelConfig,
    kind: LayerKind,
    x: Float[Array, "T D"],
    context: LayerContext,
    attend: Attend,
) -> Float[Array, "T D"]:
    """One transformer block; `attend` stores k and v in the pool and attends over it."""
    half = _attention(params, c, kind, _normed(params, c, x, "attn_norm"), context, attend)
    x = _add(c, x, _normed(params, c, half, "attn_post_norm"))
    half = mlp(params, c, _normed(params, c, x, "mlp_norm"))
    return _add(c, x, _normed(params, c, half, "mlp_post_norm"))


def _normed(params: Tree, c: ModelConfig, x: Float[Array, "T D"], name: str) -> Any:
    return rms_norm(x, params[name], c.rms_norm_eps, c.norm_offset) if name in params else x


def _add(c: ModelConfig, x: Float[Array, "T D"], half: Float[Array, "T D"]) -> Any:
    return x + (half if c.residual_multiplier == 1 else half * c.residual_multiplier)


def _attention(
    params: Tree,
    c: ModelConfig,
    kind: LayerKind,
    x: Float[Array, "T D"],
    context: LayerContext,
    attend: Attend,
) -> Float[Array, "T D"]:
    tokens, group = x.shape[0], c.group_size
    qkv = add_bias(linear(x, params["qkv"]), params.get("qkv_bias"))
    qk, v = qkv[:, :, : group + 1], qkv[:, :, group + 1]
    if c.qk_norm != "none":
        qk = _norm_qk(params, c, qk)
    if kind.rope != "none":
        cos, sin = context[kind.rope]
        flat = qk.reshape(tokens, -1, c.head_dim)
        qk = apply_rope(flat, cos, sin, c.rope_pairs).reshape(qk.shape)
    attended = attend(qk[:, :, :group], qk[:, :, group], v)
    return add_bias(project_out(attended, params["o"]), params.get("o_bias"))


def _norm_qk(
    params: Tree, c: ModelConfig, qk: Float[Array, "T KV G1 hd"]
) -> Float[Array, "T KV G1 hd"]:
    """RMSNorm of queries and keys, of each head or over all heads of a token."""
    tokens, group = qk.shape[0], c.group_size
    q, k = qk[:, :, :group], qk[:, :, group:]
    width = (-1, c.head_dim) if c.qk_norm == "head" else (tokens, -1)

    def normed(part: Array, name: str) -> Array:
        flat = rms_norm(part.reshape(width), params[name], c.rms_norm_eps, c.norm_offset)
        return flat.reshape(part.shape)

    return jnp.concatenate([normed(q, "q_norm"), normed(k, "k_norm")], axis=2)


def project_out(
    attended: Float[Array, "T KV G hd"], weight: Float[Array, "D KV Ghd"]
) -> Float[Array, "T D"]:
    """Attention output projection: contracts all heads."""
    flat = attended.reshape(attended.shape[0], -1)
    return linear(flat, weight.reshape(weight.shape[0], -1))


def mlp(params: Tree, c: ModelConfig, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""
    gate_up = add_bias(linear(x, params["gate_up"]), params.get("gate_up_bias"))
    return add_bias(
        linear(activate(gate_up, c.activation), params["down"]), params.get("down_bias")
    )


def unembed(params: Tree, c: ModelConfig, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """float32 logits of the rows that need them."""
    head = params["embed"] if c.tie_embeddings else params["head"]
    normed = rms_norm(x, params["final_norm"], c.rms_norm_eps, c.norm_offset)
    logits = linear(normed, head, out_dtype=jnp.float32)
    if c.logit_multiplier != 1:
        logits = logits * c.logit_multiplier
    if c.logit_soft_cap is not None:
        logits = jnp.tanh(logits / c.logit_soft_cap) * c.logit_soft_cap
    return logits
