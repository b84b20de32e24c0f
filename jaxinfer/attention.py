"""Attention in a step: new keys and values into the pages, then over them.

Kernels are opaque to the compiler's partitioner: over several devices each runs them for the heads
that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.base import Norms, Rotary
from jaxinfer.models.layers import rms_norm
from jaxinfer.sharding import partition_spec
from jaxinfer.step_model import Placement, StepModel
from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill,
    rotate_and_write,
    write_kv,
    write_latent,
)

Pages = tuple[Array, ...]  # of keys and of values, or of keys that begin with values


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
    body = functools.partial(
        rotate_and_write,
        pairs=config.rope_pairs,
        eps=config.rms_norm_eps,
        norm_offset=config.norm_offset,
        implementation=model.attention,
    )
    if model.mesh is not None and kernels:
        heads, whole = partition_spec((None, "kv_heads")), PartitionSpec()
        pool = partition_spec(model.groups[0].axes)
        specs = (heads, heads, heads, whole, (pool, pool), whole, whole, whole)
        out = (heads, (pool, pool))
        body = jax.shard_map(body, mesh=model.mesh, in_specs=specs, out_specs=out, check_vma=False)
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
    how: dict[str, Any] = {
        "scale": model.config.scale,
        "window": kind.window,
        "soft_cap": model.config.attention_soft_cap,
        "implementation": model.attention,
        "block": model.attention_block,
        "value_dim": model.config.value_dim,
    }
    rows, parts = place.kv_lens.shape[0], []
    if rows:
        decode = functools.partial(_call, paged_attention, how)
        arrays = (q[:rows], pages, sinks, place.decode_table, place.kv_lens)
        parts.append(_on_each_device(model, decode, *arrays))
    if place.tiles is not None:
        prefill = functools.partial(_call, paged_prefill, how)
        parts.append(
            _on_each_device(model, prefill, q[rows:], pages, sinks, place.table, place.tiles)
        )
    return jnp.concatenate(parts)


def _call(
    body: Callable[..., Array], how: dict[str, Any], q: Array, pages: Pages, sinks: Any, *where: Any
) -> Array:
    k, v = pages if len(pages) == 2 else (pages[0], None)
    return body(q, k, v, *where, sinks=sinks, **how)


def _on_each_device(
    model: StepModel, body: Callable[..., Array], q: Array, pages: Pages, sinks: Any, *where: Any
) -> Array:
    if model.mesh is None or model.attention.startswith("reference"):
        return body(q, pages, sinks, *where)
    latent = model.config.value_dim is not None  # of all heads: those of queries are divided
    heads = partition_spec((None, None, "heads") if latent else (None, "kv_heads"))
    whole = PartitionSpec()
    specs = (
        heads,
        partition_spec(model.groups[0].axes),
        PartitionSpec(*heads[1:]),
        *(whole for _ in where),
    )
    return jax.shard_map(body, mesh=model.mesh, in_specs=specs, out_specs=heads, check_vma=False)(
        q, pages, sinks, *where
    )
