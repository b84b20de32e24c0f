"""The llama family: RMSNorm, grouped-query attention, RoPE, SwiGLU; tied or untied head.

Sources: Touvron et al. 2023 (arXiv:2302.13971), Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import Attend, HfSource, LayerContext
from jaxinfer.models.layers import embed as embed_rows
from jaxinfer.models.layers import fuse_gate_up, linear, mlp_block, rms_norm, swiglu
from jaxinfer.models.rope import apply_rope, rope_tables
from jaxinfer.params import ParamSpec, Tree


def param_specs(c: ModelConfig) -> Tree:
    """Query, key and value rows are fused by key/value head, so one axis shards all three."""
    block = mlp_block(c.intermediate_size)
    layer = {
        "attn_norm": ParamSpec((c.hidden_size,), ("embed",), "ones"),
        "qkv": ParamSpec(
            (c.num_kv_heads, c.group_size + 2, c.head_dim, c.hidden_size),
            ("kv_heads", None, None, "embed"),
        ),
        "o": ParamSpec(
            (c.hidden_size, c.num_kv_heads, c.group_size * c.head_dim), ("embed", "kv_heads", None)
        ),
        "mlp_norm": ParamSpec((c.hidden_size,), ("embed",), "ones"),
        "gate_up": ParamSpec(
            (c.intermediate_size // block, 2, block, c.hidden_size), ("mlp", None, None, "embed")
        ),
        "down": ParamSpec((c.hidden_size, c.intermediate_size), ("embed", "mlp")),
    }
    tree: dict[str, Any] = {
        "embed": ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed")),
        "layers": [dict(layer) for _ in range(c.num_layers)],
        "final_norm": ParamSpec((c.hidden_size,), ("embed",), "ones"),
    }
    if not c.tie_embeddings:
        tree["head"] = ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed"))
    return tree


def hf_sources(c: ModelConfig) -> dict[str, HfSource]:
    """For every parameter, by path: the Hugging Face tensors it is made of, and how."""

    def fuse_qkv(q: Any, k: Any, v: Any) -> Any:
        xp = q.__array_namespace__()
        shape = (c.num_kv_heads, -1, c.head_dim, c.hidden_size)
        return xp.concat([q.reshape(shape), k.reshape(shape), v.reshape(shape)], axis=1)

    width, mlp_width, vocab = c.hidden_size, c.intermediate_size, (c.vocab_size, c.hidden_size)
    rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim}
    rows["v"] = rows["k"]
    sources = {
        "embed": HfSource({"model.embed_tokens.weight": vocab}),
        "final_norm": HfSource({"model.norm.weight": (width,)}),
    }
    if not c.tie_embeddings:
        sources["head"] = HfSource({"lm_head.weight": vocab})
    for i in range(c.num_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        attn, mlp = hf + "self_attn.", hf + "mlp."
        sources |= {
            ours + "attn_norm": HfSource({hf + "input_layernorm.weight": (width,)}),
            ours + "qkv": HfSource(
                {f"{attn}{x}_proj.weight": (rows[x], width) for x in "qkv"}, fuse_qkv
            ),
            ours + "o": HfSource({attn + "o_proj.weight": (width, rows["q"])}),
            ours + "mlp_norm": HfSource({hf + "post_attention_layernorm.weight": (width,)}),
            ours + "gate_up": HfSource(
                {f"{mlp}{x}_proj.weight": (mlp_width, width) for x in ("gate", "up")},
                fuse_gate_up,
            ),
            ours + "down": HfSource({mlp + "down_proj.weight": (width, mlp_width)}),
        }
    return sources


def embed(params: Tree, c: ModelConfig, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    return embed_rows(params["embed"], tokens)


def layer_context(c: ModelConfig, positions: Int[Array, " T"]) -> LayerContext:
    """What every layer of a step shares: the RoPE tables."""
    return rope_tables(c.rope, c.head_dim, positions)


def layer(
    params: Tree, c: ModelConfig, x: Float[Array, "T D"], context: LayerContext, attend: Attend
) -> Float[Array, "T D"]:
    """One transformer block; `attend` stores k and v in the pool and attends over it."""
    tokens, group = x.shape[0], c.group_size
    qkv = linear(rms_norm(x, params["attn_norm"], c.rms_norm_eps), params["qkv"])
    rotated = apply_rope(qkv[:, :, : group + 1].reshape(tokens, -1, c.head_dim), *context).reshape(
        tokens, c.num_kv_heads, group + 1, c.head_dim
    )
    attended = attend(rotated[:, :, :group], rotated[:, :, group], qkv[:, :, group + 1])
    x = x + project_out(attended, params["o"])
    gate_up = linear(rms_norm(x, params["mlp_norm"], c.rms_norm_eps), params["gate_up"])
    return x + linear(swiglu(gate_up), params["down"])


def project_out(
    attended: Float[Array, "T KV G hd"], weight: Float[Array, "D KV Ghd"]
) -> Float[Array, "T D"]:
    """Attention output projection: contracts all heads."""
    flat = attended.reshape(attended.shape[0], -1)
    return linear(flat, weight.reshape(weight.shape[0], -1))


def unembed(params: Tree, c: ModelConfig, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """float32 logits of the rows that need them."""
    head = params["embed"] if c.tie_embeddings else params["head"]
    normed = rms_norm(x, params["final_norm"], c.rms_norm_eps)
    return linear(normed, head, out_dtype=jnp.float32)


def config_from_hf(hf: dict[str, Any], rope: Any) -> ModelConfig:
    """ModelConfig of a Hugging Face config.json; `rope` is its parsed RopeConfig.

    Raises ValueError for a feature this family's file does not compute.
    """
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("partial_rotary_factor", (1.0, None)),
    ):
        if hf.get(key, allowed[0]) not in allowed:
            raise ValueError(f"llama: {key} = {hf[key]!r} is not supported (only {allowed[0]!r})")
    heads = hf["num_attention_heads"]
    return ModelConfig(
        family="llama",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        max_position=hf["max_position_embeddings"],
        rms_norm_eps=hf["rms_norm_eps"],
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        rope=rope,
    )
