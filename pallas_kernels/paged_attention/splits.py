"""A row's keys divided over several programs (flash-decoding, Dao et al. 2023)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

MOST_SPLITS = 16
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
SPLIT_KEYS = 256  # keys that are worth a program of their own


class Parts(NamedTuple):
    """What each program found of a row: the maximum of scores, the sum of weights by it, and the
    values weighted so. Of R rows a key/value head the first G count."""

    top: Float[Array, "S KV N R"]
    total: Float[Array, "S KV N R"]
    values: Float[Array, "S KV N R vd"]


def num_splits(programs: int, longest: int) -> int:
    """Programs that share a row's keys: enough to fill a device, none for a few keys."""
    wanted = pl.cdiv(WANTED_PROGRAMS, programs)
    return max(1, min(wanted, MOST_SPLITS, pl.cdiv(longest, SPLIT_KEYS)))


def project_values(
    attended: Float[Array, "S KV G vd"], value_weights: Float[Array, "H out vd"]
) -> Float[Array, "S KV G out"]:
    """What each head attended to, times the transposed matrix of that head."""
    by_head = attended.reshape(attended.shape[0], -1, attended.shape[3])
    product = jnp.einsum("shv,hov->sho", by_head, value_weights)
    return product.reshape(*attended.shape[:3], -1)
