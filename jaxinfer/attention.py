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
from jaxinfer.models.base import FusedAttend
from jaxinfer.sharding import POOL_AXES, partition_spec
from jaxinfer.step_model import Placement, StepModel
from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill,
    rotate_and_write,
    write_kv,
    write_latent,
)

Pages = tuple[Array, ...]  # of keys and of values, or of keys that begin with values


class LayerAttention:
    """Attention of one layer in a step. `pages` are the layer's: with the step's keys and values
    once it was called."""

    def __init__(self, model: StepModel, kind: LayerKind, place: Placement, pages: Pages):
        self.model, self.kind, self.place, self.pages = model, kind, place, pages

    def __call__(
        self,
        q: Float[Array, "T KV G hd"],
        k: Float[Array, "T KV hd"],
        v: Float[Array, "T KV hd"] | None,
        sinks: Float[Array, "KV G"] | None = None,
    ) -> Float[Array, "T KV G vd"]:
        self.pages = write(self.model.config, self.pages, self.place, k, v)
        return attend_pages(self.model, self.kind, self.place, q, self.pages, sinks)


class FusedLayerAttention(LayerAttention, FusedAttend):
    """`LayerAttention` by kernels: one that norms and rotates heads writes the pages too."""

    def projected(
        self,
        qkv: Float[Array, "T KV G2 hd"],
        rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        norms: tuple[Float[Array, " hd"], Float[Array, " hd"]] | None,
        sinks: Float[Array, "KV G"] | None,
    ) -> Float[Array, "T KV G hd"]:
        """See `FusedAttend`."""
        config, whole = self.model.config, PartitionSpec()
        body = functools.partial(
            rotate_and_write,
            eps=config.rms_norm_eps,
            norm_offset=config.norm_offset,
            implementation=self.model.attention,
        )
        heads, pages = partition_spec((None, "kv_heads")), partition_spec(POOL_AXES)
        q, *stored = _sharded(
            self.model,
            body,
            (heads, pages, pages, *(whole,) * 4),
            (heads, pages, pages),
            *(qkv, *self.pages, self.place.pages, self.place.offsets, rotary, norms),
        )
        self.pages = tuple(stored)
        return attend_pages(self.model, self.kind, self.place, q, self.pages, sinks)


def write(config: ModelConfig, pages: Pages, place: Placement, k: Array, v: Array | None) -> Pages:
    """The pages with the step's keys and values; without `v`, keys begin with values."""
    where = (place.pages, place.offsets, k)
    if v is None:
        assert config.value_dim is not None
        return (write_latent(pages[0], *where, config.value_dim),)
    return write_kv(pages[0], pages[1], *where, v)


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
    return _sharded(model, body, specs, heads, q, pages, sinks, *where)


def _sharded(
    model: StepModel, body: Callable[..., Any], ins: tuple[Any, ...], outs: Any, *arrays: Any
) -> Any:
    """Run a kernel on every device, for what it has of the arrays."""
    if model.mesh is None:
        return body(*arrays)
    return jax.shard_map(body, mesh=model.mesh, in_specs=ins, out_specs=outs, check_vma=False)(
        *arrays
    )
