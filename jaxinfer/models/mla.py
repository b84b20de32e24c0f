"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its absorbed form.

A token's keys and values all come from one latent of `kv_rank` values, and a key of `rope_dim`
values that rotates is the same for all heads. The pool keeps just these, as one key of one head
whose leading part is its value. Each head's key matrix goes into its queries, which then meet
latents; its value matrix is applied to what was attended to. So nothing is ever expanded to keys
and values of heads.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import MlaConfig, ModelConfig
from jaxinfer.models.base import Attend, HfSource, RunLatent
from jaxinfer.models.layers import add_bias, linear, linear_by_head, rms_norm
from jaxinfer.params import ParamSpec, Tree
from pallas_kernels.paged_attention import apply_rope

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's own is


def mla_specs(c: ModelConfig, m: MlaConfig) -> dict[str, ParamSpec]:
    """Parameters of one layer's attention. Heads are sharded, what they share is not."""
    heads, width, by_head = c.num_heads, c.hidden_size, ("heads", None, None)
    q_shape = (heads, m.nope_dim + m.rope_dim, m.q_rank or width)
    specs = {
        "q": ParamSpec(q_shape, by_head, inputs=1),
        "kv_a": ParamSpec((m.kv_rank + m.rope_dim, width), (None, "embed"), inputs=1),
        "kv_a_norm": ParamSpec((m.kv_rank,), (None,), "ones"),
        "k_b": ParamSpec((heads, m.kv_rank, m.nope_dim), by_head),
        "v_b": ParamSpec((heads, m.v_dim, m.kv_rank), by_head),
        "o": ParamSpec((width, heads, m.v_dim), ("embed", "heads", None), inputs=2),
    }
    if m.bias:
        specs["kv_a_bias"] = ParamSpec((m.kv_rank + m.rope_dim,), (None,), "zeros")
    if m.q_rank:
        specs["q_a"] = ParamSpec((m.q_rank, width), (None, "embed"), inputs=1)
        specs["q_a_norm"] = ParamSpec((m.q_rank,), (None,), "ones")
        if m.bias:
            specs["q_a_bias"] = ParamSpec((m.q_rank,), (None,), "zeros")
    return specs


def mla_sources(c: ModelConfig, m: MlaConfig, attn: str) -> dict[str, HfSource]:
    """The tensors of one layer's attention; those of keys and values of heads are one."""
    heads, width = c.num_heads, c.hidden_size
    q_rows, kv_rows = heads * (m.nope_dim + m.rope_dim), heads * (m.nope_dim + m.v_dim)
    kv_b: dict[str, tuple[int, ...]] = {f"{attn}kv_b_proj.weight": (kv_rows, m.kv_rank)}

    def by_head(rows: Any) -> Any:
        return rows.reshape(heads, m.nope_dim + m.v_dim, m.kv_rank)

    latent = f"{attn}kv_a_proj_with_mqa."
    sources = {
        "kv_a": HfSource({f"{latent}weight": (m.kv_rank + m.rope_dim, width)}),
        "kv_a_norm": HfSource({f"{attn}kv_a_layernorm.weight": (m.kv_rank,)}),
        "k_b": HfSource(kv_b, lambda rows: by_head(rows)[:, : m.nope_dim].swapaxes(1, 2)),
        "v_b": HfSource(kv_b, lambda rows: by_head(rows)[:, m.nope_dim :]),
        "o": HfSource({f"{attn}o_proj.weight": (width, heads * m.v_dim)}),
    }
    if m.bias:
        sources["kv_a_bias"] = HfSource({f"{latent}bias": (m.kv_rank + m.rope_dim,)})
    if not m.q_rank:
        sources["q"] = HfSource({f"{attn}q_proj.weight": (q_rows, width)})
        return sources
    sources["q_a"] = HfSource({f"{attn}q_a_proj.weight": (m.q_rank, width)})
    sources["q_a_norm"] = HfSource({f"{attn}q_a_layernorm.weight": (m.q_rank,)})
    sources["q"] = HfSource({f"{attn}q_b_proj.weight": (q_rows, m.q_rank)})
    if m.bias:
        sources["q_a_bias"] = HfSource({f"{attn}q_a_proj.bias": (m.q_rank,)})
    return sources


def latent_attention(
    params: Tree,
    c: ModelConfig,
    m: MlaConfig,
    x: Float[Array, "T D"],
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    attend: Attend,
    run_latent: RunLatent | None = None,
) -> Float[Array, "T D"]:
    """One layer's attention; `rotary` are cos and sin of the part that rotates. `run_latent` has
    it computed in the way, and on the devices, that it knows of."""
    if run_latent is not None:
        return add_bias(run_latent(params, x, rotary), params.get("o_bias"))
    low = x
    if m.q_rank:
        low = add_bias(linear(x, params["q_a"]), params.get("q_a_bias"))
        low = rms_norm(low, params["q_a_norm"], LATENT_EPS)
    q = linear(low, params["q"])
    latent = add_bias(linear(x, params["kv_a"]), params.get("kv_a_bias"))
    shared_key = apply_rope(latent[:, None, m.kv_rank :], *rotary, c.rope_pairs)
    latent = rms_norm(latent[:, : m.kv_rank], params["kv_a_norm"], LATENT_EPS)
    absorbed = linear_by_head(q[:, :, : m.nope_dim], params["k_b"])
    rotated = apply_rope(q[:, :, m.nope_dim :], *rotary, c.rope_pairs)
    queries = jnp.concatenate([absorbed, rotated], axis=-1)
    keys = jnp.concatenate([latent[:, None], shared_key], axis=-1)
    attended = attend(queries[:, None], keys, None)[:, 0]
    values = linear_by_head(attended, params["v_b"])
    return add_bias(linear(values, params["o"]), params.get("o_bias"))
