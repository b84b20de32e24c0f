"""Whether numbers are numbers."""

from __future__ import annotations

import numpy as np

_CHUNK = 1 << 20  # elements looked at at once: the temporaries stay in the CPU's cache


def non_finite(array: np.ndarray) -> int:
    """How many values of an array are NaN or Inf; 0 for dtypes that have neither."""
    if array.dtype.kind in "iub":
        return 0
    flat, count = array.reshape(-1), 0
    for start in range(0, flat.size, _CHUNK):
        finite = np.isfinite(flat[start : start + _CHUNK])
        count += finite.size - int(np.count_nonzero(finite))
    return count
