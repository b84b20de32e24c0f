"""The threshold for GPUs by Triton: one program a row, which reads the row once for the maximum and
once a turn of a search, from the L2 cache where it fits. No two programs add up the same number, so
results do not depend on their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sampling_threshold.reference import INFINITE

BLOCK, WARPS = 4096, 16  # entries of a row that are read at once, and by how many warps
ABOVE = (1, 2, 3)  # quarters of what is left of a search: its candidates

Sum = Float[Array, ""]


class Row(NamedTuple):
    """A row as a program reads it.

    Attributes:
        logits: reference to all rows; `index` is this one, of `size` entries.
        top: its largest entry; per_distance: what the exponent of a weight loses a unit of logit.
    """

    logits: Any
    index: Any
    size: int
    block: int
    top: Any = 0.0
    per_distance: Any = 0.0

    def over_blocks(self, start: Any, blocks_do: Callable[..., Any], used: Any = True) -> Any:
        """Fold `blocks_do(state, distances)` over the row's blocks, if it is of use."""

        def turn(i: Any, state: Any) -> Any:
            ids = i * self.block + jnp.arange(self.block)
            where = self.logits.at[self.index, ids]
            logits = plgpu.load(where, mask=ids < self.size, other=-jnp.inf)
            return blocks_do(state, self.top - logits)

        blocks = pl.cdiv(self.size, self.block)
        return lax.fori_loop(jnp.int32(0), jnp.where(used, jnp.int32(blocks), 0), turn, start)

    def weights(self, distance: Array) -> Array:
        return jnp.exp(-distance * self.per_distance)


def sampling_threshold(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    interpret: bool = False,
) -> Float[Array, " R"]:
    """See the package."""
    rows, size = logits.shape
    block = min(BLOCK, 1 << (size - 1).bit_length())
    return pl.pallas_call(
        functools.partial(_kernel, size, block),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="sampling_threshold",
    )(logits, temperature, min_p, top_k, top_p)


def _kernel(size: int, block: int, logits: Any, *refs: Any) -> None:
    *options, out = refs
    index = pl.program_id(0)
    temperature, min_p, top_k, top_p = (plgpu.load(ref.at[index]) for ref in options)
    draws = temperature > 0
    by_min_p, by_mass = draws & (min_p > 0), draws & (top_p < 1)
    by_rank = draws & (top_k > 0) & (top_k < size)
    row = Row(logits, index, size, block)
    lowest = jnp.full((block,), -jnp.inf, jnp.float32)
    used = by_min_p | by_mass | by_rank
    top = jnp.max(row.over_blocks(lowest, lambda high, d: jnp.maximum(high, -d), used))
    row = row._replace(top=top, per_distance=1.0 / jnp.where(draws, temperature, 1.0))
    zeros = jnp.zeros((block,), jnp.float32)

    def farthest(found: Array, distance: Array) -> Array:
        return jnp.maximum(found, jnp.where(row.weights(distance) >= min_p, distance, 0.0))

    limit = jnp.max(row.over_blocks(zeros, farthest, by_min_p))
    limit = jnp.where(by_min_p, limit, jnp.inf)
    rank = _search(row, False, top_k.astype(jnp.float32), by_rank)
    limit = jnp.minimum(limit, rank)

    def left(total: Array, distance: Array) -> Array:
        return total + jnp.where(distance <= limit, row.weights(distance), 0.0)

    target = top_p * jnp.sum(row.over_blocks(zeros, left, by_mass))
    mass = _search(row, True, target, by_mass)
    plgpu.store(out.at[index], jnp.minimum(limit, mass))


def _search(row: Row, by_mass: bool, target: Any, used: Any) -> Any:
    """The least distance within which there are `target` entries, or they weigh as much; infinity
    if it is not `used`.

    Every turn tries three numbers that divide what is left in four. It ends when they agree on all
    entries but one: then any distance up to that one's will do.
    """
    zero = jnp.zeros((row.block,), jnp.float32)

    def undecided(state: Any) -> Any:
        low, high, below, within = state
        return (high - low > 1) & (within - below > 1)

    def turn(state: Any) -> Any:
        low, high, below, within = state
        step = (high - low + 3) >> 2
        candidates = [jnp.minimum(low + n * step, high) for n in ABOVE]
        limits = [lax.bitcast_convert_type(c, jnp.float32) for c in candidates]

        def add(sums: Any, distance: Any) -> Any:
            inside = [distance <= limit for limit in limits]
            counts = [old + jnp.where(now, 1.0, 0.0) for old, now in zip(sums[0], inside)]
            if not by_mass:
                return (tuple(counts), ())
            weights = row.weights(distance)
            masses = [old + jnp.where(now, weights, 0.0) for old, now in zip(sums[1], inside)]
            return (tuple(counts), tuple(masses))

        start = ((zero,) * 3, (zero,) * 3 if by_mass else ())
        counts, masses = (tuple(map(jnp.sum, s)) for s in row.over_blocks(start, add))
        amounts = masses if by_mass else counts
        for candidate, amount, count in zip(candidates[::-1], amounts[::-1], counts[::-1]):
            reached = amount >= target
            high, within = jnp.where(reached, candidate, high), jnp.where(reached, count, within)
        for candidate, amount, count in zip(candidates, amounts, counts):
            missed = ~(amount >= target) & (candidate < high)
            low, below = jnp.where(missed, candidate, low), jnp.where(missed, count, below)
        return low, high, below, within

    low, high = jnp.int32(-1), jnp.where(used, jnp.int32(INFINITE), -1)
    start = (low, high, jnp.float32(0), jnp.float32(row.size))
    high = lax.while_loop(undecided, turn, start)[1]
    return jnp.where(used, lax.bitcast_convert_type(high, jnp.float32), jnp.inf)


# By itself, to be compiled and timed; in a step it is part of that program.
program = jax.jit(sampling_threshold, static_argnames=("interpret",))
