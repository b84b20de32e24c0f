"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after the other, and the
weights of those that follow make up for what each one's rounding changes in the products."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from jaxtyping import Float

from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.making.grids import Grid, best_grid, by_groups, grid_of, stored
from jaxinfer.quantization.rounding import Rounded

_COLUMNS = 128  # that are rounded before what they leave is spread over all others at once


def gptq(
    weight: Float[np.ndarray, "N K"],
    moments: Float[np.ndarray, "K K"],
    layout: Layout,
    damping: float,
    act_order: bool,
) -> Rounded:
    """A matrix [N, K], given the second moments of what it is multiplied with.

    `damping` is added to their diagonal, in units of its mean. `act_order` takes columns with
    large activations first; each keeps the scale of its place, so that products need not know.
    """
    rows, columns = weight.shape
    group = layout.group or columns
    work, moments = weight.astype(np.float32), moments.astype(np.float64)
    silent = np.diag(moments) <= 0  # what no text reaches, nothing is known of
    moments[silent, silent] = 1
    order = np.argsort(-np.diag(moments), kind="stable") if act_order else np.arange(columns)
    blocks = by_groups(moments.astype(np.float32), group)
    # With an order a group's columns come at any time, so their range is that of the original.
    find = best_grid if act_order else (lambda groups, _, layout: grid_of(groups, layout))
    fixed = find(work.reshape(rows, -1, group), blocks, layout)
    factor = _factor(moments[np.ix_(order, order)], damping)
    work, codes = work[:, order], np.empty(weight.shape, np.int16)
    scales, zeros = fixed.scales.copy(), fixed.zeros.copy()
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        errors = np.empty((rows, end - start), np.float32)
        for column in range(start, end):
            own = order[column] // group
            if not act_order and column % group == 0:
                now = _current(work, column, column + group, start, end, errors, factor)
                one = best_grid(now[:, None], blocks[own : own + 1], layout)
                scales[:, own], zeros[:, own] = one.scales[:, 0], one.zeros[:, 0]
            used = Grid(scales[:, own], zeros[:, own], fixed.least, fixed.most)
            code = used.codes(work[:, column, None])
            codes[:, order[column]] = code[:, 0]
            left = work[:, column] - used.meant(code)[:, 0]
            error = left / np.float32(factor[column, column])
            errors[:, column - start] = error
            work[:, column + 1 : end] -= np.outer(error, factor[column, column + 1 : end])
        work[:, end:] -= errors @ factor[start:end, end:]
    whole = Grid(scales, zeros, fixed.least, fixed.most)
    return stored(codes.reshape(rows, -1, group), whole, layout)


def _current(
    work: Float[np.ndarray, "N K"],
    first: int,
    last: int,
    start: int,
    end: int,
    errors: Float[np.ndarray, "N b"],
    factor: Float[np.ndarray, "K K"],
) -> Float[np.ndarray, "N group"]:
    """Columns of a group as they are by now, those past the block of columns included."""
    now = work[:, first:last].copy()
    if last > end and first > start:
        done = first - start
        now[:, end - first :] -= errors[:, :done] @ factor[start:first, end:last]
    return now


def _factor(moments: Float[np.ndarray, "K K"], damping: float) -> Float[np.ndarray, "K K"]:
    """The upper Cholesky factor of the inverse. Raises ValueError where there is none."""
    damped = moments + damping * np.diag(moments).mean() * np.eye(len(moments))
    try:
        lower = scipy.linalg.cho_factor(damped, lower=True)
        inverse = scipy.linalg.cho_solve(lower, np.eye(len(moments)))
        return scipy.linalg.cholesky(inverse, lower=False).astype(np.float32)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"the activations' moments cannot be inverted ({error}); give more calibration text, "
            "or a larger --damping"
        ) from error
