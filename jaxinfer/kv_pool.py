"""The paged KV pool on the device, and its geometry.

Layers with the same cache needs form a group; each group has its own page count and page table.
Every layer has its own pair of arrays [pages, kv_heads, page_size, head_dim], so a step updates
them in place; with latent attention it has one, whose keys begin with the values. Pages in 8 bits
have float32 scales [pages, kv_heads, page_size] of keys and of values beside them. Page 0 is the
null page.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.page_dtypes import in_8_bits
from jaxinfer.sharding import LATENT_AXES, POOL_AXES
from jaxinfer.step_plan import chunk_pages
from jaxinfer.window_pages import most_kept, pages_of_one
from pallas_kernels.dispatch import MOST_ELEMENTS, out_of_reach

# Of a layer (k_pages, v_pages), with (k_scales, v_scales) behind them if those are in 8 bits, or
# (latent_pages,): arrays or their structs.
Pools = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a page table over `num_pages` pages, of which they need those of the last
    `window` tokens (None: all).

    With `value_dim` the leading part of a key is its value, and values have no pages of their own.
    Raises ValueError for such pages in 8 bits. `as_bits`: pages of float8 are arrays of uint8.
    """

    layers: tuple[int, ...]
    num_pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    value_dim: int | None = None
    as_bits: bool = False

    def __post_init__(self) -> None:
        if self.value_dim is not None and in_8_bits(self.dtype):
            raise ValueError(
                f"kv_dtype is {self.dtype}, but latent attention's pages are served in float32, "
                "bfloat16 or float16 only; choose one of them"
            )

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of a key and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of pages and scales: a latent is all heads', so every device has it."""
        return POOL_AXES if self.value_dim is None else LATENT_AXES

    @property
    def page_bytes(self) -> int:
        """Bytes one page takes over all layers of the group: keys, values and their scales."""
        per_layer = sum(math.prod(a.shape[1:]) * a.dtype.itemsize for a in self.layer_arrays())
        return len(self.layers) * per_layer

    @property
    def capacity(self) -> int:
        """Tokens the group can hold: page 0 holds none."""
        return (self.num_pages - 1) * self.page_size

    def pages_of(self, length: int) -> int:
        """Pages of a sequence of `length` tokens, but for those of a chunk on its way."""
        whole = pages_for(length, self.page_size)
        return whole if self.window is None else min(whole, most_kept(self.window, self.page_size))

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        return (self.num_pages, self.kv_heads, self.page_size, self.head_dim)

    def layer_arrays(self, sharding: Any = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a layer's entry of the pools consists of."""
        struct = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        bits = self.as_bits and self.dtype == "float8_e4m3fn"
        pages = struct(self.layer_shape, jnp.dtype("uint8" if bits else self.dtype))
        if self.value_dim is not None:
            return (pages,)
        scales = struct(self.layer_shape[:3], jnp.dtype(jnp.float32))
        return (pages, pages, scales, scales) if in_8_bits(self.dtype) else (pages, pages)


def kv_groups(
    model: ModelConfig, num_pages: int | tuple[int, ...], page_size: int, dtype: str
) -> tuple[KVGroup, ...]:
    """The groups of a model: layers that see everything first, then those of each window.

    `num_pages` is of each group, or the same for all.
    """
    windows = [model.kind(i).window for i in range(model.num_layers)]
    order = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    counts = num_pages if isinstance(num_pages, tuple) else (num_pages,) * len(order)
    return tuple(
        KVGroup(
            layers=tuple(i for i, own in enumerate(windows) if own == window),
            num_pages=count,
            page_size=page_size,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            window=window,
            value_dim=model.value_dim,
        )
        for window, count in zip(order, counts, strict=True)
    )


def least_pages(groups: tuple[KVGroup, ...], length: int, chunk_tokens: int) -> tuple[int, ...]:
    """Pages of each group, the null page among them, that serve one sequence of `length` tokens
    whose prompt is computed by `chunk_tokens`."""
    return tuple(1 + pages_of_one(g.window, length, g.page_size, chunk_tokens) for g in groups)


def on_platform(groups: tuple[KVGroup, ...], platform: str) -> tuple[KVGroup, ...]:
    """The groups as a platform's programs take them: XLA for CPUs has no float8."""
    return tuple(dataclasses.replace(group, as_bits=platform == "cpu") for group in groups)


def pages_that_fit(
    groups: tuple[KVGroup, ...], pool_bytes: int, num_slots: int, length: int, chunk_tokens: int
) -> tuple[int, ...]:
    """Pages of each group that `pool_bytes` holds, the null page among them, at most as many as
    `num_slots` sequences of `length` tokens need. Fewer are rounded down to a multiple of 16 above
    64, but never below what one sequence needs.

    Every group has what one sequence needs, if that is there. Of what is left, a half is divided
    into as many pages of one group as of another, which is what sequences within all windows need,
    the other half as sequences of `length` need it. So of sequences of one length, whatever it is,
    at least half as many have room in it as if all that is left were divided for that length.

    The page count is part of every program's shape: rounding keeps the compilation cache valid
    when the free memory differs a little from one start to the next.
    """
    least = least_pages(groups, length, chunk_tokens)
    of_one = sum(pages * group.page_bytes for pages, group in zip(least, groups))
    if pool_bytes < of_one:
        return tuple(max(0, pool_bytes) * pages // of_one for pages in least)
    most = [_most_pages(group, num_slots, length, chunk_tokens) for group in groups]
    room = [highest - lowest for highest, lowest in zip(most, least)]
    beside = _divided(groups, pool_bytes - of_one, length, room)
    counts = [lowest + more for lowest, more in zip(least, beside)]
    return tuple(
        count if count == highest else max(_rounded(count), lowest)
        for count, lowest, highest in zip(counts, least, most)
    )


def _divided(
    groups: tuple[KVGroup, ...], left: int, length: int, room: Sequence[float]
) -> list[int]:
    """Pages of each group in `left` bytes, at most `room` of it: half of the bytes into as many of
    one group as of another, half as sequences of `length` tokens need them."""
    each = [group.pages_of(length) for group in groups]
    counts, shared = [0] * len(groups), {*range(len(groups))}
    while shared:  # groups that need less than their share leave the rest to the others
        alike = sum(groups[i].page_bytes for i in shared)
        as_needed = sum(each[i] * groups[i].page_bytes for i in shared)
        shares = {
            i: left * (as_needed + each[i] * alike) // (2 * alike * as_needed) for i in shared
        }
        full = {i for i in shared if shares[i] >= room[i]}
        for i in full or shared:
            counts[i] = int(room[i]) if i in full else shares[i]
            left -= counts[i] * groups[i].page_bytes
        shared -= full or shared
    return counts


def within_reach(
    groups: tuple[KVGroup, ...], pages: tuple[int, ...], shards: int
) -> tuple[int, ...]:
    """As many pages of each group as kernels reach on one of `shards` devices: of those in 8 bits
    fewer, where a layer's keys take from 2 to 4 GiB."""

    def reached(group: KVGroup, count: int) -> int:
        of_page = math.prod(group.layer_shape[1:]) // shards
        missed = out_of_reach(count * of_page, jnp.dtype(group.dtype).itemsize)
        return MOST_ELEMENTS // of_page if missed else count

    return tuple(reached(group, count) for group, count in zip(groups, pages, strict=True))


def _most_pages(group: KVGroup, num_slots: int, length: int, chunk_tokens: int) -> int:
    """Pages of a group that so many sequences can use. Of windows, with those of two steps on their
    way, and as many again: a beginning that the prefix cache keeps is found by its last window."""
    whole = num_slots * pages_for(length, group.page_size)
    if group.window is None:
        return 1 + whole
    windows = 2 * num_slots * group.pages_of(length)
    return 1 + min(windows + 2 * chunk_pages(chunk_tokens, group.page_size), whole)


def _rounded(pages: int) -> int:
    return pages // 16 * 16 if pages > 64 else pages


def host_pages_for(groups: tuple[KVGroup, ...], host_bytes: int, length: int) -> tuple[int, ...]:
    """Pages of each group that `host_bytes` of host memory hold: of what one page of each leaves,
    divided as a pool is, see `pages_that_fit`. (0, …): not even those."""
    left = host_bytes - sum(group.page_bytes for group in groups)
    if left < 0:
        return (0,) * len(groups)
    return tuple(1 + more for more in _divided(groups, left, length, [math.inf] * len(groups)))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return math.ceil(tokens / page_size)


def abstract_pools(groups: tuple[KVGroup, ...], sharding: Any = None) -> Pools:
    """The pools as ShapeDtypeStructs, in layer order."""
    by_layer = {layer: group for group in groups for layer in group.layers}
    return [group.layer_arrays(sharding) for _, group in sorted(by_layer.items())]


def empty_pools(groups: tuple[KVGroup, ...], sharding: Any = None) -> Pools:
    """Zeroed pools on the device: every page is finite before it is written."""
    return [
        tuple(jnp.zeros(pages.shape, pages.dtype, device=sharding) for pages in layer)
        for layer in abstract_pools(groups)
    ]
