"""The sampler against a plain NumPy one, and what must not matter to it: company, row, variant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference_sampler as reference
from sampling import ROWS, SLOTS, VOCAB, Row, random_logits, random_row, run, variants_for

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.request import MAX_STOP_IDS, SamplingParams
from jaxinfer.runner import sampling_level
from jaxinfer.sampler import VARIANTS


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_options_equals_the_reference(seed):
    rng, logits = np.random.default_rng(seed), random_logits(seed)
    rows = [random_row(rng) for _ in range(ROWS)]
    result = run(logits, rows, "full")
    for i, row in enumerate(rows):
        wrong = reference.problem(
            result.tokens[i],
            logits[i],
            row.params,
            row.seed,
            list(row.prompt),
            list(row.outputs),
            2e-6,
        )
        assert not wrong, f"row {i}, {row.params}: {wrong}"


@pytest.mark.parametrize("seed", range(6))
def test_every_variant_that_covers_a_row_says_the_same(seed):
    rng, logits = np.random.default_rng(seed), random_logits(100 + seed)
    rows = [random_row(rng) for _ in range(ROWS)]
    for row in rows[:12]:  # most without what only the full variant can do
        row.params = dataclasses.replace(
            row.params,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
        )
    for row in rows[:6]:
        row.params = dataclasses.replace(row.params, top_k=0, top_p=1.0, min_p=0.0)
    by_variant = {variant: run(logits, rows, variant).tokens for variant in VARIANTS}
    for i, row in enumerate(rows):
        said = {int(by_variant[variant][i]) for variant in variants_for(row.params)}
        assert len(said) == 1, (i, row.params, said)


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_slot_and_company_do_not_matter(variant):
    rng, logits = np.random.default_rng(5), random_logits(5)
    rows = [random_row(rng) for _ in range(ROWS)]
    together = run(logits, rows, variant).tokens
    order = rng.permutation(ROWS)
    moved = [
        dataclasses.replace(rows[i], slot=int(s)) for i, s in zip(order, rng.permutation(SLOTS))
    ]
    np.testing.assert_array_equal(run(logits[order], moved, variant).tokens, together[order])
    for i in (0, 7, 15):
        alone = [dataclasses.replace(rows[i], slot=3)]
        assert run(logits[i : i + 1], alone, variant).tokens[0] == together[i]


def test_greedy_takes_the_first_of_equal_maxima():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, [30, 500, 999]] = 2
    logits[2] = -np.inf
    logits[2, 999] = -5
    logits[3, 0] = logits[3, 999] = 1
    for variant in VARIANTS:
        tokens = run(logits, [Row(SamplingParams(temperature=0)) for _ in range(4)], variant).tokens
        assert tokens.tolist() == [0, 30, 999, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_outcomes_and_what_the_slots_remember(variant):
    logits = np.full((6, VOCAB), -1, np.float32)
    logits[:, 7] = 1
    greedy = SamplingParams(temperature=0)
    many = tuple(range(100, 100 + MAX_STOP_IDS - 1))
    rows = [
        Row(greedy),
        Row(greedy, stop_ids=(7,)),
        Row(greedy, stop_ids=(*many, 7)),
        Row(greedy, stop_ids=(7,), max_new_tokens=1),
        Row(greedy, prompt=(1, 2), outputs=(3,), max_new_tokens=2),
        Row(greedy, prompt=(1, 2), outputs=(3,), max_new_tokens=3, stop_ids=(0, 1)),
    ]
    idle = Row(greedy, stop_ids=(7,), live=False)
    result = run(np.vstack([logits, logits[:1]]), [*rows, idle], variant)
    assert result.outcomes.tolist() == [
        outcomes.RUNNING,
        outcomes.STOPPED,
        outcomes.STOPPED,
        outcomes.STOPPED,
        outcomes.AT_LIMIT,
        outcomes.RUNNING,
        outcomes.IDLE,
    ]
    done = np.asarray(result.slots.done)
    assert done[:6].tolist() == [False, True, True, True, True, False]
    assert done[6:].all()
    token = np.asarray(result.slots.token)
    assert (token[:6] == 7).all() and (token[7:] == 0).all()
    assert token[6] == 3, "the idle row keeps what it was admitted with"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_that_are_not_finite_fail_their_row_alone(variant, bad):
    rng, logits = np.random.default_rng(1), random_logits(11)
    rows = [random_row(rng) for _ in range(ROWS)]
    before = run(logits, rows, variant)
    broken = logits.copy()
    broken[4] = bad
    broken[9, 30] = np.nan
    result = run(broken, rows, variant)
    failed = result.outcomes == outcomes.NOT_FINITE
    assert np.flatnonzero(failed).tolist() == [4, 9]
    assert ((result.tokens >= 0) & (result.tokens < VOCAB)).all()
    np.testing.assert_array_equal(result.tokens[~failed], before.tokens[~failed])
    assert np.asarray(result.slots.done)[[4, 9]].all()


def test_single_tokens_ruled_out_by_the_model_are_no_failure():
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[:, [3, 4]] = 0
    rows = [Row(SamplingParams(temperature=t, top_p=0.9, min_p=0.1), seed=1) for t in (0.0, 1.0)]
    for variant in ("filter", "full"):
        result = run(logits, rows, variant)
        assert (result.outcomes == outcomes.RUNNING).all() and set(result.tokens) <= {3, 4}


def test_logprobs_are_of_the_models_own_logits():
    rng, logits = np.random.default_rng(2), random_logits(12)
    rows = [random_row(rng) for _ in range(ROWS)]
    result = run(logits, rows, "full")
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    lines = np.arange(ROWS)
    np.testing.assert_allclose(result.logprob, exact[lines, result.tokens], atol=1e-5)
    chosen = logits[lines, result.tokens]
    np.testing.assert_array_equal(result.rank, 1 + (logits > chosen[:, None]).sum(1))
    np.testing.assert_allclose(result.top, -np.sort(-exact, 1)[:, :20], atol=1e-5)
    np.testing.assert_allclose(result.top, exact[lines[:, None], result.top_ids], atol=1e-5)
    assert all(len(set(ids)) == 20 for ids in result.top_ids.tolist())
    for ids, values in zip(result.top_ids, result.top):  # equal ones by id
        assert all(a < b for a, b, x, y in zip(ids, ids[1:], values, values[1:]) if x == y)


def test_a_vocabulary_smaller_than_the_most_logprobs():
    logits = random_logits(1, 2, 7)
    result = run(logits, [Row(SamplingParams(temperature=0)) for _ in range(2)], "full")
    assert result.top.shape == (2, 7)
    assert sorted(result.top_ids[0].tolist()) == list(range(7))


def test_the_least_variant_that_honours_a_request():
    level = {
        SamplingParams(temperature=0): 0,
        SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1): 0,
        SamplingParams(temperature=1): 1,
        SamplingParams(top_k=5): 2,
        SamplingParams(top_p=0.9): 2,
        SamplingParams(min_p=0.1): 2,
        SamplingParams(temperature=0, logprobs=0): 3,
        SamplingParams(temperature=0, logit_bias=((1, 1.0),)): 3,
        SamplingParams(temperature=0, repetition_penalty=1.1): 3,
        SamplingParams(temperature=0, presence_penalty=0.1): 3,
        SamplingParams(temperature=0, frequency_penalty=0.1): 3,
    }
    assert {params: sampling_level(params) for params in level} == level
