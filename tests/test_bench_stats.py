"""Arrivals, workloads and summaries against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxinfer.bench.arrivals import arrival_times
from jaxinfer.bench.stats import median_interval, paired_ratio, summarise
from jaxinfer.bench.workload import OUTPUT_QUANTILES, PROMPT_QUANTILES, make_workload


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(4, math.inf) == [0.0] * 4


def test_infinite_burstiness_is_a_fixed_interval():
    assert arrival_times(4, 2.0, math.inf) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_intervals_have_the_rate_and_the_burstiness_asked_for(burstiness):
    intervals = np.diff(arrival_times(20_001, 5.0, burstiness, seed=3))
    assert intervals.min() >= 0
    assert intervals.mean() == pytest.approx(1 / 5, rel=0.05)
    # A gamma's coefficient of variation is 1 / sqrt(shape).
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_follow_the_seed():
    assert arrival_times(9, 3.0, 1.0, seed=1) == arrival_times(9, 3.0, 1.0, seed=1)
    assert arrival_times(9, 3.0, 1.0, seed=1) != arrival_times(9, 3.0, 1.0, seed=2)


@pytest.mark.parametrize("count", [0, 1])
def test_few_arrivals(count):
    assert arrival_times(count, 2.0) == [0.0] * count


@pytest.mark.parametrize("rate, burstiness", [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -2)])
def test_impossible_arrivals_are_refused(rate, burstiness):
    with pytest.raises(ValueError, match="must be above 0"):
        arrival_times(3, rate, burstiness)


def test_summary_by_hand():
    summary = summarise([4.0, 1.0, 3.0, 2.0])
    assert summary["mean"] == 2.5
    assert summary["median"] == 2.5
    assert summary["std"] == pytest.approx(math.sqrt(1.25))
    assert summary["p90"] == pytest.approx(3.7)  # position 0.9 * 3 = 2.7: between 3 and 4
    assert summary["p99"] == pytest.approx(3.97)


def test_summary_of_nothing_is_zero():
    assert set(summarise([]).values()) == {0.0}


def test_the_interval_of_ten_values_leaves_out_one_at_either_end():
    interval = median_interval([10, 1, 2, 9, 3, 8, 4, 7, 5, 6])
    assert (interval.median, interval.low, interval.high) == (5.5, 2, 9)
    # P(Binomial(10, 1/2) <= 1) = 11/1024 at either end.
    assert interval.confidence == pytest.approx(1 - 22 / 1024)


def test_the_interval_of_few_values_is_their_range_and_says_so():
    interval = median_interval([3.0, 1.0, 2.0])
    assert (interval.low, interval.high) == (1.0, 3.0)
    assert interval.confidence == pytest.approx(0.75)


def test_intervals_cover_the_median_as_often_as_promised():
    rng = np.random.default_rng(0)
    intervals = [median_interval(rng.exponential(size=12).tolist()) for _ in range(2000)]
    covered = np.mean([i.low <= math.log(2) <= i.high for i in intervals])
    assert 0.95 <= covered <= 0.98  # 1 - 2 * 79/4096 = 0.961 exactly


def test_ratios_are_taken_pair_by_pair():
    # Round by round ours is twice as fast, though the machine slowed down tenfold meanwhile.
    ratio = paired_ratio([20.0, 2.0, 20.0], [10.0, 1.0, 10.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="not pairs"):
        paired_ratio([1.0], [1.0, 2.0])


def test_synthetic_lengths_are_exact_and_ids_are_in_the_vocabulary():
    items = make_workload("synthetic", 20, 7, 5, vocab_size=11, max_tokens=12, seed=4)
    assert [len(item.prompt) for item in items] == [7] * 20
    assert {item.output_len for item in items} == {5}
    assert {token for item in items for token in item.prompt} == set(range(11))
    assert items == make_workload("synthetic", 20, 7, 5, vocab_size=11, max_tokens=12, seed=4)
    assert items != make_workload("synthetic", 20, 7, 5, vocab_size=11, max_tokens=12, seed=5)


def test_chat_lengths_have_the_quantiles_of_their_table():
    items = make_workload("sharegpt", 4000, 0, 0, vocab_size=50, max_tokens=20_000)
    lengths = {
        PROMPT_QUANTILES: [len(item.prompt) for item in items],
        OUTPUT_QUANTILES: [item.output_len for item in items],
    }
    for quantiles, drawn in lengths.items():
        for share, length in quantiles[1:-1]:
            shorter = np.mean(np.asarray(drawn) <= length)
            assert shorter == pytest.approx(share, abs=0.025)


def test_chat_lengths_fit_the_model():
    items = make_workload("sharegpt", 500, 0, 0, vocab_size=50, max_tokens=100)
    assert max(len(item.prompt) for item in items) == 50
    assert max(len(item.prompt) + item.output_len for item in items) == 100
    assert min(item.output_len for item in items) >= 1


@pytest.mark.parametrize(
    "arguments, named",
    [((0, 5, 5), "--num-prompts"), ((1, 0, 5), "--input-len"), ((1, 5, 0), "--output-len"),
     ((1, 60, 41), "can have 100")],
)  # fmt: skip
def test_impossible_workloads_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        make_workload("synthetic", *arguments, vocab_size=5, max_tokens=100)
