"""A row's keys divided over several programs (flash-decoding, Dao et al. 2023)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

MOST_SPLITS = 16
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
SPLIT_KEYS = 256  # keys that are worth a program of their own


def num_splits(programs: int, longest: int) -> int:
    """Programs that share a row's keys: enough to fill a device, none for a few keys."""
    wanted = pl.cdiv(WANTED_PROGRAMS, programs)
    return max(1, min(wanted, MOST_SPLITS, pl.cdiv(longest, SPLIT_KEYS)))


def combine(
    top: Float[Array, "S KV G N"],
    total: Float[Array, "S KV G N"],
    values: Float[Array, "S KV G N vd"],
    sinks: Float[Array, "KV G"] | None,
    kv_lens: Int[Array, " S"],
    dtype: jnp.dtype,
) -> Float[Array, "S KV G vd"]:
    """The parts of a row weighted by what each found; XLA fuses it."""
    highest = jnp.max(top, axis=-1)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks.astype(jnp.float32)[None])
    weights = jnp.exp(top - highest[..., None])
    whole = jnp.sum(weights * total, axis=-1)
    if sinks is not None:
        whole += jnp.exp(sinks.astype(jnp.float32)[None] - highest)
    out = jnp.sum(weights[..., None] * values, axis=-2)
    out = out / jnp.where(whole == 0, 1.0, whole)[..., None]  # NaN stays: the row failed
    return jnp.where((kv_lens > 0)[:, None, None, None], out, 0).astype(dtype)
