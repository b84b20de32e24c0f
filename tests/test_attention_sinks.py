"""Attention with sinks, alone and with a window, against dense attention in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_reference import CHUNK, IMPLEMENTATIONS, SCALE, Paged, tiles_of

from pallas_kernels.paged_attention import paged_attention, paged_prefill

STATIC = ("scale", "implementation", "window", "block", "value_dim")
attend = jax.jit(paged_attention, static_argnames=STATIC)
prefill = jax.jit(paged_prefill, static_argnames=STATIC)
GROUP = 3
# Of two heads of keys and three queries each: far below the scores, among them, far above.
SINKS = np.array([[-80.0, -1.0, 0.5], [2.0, 4.0, 90.0]], np.float32)

both_bodies = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
windows = pytest.mark.parametrize("window", [None, 5, 100])


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """One query [KV, G, hd] over all keys [T, KV, hd] of which the last ones are in its window."""
    k, v = k[-(window or len(k)) :], v[-(window or len(v)) :]
    scores = np.einsum("kgd,tkd->kgt", q.astype(np.float64), k.astype(np.float64)) * SCALE
    top = np.maximum(scores.max(-1), SINKS)[..., None]
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True) + np.exp(SINKS[..., None] - top)
    return np.einsum("kgt,tkd->kgd", weights, v.astype(np.float64))


@both_bodies
@windows
@pytest.mark.parametrize("sinks_dtype", ["float32", "bfloat16"])
def test_decode(implementation, window, sinks_dtype):
    lengths = [1, 16, 17, 0, 130, 300]
    paged = Paged(np.random.default_rng(0), lengths, 16)
    q = paged.queries(len(lengths), GROUP)
    out = attend(
        jnp.asarray(q),
        *paged.pools(),
        jnp.asarray(paged.table),
        jnp.asarray(lengths, jnp.int32),
        scale=SCALE,
        implementation=implementation,
        window=window,
        sinks=jnp.asarray(SINKS, sinks_dtype),
    )
    for row, length in enumerate(lengths):
        want = dense(q[row], paged.k[row], paged.v[row], window) if length else 0
        np.testing.assert_allclose(out[row], want, atol=2e-6, err_msg=f"row {row}")
    assert np.abs(out[:, 1, 2]).max() < 1e-6, "a sink far above all scores takes everything"


@both_bodies
@windows
@pytest.mark.parametrize("block", [None, 48])
def test_prefill(implementation, window, block):
    """Pieces of one tile, of two that are taken at once, and of three."""
    pieces = [(0, 15, 17), (1, 0, 100), (2, 128, 40), (3, 200, 1)]
    lengths = [start + length for _, start, length in pieces]
    paged = Paged(np.random.default_rng(1), lengths, 16)
    q = paged.queries(CHUNK, GROUP)
    out = prefill(
        jnp.asarray(q),
        *paged.pools(),
        jnp.asarray(paged.table),
        jnp.asarray(tiles_of(pieces)),
        scale=SCALE,
        implementation=implementation,
        window=window,
        sinks=jnp.asarray(SINKS),
        block=block,
    )
    row = 0
    for slot, start, length in pieces:
        for end in range(start + 1, start + length + 1):
            want = dense(q[row], paged.k[slot][:end], paged.v[slot][:end], window)
            np.testing.assert_allclose(out[row], want, atol=2e-6, err_msg=f"row {row}")
            row += 1


@both_bodies
def test_a_sink_far_below_all_scores_changes_nothing(implementation):
    lengths = [40, 3]
    paged = Paged(np.random.default_rng(2), lengths, 16)
    q, table = jnp.asarray(paged.queries(2, GROUP)), jnp.asarray(paged.table)
    lens = jnp.asarray(lengths, jnp.int32)
    how = {"scale": SCALE, "implementation": implementation}
    without = attend(q, *paged.pools(), table, lens, **how)
    with_sinks = attend(q, *paged.pools(), table, lens, sinks=jnp.full((2, GROUP), -1e9), **how)
    np.testing.assert_allclose(with_sinks, without, atol=1e-6)


@both_bodies
def test_with_values_inside_the_keys(implementation):
    """A pool of latents gives what one with the same values beside the keys does."""
    pieces = [(0, 15, 17), (1, 0, 100)]
    lengths = [start + length for _, start, length in pieces]
    paged = Paged(np.random.default_rng(3), lengths, 16, kv_heads=1)
    q, table = jnp.asarray(paged.queries(CHUNK, GROUP)), jnp.asarray(paged.table)
    keys, tiles = jnp.nan_to_num(jnp.asarray(paged.k_pool)), jnp.asarray(tiles_of(pieces))
    how = {"scale": SCALE, "implementation": implementation, "sinks": jnp.asarray(SINKS[1:])}
    beside = prefill(q, keys, keys, table, tiles, **how)
    inside = prefill(q, keys, None, table, tiles, value_dim=16, **how)
    np.testing.assert_allclose(inside[:117], beside[:117], atol=2e-6)
    lens = jnp.asarray(lengths, jnp.int32)
    beside = attend(q[:2], keys, keys, table, lens, **how)
    inside = attend(q[:2], keys, None, table, lens, value_dim=16, **how)
    np.testing.assert_allclose(inside, beside, atol=2e-6)
