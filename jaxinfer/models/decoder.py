"""The decoder block that most families share; their files say which of its features they use.

Pre-norm attention and gated MLP with residuals, as in Llama (Touvron et al. 2023,
arXiv:2302.13971), with grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Features,
by the fields of `ModelConfig`:

    qkv_bias, o_bias, mlp_bias   biases of the projections (Qwen2, GLM4)
    qk_norm                      norm of queries and keys: of each "head" (Qwen3, Gemma 3), of
                                 "each" head by a LayerNorm of its own (Cohere, StableLM) or of
                                 "all" heads together (OLMo 2)
    norms                        "pre": before each half; "post": after it, before the residual is
                                 added (OLMo 2); "both" (Gemma 2 and 3, GLM4); "shared": one before
                                 both halves (Phi, Cohere)
    norm_offset                  norms multiply by weight + 1 (Gemma, Nemotron)
    norm_type, norm_*            "layer": LayerNorm, with a weight and a bias (GPT-2), or without
                                 (OLMo)
    parallel                     both halves read the layer's input, each by a norm of its own
                                 (GPT-NeoX)
    gated                        whether the MLP has a gate, or is two projections (GPT-2)
    learned_positions            a vector of each position is added to the embedding (GPT-2)
    qkv_clip                     bound of queries, keys and values (OLMo)
    head_bias                    of the head of the vocabulary (Phi)
    kinds, local_rope            layers that see a window, rotate otherwise or not at all
    rotary_dim, rope_pairs       part of a head rotates; neighbours are paired (GLM4)
    attention_scale, *_soft_cap  tanh caps of scores and logits (Gemma 2)
    *_multiplier                 scalars on embeddings, residuals and logits (Granite, Gemma)
    attention_sinks              a learned logit a head takes a share of the attention (gpt_oss)
    moe                          layers whose MLP is a mixture of experts: `models/moe.py`
    mla                          latent attention (DeepSeek): `models/mla.py`

What it is made of, and from which tensors: `models/decoder_params.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.cpu_kernels.integer_panels import IntegerPanels
from jaxinfer.cpu_kernels.panels import Panels
from jaxinfer.models.base import Attend, LayerContext, OnRouted, RunExperts, RunLatent
from jaxinfer.models.decoder_params import norm_names
from jaxinfer.models.layers import (
    ACTIVATIONS,
    activate,
    add_bias,
    layer_norm,
    linear,
    rms_norm,
)
from jaxinfer.models.layers import embed as embed_rows
from jaxinfer.models.mla import latent_attention
from jaxinfer.models.moe import moe
from jaxinfer.models.rope import rope_tables
from jaxinfer.params import Tree
from jaxinfer.quantization.weight import Heard, Quantised


def embed(
    params: Tree, c: ModelConfig, tokens: Int[Array, " T"], positions: Int[Array, " T"]
) -> Float[Array, "T D"]:
    x = embed_rows(params["embed"], tokens)
    if c.embedding_multiplier != 1:
        # The factor in the model's dtype, as the models were trained.
        x = x * jnp.asarray(c.embedding_multiplier, x.dtype)
    if c.learned_positions:
        # Idle rows of a sequence that ended may stand one past the table.
        x = x + params["positions"].at[positions].get(mode="clip")
    return x


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
    on_routed: OnRouted | None = None,
    run_experts: RunExperts | None = None,
    run_latent: RunLatent | None = None,
) -> Float[Array, "T D"]:
    """One transformer block; `attend` stores k and v in the pool and attends over it."""
    normed = _normed(params, c, x, "attn_norm")
    if c.mla:
        half = latent_attention(params, c, c.mla, normed, context[kind.rope], attend, run_latent)
    else:
        half = _attention(params, c, kind, normed, context, attend)
    after = _add(c, x, _normed(params, c, half, "attn_post_norm"))
    if c.norms != "shared":
        normed = _normed(params, c, x if c.parallel else after, "mlp_norm")
    if c.moe and kind.moe:
        half = moe(params, c, c.moe, normed, on_routed, run_experts)
    else:
        half = mlp(params, c, normed)
    return _add(c, after, _normed(params, c, half, "mlp_post_norm"))


def _normed(params: Tree, c: ModelConfig, x: Float[Array, "T D"], name: str) -> Any:
    """x after the norm of that name, or as it is where the layer has none there."""
    if name not in (*norm_names(c), "final_norm"):
        return x
    if c.norm_type == "layer":
        weight, bias = params.get(name), params.get(f"{name}_bias")
        return layer_norm(x, weight, bias, c.rms_norm_eps, c.norm_offset)
    return rms_norm(x, params[name], c.rms_norm_eps, c.norm_offset)


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
    group = c.group_size
    qkv = add_bias(linear(x, params["qkv"]), params.get("qkv_bias"))
    if c.qkv_clip is not None:
        qkv = jnp.clip(qkv, -c.qkv_clip, c.qkv_clip)
    qk, v = qkv[:, :, : group + 1], qkv[:, :, group + 1]
    norms = None
    if c.qk_norm == "head" and kind.query_scale == 1:
        norms = params["q_norm"], params["k_norm"]
    elif c.qk_norm != "none":
        qk = _norm_qk(params, c, qk)
    q, rotary = qk[:, :, :group], None if kind.rope == "none" else context[kind.rope]
    if kind.query_scale != 1:
        q = q * jnp.asarray(kind.query_scale, q.dtype)
    attended = attend(q, qk[:, :, group], v, params.get("sinks"), rotary, norms)
    return add_bias(project_out(attended, params["o"]), params.get("o_bias"))


def _norm_qk(
    params: Tree, c: ModelConfig, qk: Float[Array, "T KV G1 hd"]
) -> Float[Array, "T KV G1 hd"]:
    """Norm of queries and keys, of each head or over all heads of a token."""
    tokens, group = qk.shape[0], c.group_size
    q, k = qk[:, :, :group], qk[:, :, group:]
    if c.qk_norm == "each":
        weight = jnp.concatenate([params["q_norm"], params["k_norm"]], axis=1)
        return layer_norm(qk, weight, None, c.rms_norm_eps)
    width = (-1, c.head_dim) if c.qk_norm == "head" else (tokens, -1)

    def normed(part: Array, name: str) -> Array:
        flat = rms_norm(part.reshape(width), params[name], c.rms_norm_eps, c.norm_offset)
        return flat.reshape(part.shape)

    return jnp.concatenate([normed(q, "q_norm"), normed(k, "k_norm")], axis=2)


def project_out(
    attended: Float[Array, "T KV G hd"],
    weight: Float[Array, "D KV Ghd"] | Quantised | Panels | IntegerPanels | Heard,
) -> Float[Array, "T D"]:
    """Attention output projection: contracts all heads."""
    return linear(attended.reshape(*attended.shape[:2], -1), weight)


def mlp(params: Tree, c: ModelConfig, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Gated MLP (Shazeer 2020, arXiv:2002.05202), or a plain one of two projections."""
    if c.gated:
        gate_up = add_bias(linear(x, params["gate_up"]), params.get("gate_up_bias"))
        hidden = activate(gate_up, c.activation)
    else:
        hidden = ACTIVATIONS[c.activation](add_bias(linear(x, params["up"]), params.get("up_bias")))
    return add_bias(linear(hidden, params["down"]), params.get("down_bias"))


def unembed(params: Tree, c: ModelConfig, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """float32 logits of the rows that need them."""
    head = params["embed"] if c.tie_embeddings else params["head"]
    logits = linear(_normed(params, c, x, "final_norm"), head, out_dtype=jnp.float32)
    if c.head_bias:
        logits = add_bias(logits, params["head_bias"].astype(jnp.float32))
    if c.logit_multiplier != 1:
        logits = logits * c.logit_multiplier
    if c.logit_soft_cap is not None:
        logits = jnp.tanh(logits / c.logit_soft_cap) * c.logit_soft_cap
    return logits
