"""Summaries of measurements. A comparison is a paired median with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (90, 99)


def summarise(values: Sequence[float]) -> dict[str, float]:
    """mean, median, std, p90 and p99; all 0 for no values, as load generators report it."""
    if not values:
        return dict.fromkeys(("mean", "median", "std", *(f"p{p}" for p in PERCENTILES)), 0.0)
    x = np.asarray(values, np.float64)
    summary = {"mean": float(x.mean()), "median": float(np.median(x)), "std": float(x.std())}
    return summary | {f"p{p}": float(np.percentile(x, p)) for p in PERCENTILES}


@dataclass(frozen=True, slots=True)
class MedianInterval:
    """A median and an interval that holds the true one with at least `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> MedianInterval:
    """The median with the order statistics around it: no assumption on the distribution.

    The k-th smallest and k-th largest of n values enclose the median with probability
    1 - 2 P(Binomial(n, 1/2) < k); the largest k that keeps `confidence` is taken. With fewer than
    six values 95% is out of reach: the whole range is given with the confidence it has.
    """
    if not values:
        raise ValueError("no values to summarise")
    ordered, n = sorted(values), len(values)
    rank, outside = 1, 2 * 0.5**n
    for k in range(2, n // 2 + 1):
        tail = 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
        if tail > 1 - confidence:
            break
        rank, outside = k, tail
    return MedianInterval(
        float(np.median(ordered)), ordered[rank - 1], ordered[n - rank], 1 - outside
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> MedianInterval:
    """Median of ours/theirs over rounds measured next to each other, with its interval."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} of ours beside {len(theirs)} of theirs: not pairs")
    return median_interval([a / b for a, b in zip(ours, theirs)])
