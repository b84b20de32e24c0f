"""Mixtures of experts: a router sends every token to a few gated MLPs (Shazeer et al. 2017,
arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088). Nothing is dropped: rows are put in order of
their expert, and grouped products compute exactly those there are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig, MoeConfig
from jaxinfer.models.base import HfSource, OnRouted, Routed, RunExperts
from jaxinfer.models.expert_tensors import with_fused
from jaxinfer.models.layers import (
    activate,
    add_bias,
    clamped_swiglu,
    fuse_gate_up,
    linear,
    linear_of_experts,
    mlp_block,
)
from jaxinfer.params import ParamSpec, Tree
from jaxinfer.quantization.weight import Heard, Quantised
from pallas_kernels.grouped_matmul import grouped_matmul

Names = tuple[str, tuple[str, str, str]]
# How checkpoints call a layer's mixture and its experts' projections: gate, up, down.
QWEN_NAMES: Names = ("mlp", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL_NAMES: Names = ("block_sparse_moe", ("w1", "w3", "w2"))


def moe_specs(c: ModelConfig, m: MoeConfig) -> dict[str, ParamSpec]:
    """Parameters of one layer's mixture."""
    block, width = mlp_block(m.intermediate_size), c.hidden_size
    specs = {
        "router": ParamSpec((m.num_experts, width), (None, "embed")),
        "experts_gate_up": ParamSpec(
            (m.num_experts, m.intermediate_size // block, 2, block, width),
            ("experts", "mlp", None, None, "embed"),
            inputs=1,
        ),
        "experts_down": ParamSpec(
            (m.num_experts, width, m.intermediate_size), ("experts", "embed", "mlp"), inputs=1
        ),
    }
    if m.bias:
        specs |= _bias_specs(c, m)
    if m.shared_size:
        block = mlp_block(m.shared_size)
        specs["shared_gate_up"] = ParamSpec(
            (m.shared_size // block, 2, block, width), ("mlp", None, None, "embed"), inputs=1
        )
        specs["shared_down"] = ParamSpec((width, m.shared_size), ("embed", "mlp"), inputs=1)
    if m.shared_size and m.shared_gated:
        specs["shared_gate"] = ParamSpec((1, width), (None, "embed"))
    if m.scoring == "sigmoid":
        specs["correction"] = ParamSpec((m.num_experts,), (None,), "zeros", "float32")
    return specs


def _bias_specs(c: ModelConfig, m: MoeConfig) -> dict[str, ParamSpec]:
    block = mlp_block(m.intermediate_size)
    return {
        "router_bias": ParamSpec((m.num_experts,), (None,), "zeros", "float32"),
        "experts_gate_up_bias": ParamSpec(
            (m.num_experts, m.intermediate_size // block, 2, block),
            ("experts", "mlp", None, None),
            "zeros",
        ),
        "experts_down_bias": ParamSpec(
            (m.num_experts, c.hidden_size), ("experts", "embed"), "zeros"
        ),
    }


def moe_sources(c: ModelConfig, m: MoeConfig, hf: str, names: Names) -> dict[str, HfSource]:
    """The tensors of a layer's mixture: every expert has its own, or they are fused."""
    prefix, (gate, up, down) = names
    experts, width = f"{hf}{prefix}.experts.", c.hidden_size
    inner = (m.intermediate_size, width)
    count = range(m.num_experts)

    sources = {
        "router": HfSource({f"{hf}{prefix}.gate.weight": (m.num_experts, width)}),
        "experts_gate_up": HfSource(
            {f"{experts}{i}.{name}.weight": inner for i in count for name in (gate, up)},
            fuse_gate_up,
            each=2,
        ),
        "experts_down": HfSource(
            {f"{experts}{i}.{down}.weight": inner[::-1] for i in count}, each=1
        ),
    }
    if m.scoring == "sigmoid":
        name = f"{hf}{prefix}.gate.e_score_correction_bias"
        sources["correction"] = HfSource({name: (m.num_experts,)})
    if m.shared_size:
        # Files that gate it call it one expert, the others several.
        shared = f"{hf}{prefix}.shared_expert{'' if m.shared_gated else 's'}."
        inner = (m.shared_size, width)
        halves: dict[str, tuple[int, ...]] = {
            f"{shared}{name}.weight": inner for name in (gate, up)
        }
        sources["shared_gate_up"] = HfSource(halves, fuse_gate_up)
        sources["shared_down"] = HfSource({f"{shared}{down}.weight": inner[::-1]})
    if m.shared_size and m.shared_gated:
        sources["shared_gate"] = HfSource({f"{hf}{prefix}.shared_expert_gate.weight": (1, width)})
    return with_fused(sources, c, m, hf)


def moe(
    params: Tree,
    c: ModelConfig,
    m: MoeConfig,
    x: Float[Array, "T D"],
    on_routed: OnRouted | None = None,
    run_experts: RunExperts | None = None,
) -> Float[Array, "T D"]:
    """The weighted outputs of each token's experts, and of the shared one.

    `run_experts` has the experts computed in the way, and on the devices, that it knows of.
    """
    logits = linear(x, params["router"], out_dtype=jnp.float32)
    logits = add_bias(logits, params.get("router_bias"))
    weights, experts = route(m, logits, params.get("correction"))
    if on_routed is not None:
        on_routed(experts)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)  # stable, so the same rows come in the same order
    sizes = jnp.bincount(flat, length=m.num_experts).astype(jnp.int32)
    shares = weights.astype(x.dtype)
    mixed = (run_experts or _by_platform)(
        functools.partial(_experts, c, m),
        (x[order // m.top_k], sizes, jnp.argsort(order), shares),
        params["experts_gate_up"],
        params["experts_down"],
        params["experts_gate_up_bias"][flat[order]] if m.bias else None,
    )
    if m.bias:
        biases = params["experts_down_bias"][experts]
        mixed = mixed + jnp.sum(biases * shares[:, :, None], axis=1)
    if not m.shared_size:
        return mixed
    hidden = activate(linear(x, params["shared_gate_up"]), c.activation)
    shared = linear(hidden, params["shared_down"])
    if m.shared_gated:
        shared = jax.nn.sigmoid(linear(x, params["shared_gate"])) * shared
    return mixed + shared


def route(
    m: MoeConfig, logits: Float[Array, "T E"], correction: Float[Array, " E"] | None = None
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Each token's experts, best first, and their weights; ties go to the lower expert.

    `correction` is added to the scores that decide who is chosen, and to no weight.
    """
    softmax = m.scoring == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    ranked = scores if correction is None else scores + correction[None]
    if m.groups > 1:
        ranked = _of_best_groups(m, ranked)
    _, experts = lax.top_k(ranked, m.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if m.normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # sigmoids may all be 0
    return weights * m.weight_scale, experts


def _of_best_groups(m: MoeConfig, ranked: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """The scores of experts in each token's best groups; -inf for all others."""
    grouped = ranked.reshape(ranked.shape[0], m.groups, -1)
    best, _ = lax.top_k(grouped, 1 if m.scoring == "softmax" else 2)
    _, chosen = lax.top_k(best.sum(-1), m.top_groups)
    allowed = jnp.any(chosen[:, :, None] == jnp.arange(m.groups)[None, None], axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


def _experts(
    c: ModelConfig,
    m: MoeConfig,
    multiply: Any,
    routed: Routed,
    gate_up: Float[Array, "E blocks 2 block D"] | Quantised | Heard,
    down: Float[Array, "E D F"] | Quantised | Heard,
    bias: Float[Array, "R blocks 2 block"] | None,
) -> Float[Array, "T D"]:
    """Each token's experts, or a device's part of all of them, by their shares."""
    rows, sizes, places, shares = routed
    halves = linear_of_experts(multiply, rows, gate_up, sizes)
    halves = halves if bias is None else halves + bias
    outputs = linear_of_experts(multiply, _activated(c, m, halves), down, sizes)[places]
    outputs = outputs.reshape(*shares.shape, -1)
    return jnp.sum(outputs * shares[:, :, None], axis=1)


def _by_platform(compute: Any, *arrays: Any) -> Any:
    """Experts by XLA alone, in the form that is right for the platform."""

    def by(implementation: Any) -> Any:
        product = functools.partial(grouped_matmul, implementation=implementation)
        return functools.partial(compute, product)

    return lax.platform_dependent(*arrays, cpu=by("segments"), default=by("segments_static"))


def _activated(
    c: ModelConfig, m: MoeConfig, halves: Float[Array, "R blocks 2 block"]
) -> Float[Array, "R F"]:
    if m.swiglu_limit is None:
        return activate(halves, c.activation)
    return clamped_swiglu(halves, m.swiglu_limit, m.swiglu_alpha)
