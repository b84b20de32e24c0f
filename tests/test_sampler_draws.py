"""Draws: their distribution, what filters keep, and that seed and position alone decide."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sampler as reference
from sampling import ROWS, VOCAB, Row, random_logits, run
from scipy import stats

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.request import MAX_SEED, SamplingParams
from jaxinfer.runner import sampling_level
from jaxinfer.sampler import VARIANTS, _draw

jit_draw = jax.jit(_draw)


@pytest.mark.parametrize("temperature", [1e-12, 1e-9, 1e-6])
def test_a_tiny_temperature_draws_among_exact_maxima_only(temperature):
    logits = np.round(random_logits(3, 64) * 3)
    logits[::2, 5] = logits[::2].max(1) + 1e-3  # every other row has one best token, barely
    rows = [Row(SamplingParams(temperature=temperature), seed=i) for i in range(64)]
    result = run(logits, rows, "draw")
    assert (logits[np.arange(64), result.tokens] == logits.max(1)).all()
    assert (result.tokens[::2] == 5).all()
    assert (result.outcomes == outcomes.RUNNING).all()


def counts_of_draws(logits: np.ndarray, params: SamplingParams, draws: int = 4096) -> np.ndarray:
    """How often each token is drawn from one distribution, by seed and position."""
    variant = VARIANTS[sampling_level(params)]
    seen = np.zeros(len(logits), int)
    rows = [Row(params, seed=i // 4, prompt=(1,) * (1 + i % 4)) for i in range(draws)]
    tokens = run(np.tile(logits, (draws, 1)), rows, variant).tokens
    np.add.at(seen, tokens, 1)
    return seen


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.15),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits = np.random.default_rng(8).normal(scale=1.5, size=30).astype(np.float32)
    weights = reference.kept_weights(logits.astype(np.float64), params)
    seen = counts_of_draws(logits, params)
    assert (seen[weights == 0] == 0).all()
    wanted = seen.sum() * weights[weights > 0] / weights.sum()
    assert stats.chisquare(seen[weights > 0], wanted).pvalue > 1e-3


def drawn_tokens(logits: np.ndarray, params: SamplingParams) -> set[int]:
    return set(np.flatnonzero(counts_of_draws(logits, params, draws=512)).tolist())


def test_ties_at_a_threshold_all_stay():
    logits = np.full(40, -20, np.float32)
    logits[[3, 8, 20]] = 1.0
    logits[[5, 30, 31, 39]] = 0.5
    best, both = {3, 8, 20}, {3, 8, 20, 5, 30, 31, 39}
    draw = functools.partial(drawn_tokens, logits)
    assert draw(SamplingParams(top_k=1)) == best
    assert draw(SamplingParams(top_k=3)) == best
    assert draw(SamplingParams(top_k=4)) == both
    assert draw(SamplingParams(top_p=0.01)) == best
    mass = 3 / (3 + 4 * np.exp(-0.5))
    assert draw(SamplingParams(top_p=mass - 0.01)) == best
    assert draw(SamplingParams(top_p=mass + 0.01)) == both
    assert draw(SamplingParams(min_p=1.0)) == best
    assert draw(SamplingParams(min_p=0.6)) == both
    assert draw(SamplingParams(top_k=1, top_p=0.01, min_p=1.0)) == best


@pytest.mark.parametrize("params", [{"top_p": p} for p in (1e-30, 1e-40, 1e-60)] + [{"min_p": 1.0}])
def test_the_narrowest_filters_keep_the_most_likely_tokens(params):
    """Also where the number is 0 in float32."""
    logits = random_logits(3)
    rows = [Row(SamplingParams(temperature=1.0, **params), seed=i) for i in range(ROWS)]
    for variant in ("filter", "full"):
        tokens = run(logits, rows, variant).tokens
        assert (logits[np.arange(ROWS), tokens] == logits.max(1)).all()


@pytest.mark.parametrize("off", [{"top_k": 40}, {"top_k": 10**6}, {"top_k": -1}, {"min_p": 0.0}])
def test_options_that_keep_everything_change_nothing(off):
    logits = random_logits(4, ROWS, 40)
    rows = [Row(SamplingParams(temperature=1.3), seed=i) for i in range(ROWS)]
    plain = run(logits, rows, "draw").tokens
    same = [dataclasses.replace(row, params=dataclasses.replace(row.params, **off)) for row in rows]
    np.testing.assert_array_equal(run(logits, same, "filter").tokens, plain)


def test_a_token_that_was_filtered_out_is_never_drawn():
    """At every number next to a step of the running sum, where rounding could slip."""
    rng = np.random.default_rng(0)
    drawn = 0
    for keep in (1, 3, 50, 400):
        weights = np.exp(-rng.exponential(3, VOCAB)).astype(np.float32)
        weights[rng.permutation(VOCAB)[keep:]] = 0
        steps = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
        near = np.round(np.unique(steps) * 2**23).astype(np.int64)[:, None] + np.arange(-3, 4)
        numbers = np.unique(near.clip(0, 2**23 - 1)).astype(np.float32) / 2**23
        numbers = np.resize(numbers, -(-len(numbers) // 256) * 256).reshape(-1, 256)
        for batch in numbers:
            tokens = jit_draw(jnp.asarray(np.tile(weights, (256, 1))), jnp.asarray(batch))
            assert (weights[np.asarray(tokens)] > 0).all()
            drawn += len(batch)
    assert drawn > 2000


def test_draws_depend_on_seed_and_position_alone():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    params = SamplingParams(temperature=1.0)
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, MAX_SEED]
    by_seed = [Row(params, seed=seed) for seed in seeds]
    by_position = [Row(params, seed=1, prompt=(9,) * (4 + i)) for i in range(8)]
    tokens = run(logits, by_seed + by_position, "draw").tokens.tolist()
    assert len(set(tokens)) >= 15, "every seed and every position draws another number"
    for row, token in zip(by_seed + by_position, tokens):
        assert token == int(reference.uniform(row.seed, row.position) * VOCAB)
    # Prompt and output tokens share one count of positions, so a resumed sequence draws the same.
    split = Row(params, seed=1, prompt=(9,) * 4, outputs=(9,) * 3)
    assert run(logits[:1], [split], "draw").tokens[0] == tokens[8 + 3]
