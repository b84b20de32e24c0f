"""Attention in a step: new keys and values into the pages, then over them.

Kernels are opaque to the compiler's partitioner: over several devices each runs them for the heads
that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import Norms, Rotary
from jaxinfer.models.layers import rms_norm
from jaxinfer.sharding import on_each_device, partition_spec
from jaxinfer.step_model import Placement, StepModel
from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill,
    project_values,
    rotate_and_write,
    write_kv,
    write_latent,
)

# Of keys and of values, and their scales if those are in 8 bits; or of keys that begin with values.
Pages = tuple[Array, ...]


def write(
    model: StepModel,
    pages: Pages,
    place: Placement,
    q: Float[Array, "T KV G hd"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"] | None,
    rotary: Rotary | None,
    norms: Norms | None,
) -> tuple[Float[Array, "T KV G hd"], Pages]:
    """The queries, and the pages with the step's keys and values: normed if there are weights for
    it, then rotated if there are angles. Without `v`, keys begin with values.
    """
    config, where = model.config, (place.pages, place.offsets)
    kernels = not model.attention.startswith("reference")
    if v is None:
        assert config.value_dim is not None and rotary is None and norms is None
        return q, (write_latent(pages[0], *where, k, config.value_dim),)
    if norms is not None and (rotary is None or not kernels):
        q, k = _normed(config, q, norms[0]), _normed(config, k, norms[1])
        norms = None
    if rotary is None:
        return q, write_kv(pages, *where, k, v)
    body: Callable[..., Any] = functools.partial(
        rotate_and_write,
        pairs=config.rope_pairs,
        eps=config.rms_norm_eps,
        norm_offset=config.norm_offset,
        implementation=model.attention,
    )
    if kernels:
        heads, whole = partition_spec((None, "kv_heads")), PartitionSpec()
        pool = partition_spec(model.groups[0].axes)
        specs = (heads, heads, heads, whole, pool, whole, whole, whole)
        body = on_each_device(body, model.mesh, specs, (heads, pool))
    return body(q, k, v, rotary, pages, *where, norms)


def _normed(
    config: ModelConfig, x: Float[Array, "T *heads hd"], weight: Float[Array, " hd"]
) -> Float[Array, "T *heads hd"]:
    flat = x.reshape(-1, x.shape[-1])
    return rms_norm(flat, weight, config.rms_norm_eps, config.norm_offset).reshape(x.shape)


def attend_pages(
    model: StepModel,
    kind: LayerKind,
    place: Placement,
    q: Float[Array, "T KV G hd"],
    pages: Pages,
    sinks: Float[Array, "KV G"] | None,
) -> Float[Array, "T KV G vd"]:
    """Attention of the step's decode rows, then of its chunk."""
    body: Callable[..., Any] = functools.partial(attend_own, model, kind)
    if not model.attention.startswith("reference"):
        latent = model.config.value_dim is not None  # of all heads: those of queries are divided
        heads = partition_spec((None, None, "heads") if latent else (None, "kv_heads"))
        pool, whole = partition_spec(model.groups[0].axes), PartitionSpec()
        specs = (whole, heads, pool, PartitionSpec(*heads[1:]))
        body = on_each_device(body, model.mesh, specs, heads)
    return body(place, q, pages, sinks)


def attend_own(
    model: StepModel,
    kind: LayerKind,
    place: Placement,
    q: Float[Array, "T KV G hd"],
    pages: Pages,
    sinks: Float[Array, "KV G"] | None = None,
    value_weights: Float[Array, "H out vd"] | None = None,
) -> Float[Array, "T KV G out"]:
    """`attend_pages` for the heads that a device has, whose values may go through matrices."""
    k, *more = pages
    v, k_scale, v_scale = (*more, None, None, None)[:3]
    how: dict[str, Any] = {
        "scale": model.config.scale,
        "window": kind.window,
        "soft_cap": model.config.attention_soft_cap,
        "sinks": sinks,
    }
    if model.cpu_heads is not None and v is not None:
        return _attend_on_cpu(place, q, k, v, how)
    how |= {
        "implementation": model.attention,
        "block": model.attention_block,
        "value_dim": model.config.value_dim,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    rows, parts = place.kv_lens.shape[0], []
    if rows:
        where = (place.decode_table, place.kv_lens)
        parts.append(paged_attention(q[:rows], k, v, *where, value_weights=value_weights, **how))
    if place.tiles is not None:
        out = paged_prefill(q[rows:], k, v, place.table, place.tiles, **how)
        parts.append(out if value_weights is None else project_values(out, value_weights))
    return jnp.concatenate(parts)


def _attend_on_cpu(
    place: Placement, q: Float[Array, "T KV G hd"], k: Array, v: Array, how: dict[str, Any]
) -> Float[Array, "T KV G hd"]:
    """`attend_own` by the kernels for this CPU."""
    from jaxinfer.cpu_kernels import attention  # which needs LLVM

    rows, parts = place.kv_lens.shape[0], []
    if rows:
        where = (place.decode_table, place.kv_lens)
        parts.append(attention.paged_attention(q[:rows], k, v, *where, **how))
    if place.tiles is not None:
        parts.append(attention.paged_prefill(q[rows:], k, v, place.table, place.tiles, **how))
    return jnp.concatenate(parts)
