"""Grouped products against a loop over rows, for any division of rows among experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import MoeConfig
from jaxinfer.models.moe import route
from pallas_kernels.grouped_matmul import grouped_matmul

EACH = pytest.mark.parametrize("implementation", ["segments", "segments_static", "ragged"])


def product(x: np.ndarray, weights: np.ndarray, sizes: list[int], implementation: str) -> jax.Array:
    counts = jnp.asarray(sizes, jnp.int32)
    return grouped_matmul(
        jnp.asarray(x), jnp.asarray(weights), counts, implementation=implementation
    )


def by_rows(x: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    out, experts = np.zeros((len(x), weights.shape[1])), np.repeat(np.arange(len(sizes)), sizes)
    for row, expert in enumerate(experts):
        out[row] = weights[expert].astype(np.float64) @ x[row]
    return out


@EACH
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=5, max_size=5), spare=st.integers(0, 3))
def test_every_division_of_rows(implementation, sizes, spare):
    rows = 120
    sizes = np.minimum.accumulate([*sizes]) if sum(sizes) > rows - spare else np.array(sizes)
    while sizes.sum() > rows - spare:
        sizes = sizes // 2
    rng = np.random.default_rng(int(sizes.sum()))
    x = rng.normal(size=(rows, 24)).astype(np.float32)
    weights = rng.normal(size=(5, 17, 24)).astype(np.float32)
    found = product(x, weights, sizes, implementation)
    np.testing.assert_allclose(found, by_rows(x, weights, sizes), atol=1e-4)


@EACH
@pytest.mark.parametrize("sizes", [[1, 0, 0], [0, 0, 3], [3, 0, 0], [1, 1, 1], [0, 2, 0]])
def test_few_rows(implementation, sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    weights = rng.normal(size=(3, 4, 8)).astype(np.float32)
    found = product(x, weights, sizes, implementation)
    np.testing.assert_allclose(found, by_rows(x, weights, np.array(sizes)), atol=1e-5)


def test_segments_do_the_work_of_the_rows_there_are():
    """Of 64 experts with 64 rows in all, a dense product would compute 4,096 rows."""
    x, weights = jnp.ones((64, 256)), jnp.ones((64, 128, 256))
    one = jnp.zeros(64, jnp.int32).at[5].set(64)

    def segments(x, weights, sizes):
        return grouped_matmul(x, weights, sizes, implementation="segments")

    compiled = jax.jit(segments).lower(x, weights, one).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * (64 * 256 + 128 * 256) * 4
    np.testing.assert_allclose(compiled(x, weights, one), 256.0)


def test_ties_go_to_the_lower_expert_and_weights_are_as_asked():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    weights, experts = route(MoeConfig(4, 2, 8), logits)
    assert experts.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])
    weights, _ = route(MoeConfig(4, 2, 8, normalised=False), logits)
    np.testing.assert_allclose(weights.sum(), 2 * np.exp(2) / (1 + 2 * np.exp(2) + np.exp(1)))
