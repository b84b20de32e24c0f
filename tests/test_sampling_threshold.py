"""What the filters keep, by each body, against sorted weights in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import Device
from pallas_kernels.sampling_threshold import choose_body, reference, sampling_threshold

BODIES = ("reference", "reference_static", "triton_interpreted")
EACH = pytest.mark.parametrize("body", BODIES)
SLACK = 4e-6  # of float32 sums and weights
NEAREST = reference.COLUMN * reference.NEAREST_COLUMNS  # entries that one body looks at first
find = {
    body: jax.jit(functools.partial(sampling_threshold, implementation=body)) for body in BODIES
}


def kept(body: str, logits: np.ndarray, options: list[tuple]) -> np.ndarray:
    """Which tokens of each row stay; options are (temperature, min_p, top_k, top_p)."""
    kinds = (np.float32, np.float32, np.int32, np.float32)
    columns = [np.array(column, kind) for column, kind in zip(zip(*options), kinds)]
    threshold = np.asarray(find[body](logits, *columns))
    assert threshold.dtype == np.float32
    with np.errstate(invalid="ignore"):
        return logits.max(1, keepdims=True) - logits <= threshold[:, None]


def sorted_filter(logits: np.ndarray, option: tuple, slack: float = 0.0) -> np.ndarray:
    """The same by sorting, in float64; `slack` moves what rounding may move."""
    temperature, min_p, top_k, top_p = option
    distance = (logits.max() - logits).astype(np.float64)
    stays = np.ones(len(logits), bool)
    if temperature <= 0:
        return stays
    weights = np.exp(-distance / np.float32(temperature))
    stays &= weights >= np.float32(min_p) * (1 - slack)
    if 0 < top_k < len(logits):
        stays &= distance <= np.sort(distance)[top_k - 1]
    if top_p < 1:
        target = np.float32(top_p) * (1 + slack) * weights[stays].sum()
        order = np.argsort(distance, kind="stable")
        reached = np.cumsum(np.where(stays, weights, 0)[order]) >= target
        stays &= distance <= (distance[order[reached.argmax()]] if reached.any() else np.inf)
    return stays | (distance == 0)


def check(body: str, logits: np.ndarray, options: list[tuple]) -> None:
    found = kept(body, logits, options)
    for row, option in enumerate(options):
        least = sorted_filter(logits[row], option, -SLACK)
        most = sorted_filter(logits[row], option, SLACK)
        wrong = (least & ~found[row]) | (found[row] & ~most)
        assert not wrong.any(), (row, option, found[row].sum(), least.sum(), most.sum())


OPTIONS = st.tuples(
    st.sampled_from([0.0, 1e-12, 0.1, 0.7, 1.0, 5.0]),
    st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.3, 1.0]),
    st.sampled_from([0, 1, 2, 10, 50, 299, 300, 2000]),
    st.sampled_from([1.0, 1 - 2**-20, 0.99, 0.9, 0.5, 1e-3, 1e-40]),
)


@EACH
@settings(max_examples=25)
@given(
    options=st.lists(OPTIONS, min_size=8, max_size=8),
    seed=st.integers(0, 1000),
    steps=st.sampled_from([0.01, 0.5, 4, 1e6]),
    ruled_out=st.sampled_from([0, 0.1, 0.995]),
)
def test_any_filters_keep_what_sorting_keeps(body, options, seed, steps, ruled_out):
    """With nothing but ties, many, some, and none; tokens may be ruled out by the model, in some
    rows all but a few."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(scale=3, size=(8, 300)) * steps) / steps
    logits[rng.random(logits.shape) < ruled_out] = -np.inf
    logits[:, 7] = np.maximum(logits[:, 7], -9)  # one is always there
    check(body, logits.astype(np.float32), options)


@EACH
@pytest.mark.parametrize("size", [100, NEAREST + 1, 49_152, 128_256, 151_936])
def test_vocabularies_of_any_size(body, size):
    rng = np.random.default_rng(size)
    peaked, flat = (rng.gumbel(scale=scale, size=(2, size)) for scale in (2.0, 0.1))
    logits = np.concatenate([peaked, flat]).astype(np.float32)
    check(
        body, logits, [(0.8, 0, 50, 0.9), (1, 0.01, 0, 0.95), (1, 0, 0, 0.7), (1.0, 0.8, 9000, 1)]
    )


@EACH
def test_ties_at_a_threshold_all_stay(body):
    logits = np.full((5, 40), -20, np.float32)
    logits[:, [3, 8, 20]], logits[:, [5, 30, 31, 39]] = 1, 0.5
    mass = 3 / (3 + 4 * np.exp(-0.5))
    options = [
        (1, 0, 3, 1),
        (1, 0, 4, 1),
        (1, 0, 0, mass - 0.01),
        (1, 0, 0, mass + 0.01),
        (1, 0.6, 0, 1),
    ]
    assert kept(body, logits, options).sum(1).tolist() == [3, 7, 3, 7, 7]


@EACH
def test_a_top_k_about_as_large_as_the_vocabulary(body):
    logits = np.random.default_rng(5).permuted(np.tile(np.arange(300.0), (8, 1)), axis=1)
    sizes = [1, 2, 298, 299, 300, 301, 2**31 - 1, 0]
    found = kept(body, logits.astype(np.float32), [(1, 0, top_k, 1) for top_k in sizes])
    assert found.sum(1).tolist() == [1, 2, 298, 299, 300, 300, 300, 300]


@EACH
@pytest.mark.parametrize("size", [300, NEAREST + 1])
def test_a_row_does_not_depend_on_its_neighbours(body, size):
    """Whether they need the whole vocabulary, are greedy, or have failed."""
    logits = np.random.default_rng(3).normal(scale=2, size=(6, size)).astype(np.float32)
    usual, idle = (0.9, 0.001, 40, 0.9), (0, 0.5, 5, 0.5)
    alone = kept(body, logits, [usual] + [idle] * 5)
    assert 0 < alone[0].sum() < 41 and alone[1:].all(), "what draws nothing keeps everything"
    logits[4], logits[5, 7] = -np.inf, np.nan
    together = kept(body, logits, [usual, usual, (1, 0, 0, 1 - 1e-6), idle, (1, 0, 3, 0.9), usual])
    np.testing.assert_array_equal(together[0], alone[0])
    np.testing.assert_array_equal(together[1], sorted_filter(logits[1], usual))


@pytest.mark.parametrize(
    ("device", "body", "why"),
    [
        (("cpu", "cpu", None), "reference", ""),
        (("gpu", "NVIDIA H200", (9, 0)), "triton", ""),
        (("gpu", "Tesla T4", (7, 5)), "reference_static", "older"),
        (("gpu", "NVIDIA L40S", (8, 9)), "reference_static", "'NVIDIA L40S'"),
    ],
)
def test_the_body_follows_from_the_device(device, body, why):
    chosen = choose_body(Device(*device))
    assert chosen.implementation == body and why in chosen.why and bool(chosen.why) == bool(why)
