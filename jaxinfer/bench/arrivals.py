"""When requests arrive: seconds from the start, from a rate and a burstiness."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` arrival times in seconds, ascending, the first at 0.

    Intervals are gamma-distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is more regular, infinity is a fixed interval. An infinite rate
    sends everything at once. Raises ValueError naming the bad argument.
    """
    if not rate > 0:
        raise ValueError(f"--request-rate is {rate}; it must be above 0 (inf: all at once)")
    if not burstiness > 0:
        raise ValueError(f"--burstiness is {burstiness}; it must be above 0 (1: Poisson)")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [i / rate for i in range(count)]
    rng = np.random.default_rng(seed)
    intervals = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=max(count - 1, 0))
    return [0.0, *np.cumsum(intervals).tolist()][:count]
