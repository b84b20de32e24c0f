"""The threshold in plain jax: a search over the bits of the distance from the largest logit.

Where branches are cheap it searches among the nearest tokens, and only if those are not enough for
some row among all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

TURNS = 16  # of a search, each of which leaves a quarter of 2**31 numbers
INFINITE = 0x7F800000  # the bits of infinity: distances are not negative, so they order as bits
# The nearest tokens are found by columns of so many tokens, of which so many are kept.
COLUMN, NEAREST_COLUMNS = 16, 256
LANES = 16  # sums that are added up side by side


class Filters(NamedTuple):
    """The options of each row: see the package."""

    temperature: Float[Array, " R"]
    min_p: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]


def sampling_threshold(
    logits: Float[Array, "R V"], filters: Filters, dynamic: bool
) -> Float[Array, " R"]:
    """See the package. `dynamic` does no more than the rows need."""
    size, filters = logits.shape[1], _in_effect(filters, logits.shape[1])
    distance = logits.max(-1, keepdims=True) - logits
    whole = _sum(_weights(distance, filters))
    if not dynamic:
        return _threshold(distance, whole, filters, dynamic)[0]
    if size <= COLUMN * NEAREST_COLUMNS:
        found, _ = _threshold(distance, whole, filters, dynamic)
    else:
        found = _among_nearest(distance, whole, filters)
    return found


def _in_effect(filters: Filters, size: int) -> Filters:
    """The same with what changes nothing switched off."""
    temperature, min_p, top_k, top_p = filters
    draws = temperature > 0
    return Filters(
        temperature=jnp.where(draws, temperature, 1.0),
        min_p=jnp.where(draws, min_p, 0.0),
        top_k=jnp.where(draws & (top_k < size), top_k, 0),
        top_p=jnp.where(draws, top_p, 1.0),
    )


def _among_nearest(
    distance: Float[Array, "R V"], whole: Float[Array, " R"], filters: Filters
) -> Float[Array, " R"]:
    """A row's result does not depend on whether another one needs the whole vocabulary."""
    padding = -distance.shape[1] % COLUMN
    padded = jnp.pad(distance, ((0, 0), (0, padding)), constant_values=math.inf)
    columns = padded.reshape(distance.shape[0], COLUMN, -1)
    nearest, ids = lax.top_k(-columns.min(1), NEAREST_COLUMNS)
    near = jnp.take_along_axis(columns, ids[:, None], axis=2).reshape(distance.shape[0], -1)
    found, known = _threshold(near, whole, filters, True)
    # Whatever is nearer than the last column's nearest token is among those that were kept.
    enough = known < -nearest[:, -1]

    def search_all() -> Float[Array, " R"]:
        return jnp.where(enough, found, _threshold(distance, whole, filters, True)[0])

    return lax.cond(enough.all(), lambda: found, search_all)


def _weights(distance: Float[Array, "R N"], filters: Filters) -> Float[Array, "R N"]:
    return jnp.exp(-distance / filters.temperature[:, None])


def _threshold(
    distance: Float[Array, "R N"], whole: Float[Array, " R"], filters: Filters, dynamic: bool
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """The threshold among tokens at these distances, and how far they must be all there are for it
    to be right. `whole` is what all tokens weigh."""
    weights = _weights(distance, filters)
    by_min_p, by_rank, by_mass = filters.min_p > 0, filters.top_k > 0, filters.top_p < 1
    limit = jnp.where(weights >= filters.min_p[:, None], distance, 0.0).max(-1)
    limit = jnp.where(by_min_p, limit, jnp.inf)
    ones = jnp.ones(distance.shape, jnp.int32)
    rank = _search(distance, ones, filters.top_k, _turns(by_rank, dynamic))
    limit = jnp.minimum(limit, jnp.where(by_rank, rank, jnp.inf))
    cut = by_min_p | by_rank
    left = _sum(jnp.where(distance <= limit[:, None], weights, 0.0))
    target = filters.top_p * jnp.where(cut, left, whole)
    mass = _search(distance, weights, target, _turns(by_mass, dynamic))
    mass = jnp.where(by_mass, mass, jnp.inf)
    known = jnp.maximum(jnp.where(cut, limit, -1.0), jnp.where(by_mass, mass, -1.0))
    return jnp.minimum(limit, mass), known


def _turns(used: Bool[Array, " R"], dynamic: bool) -> Int[Array, ""] | int:
    return jnp.where(used.any(), TURNS, 0) if dynamic else TURNS


def _search(
    distance: Float[Array, "R N"],
    amounts: Num[Array, "R N"],
    target: Num[Array, " R"],
    turns: Int[Array, ""] | int,
) -> Float[Array, " R"]:
    """The least distance within which the amounts reach the target; infinity if they never do.

    Every turn tries three numbers that divide what is left in four.
    """

    def turn(i: Int[Array, ""], ends: tuple) -> tuple:
        low, high = ends  # within `low` too little, within `high` enough
        step = (high - low + 3) >> 2
        for candidate in [jnp.minimum(low + n * step, high) for n in (3, 2, 1)]:
            within = distance <= lax.bitcast_convert_type(candidate, jnp.float32)[:, None]
            reached = _sum(jnp.where(within, amounts, 0)) >= target
            high = jnp.where(reached, candidate, high)
            low = jnp.where(reached, low, jnp.maximum(low, candidate))
        return low, high

    start = jnp.full_like(target, -1, jnp.int32), jnp.full_like(target, INFINITE, jnp.int32)
    return lax.bitcast_convert_type(lax.fori_loop(0, turns, turn, start)[1], jnp.float32)


def _sum(x: Num[Array, "R N"]) -> Num[Array, " R"]:
    """In lanes, which CPUs add up at once."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    return padded.reshape(x.shape[0], -1, LANES).sum(1).sum(-1)
