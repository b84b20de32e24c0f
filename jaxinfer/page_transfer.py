"""Pages that sequences lose under pressure: out of the KV pool into host memory, and back.

Two programs a KV group move a fixed number of pages of all its layers; padding is the null page.
`PageTransfer` dispatches them ahead of a step. What is read lands in host memory later, when the
step is collected, so the device does not wait; few reads and writes are on their way at once, so
the memory they take is bounded and planned for.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, Num

from jaxinfer.kv_pool import KVGroup, Pools
from jaxinfer.sharding import constrain, partition_spec
from jaxinfer.step_plan import StepPlan

BATCH = 8  # pages one program moves
MOST_BATCHES = 4  # reads, and writes, on their way at once


Axes = tuple[str | None, ...]


def _batch_axes(pool_axes: Axes) -> Axes:
    return (None, None, *pool_axes[1:])  # page, layer, heads, ...


@functools.partial(jax.jit, static_argnames=("axes", "mesh"))
def read_pages(
    pools: Pools, pages: Int[Array, " B"], *, axes: Axes, mesh: Mesh | None
) -> tuple[Num[Array, "B L KV ps ..."], ...]:
    """Pages of all layers of a group, those of one page side by side: of keys, of values, and their
    scales, as the pools have them; `axes` are the pools'."""
    data = tuple(
        jnp.stack([pool.at[pages].get(mode="promise_in_bounds") for pool in part], axis=1)
        for part in zip(*pools, strict=True)
    )
    return constrain(data, mesh, *_batch_axes(axes))


@functools.partial(jax.jit, static_argnames=("axes", "mesh"), donate_argnames=("pools",))
def write_pages(
    pools: Pools,
    pages: Int[Array, " B"],
    data: tuple[Num[Array, "B L KV ps ..."], ...],
    *,
    axes: Axes,
    mesh: Mesh | None,
) -> Pools:
    """The inverse of `read_pages`, in place. Padding writes the null page several times."""
    written = [
        tuple(
            pool.at[pages].set(part[:, i], mode="promise_in_bounds")
            for pool, part in zip(layer, data, strict=True)
        )
        for i, layer in enumerate(pools)
    ]
    return constrain(written, mesh, *axes)


def batch_structs(group: KVGroup, mesh: Mesh | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `read_pages` gives."""
    place = None if mesh is None else NamedSharding(mesh, partition_spec(_batch_axes(group.axes)))
    return tuple(
        jax.ShapeDtypeStruct(
            (BATCH, len(group.layers), *array.shape[1:]), array.dtype, sharding=place
        )
        for array in group.layer_arrays()
    )


def pools_of(pools: Pools, group: KVGroup) -> Pools:
    """The pools of a group's layers."""
    return [pools[layer] for layer in group.layers]


@dataclass(slots=True)
class _Read:
    """Pages on their way to host memory: of which step, and where they go."""

    step: int
    group: int
    host_pages: list[int]
    data: Any


class PageTransfer:
    """Owns the host's copies of pages, arrays [host pages, layers, ...] of each KV group, and moves
    pages as plans say.

    `programs` are compiled `(read_pages, write_pages)` by group. A host page is as the last plan
    left it that named it: reads land in the order they were dispatched.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        host_pages: tuple[int, ...],
        programs: list[tuple[Any, Any]],
    ):
        self.groups, self.host_pages, self.programs = groups, host_pages, programs
        # Written once, so that the memory is there from the start.
        self._store = [
            [np.full((count, *part.shape[1:]), 0, part.dtype) for part in parts]
            for count, parts in zip(host_pages, (batch_structs(group, None) for group in groups))
        ]
        self._reads: deque[_Read] = deque()

    def dispatch(self, pools: Pools, plan: StepPlan) -> Pools:
        """Send a plan's pages on their way; the pools with those that came back."""
        for group, pages, host_pages in _batches(plan.page_outs):
            while len(self._reads) >= MOST_BATCHES:
                self._land()
            read, _ = self.programs[group]
            data = read(pools_of(pools, self.groups[group]), _padded(pages))
            for part in data:
                part.copy_to_host_async()
            self._reads.append(_Read(plan.number, group, host_pages, data))
        for sent, (group, pages, host_pages) in enumerate(_batches(plan.page_ins)):
            layers = self.groups[group].layers
            if sent and sent % MOST_BATCHES == 0:
                jax.block_until_ready(pools[layers[0]])
            _, write = self.programs[group]
            data = self._take(group, host_pages)
            written = write(pools_of(pools, self.groups[group]), _padded(pages), data)
            pools = list(pools)
            for layer, arrays in zip(layers, written):
                pools[layer] = arrays
        return pools

    def land(self, step: int) -> None:
        """Bring what steps up to `step` read into host memory, waiting for it if need be."""
        while self._reads and self._reads[0].step <= step:
            self._land()

    def _land(self) -> None:
        read = self._reads.popleft()
        for store, part in zip(self._store[read.group], read.data, strict=True):
            store[read.host_pages] = np.asarray(part)[: len(read.host_pages)]

    def _take(self, group: int, host_pages: list[int]) -> tuple[np.ndarray, ...]:
        """A copy of host pages, padded: the device reads it while the originals may change."""
        while any(r.group == group and set(r.host_pages) & set(host_pages) for r in self._reads):
            self._land()
        taken = []
        for store in self._store[group]:
            part = np.zeros((BATCH, *store.shape[1:]), store.dtype)
            part[: len(host_pages)] = store[host_pages]
            taken.append(part)
        return tuple(taken)


def _batches(
    moves: list[tuple[int, int, int]],
) -> Iterator[tuple[int, list[int], list[int]]]:
    """(group, pages, host pages) of at most `BATCH` moves each, in the order of groups."""
    by_group = itertools.groupby(sorted(moves, key=lambda move: move[0]), lambda move: move[0])
    for group, moves_of_group in by_group:
        for batch in itertools.batched(moves_of_group, BATCH):
            yield group, [page for _, page, _ in batch], [host for _, _, host in batch]


def _padded(pages: list[int]) -> np.ndarray:
    padded = np.zeros(BATCH, np.int32)
    padded[: len(pages)] = pages
    return padded
