"""Hopper's own kernels, interpreted with a race detector, against dense attention in float64.

Whole pages are read, so what lies in a page beside a row's tokens is a NaN key and a large value;
pages that must not be read are NaN, values and all.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_triton import KV_HEADS, LENGTHS, SCALE, Paged
from wgmma_races import wgmma_reads_checked

from pallas_kernels.paged_attention import mosaic_decode, paged_attention, paged_prefill

BESIDE = 1000.0  # a value that nobody may see

# Tiles with fewer rows than are computed, the second among those of the first; and a whole one.
SHORT_TILES = ((0, 30, 3, 60), (30, 5, 2, 42), (0, 0, 0, 0))
WHOLE_TILE = ((0, 64, 3, 26), (64, 5, 2, 42), (0, 0, 0, 0))

# head_dim, group, page_size, window, soft_cap, sinks, type of pages
PLAIN = (64, 2, 16, None, None, False, jnp.float16)
LONG = (256, 2, 64, 60, None, False, jnp.float16)  # more blocks than stages, which are used again
CASES = {
    "head of 80, 3 queries a key": (80, 3, 32, None, None, False, jnp.bfloat16),
    "head of 96, sinks": (96, 1, 64, None, None, True, jnp.float16),
    "head of 192, capped": (192, 1, 16, None, 1.5, False, jnp.float16),
    "head of 256, window": LONG,
    "window, cap and sinks": (128, 4, 16, 23, 2.0, True, jnp.bfloat16),
}
# Of heads of 80, 96 and 192, rows of a tile that is not whole do not lie where TMA may begin.
PREFILL = {
    "3 queries a key": (64, 3, 32, None, None, False, jnp.bfloat16),
    "sinks": (64, 1, 64, None, None, True, jnp.float16),
    "capped": (128, 1, 16, None, 1.5, False, jnp.float16),
    "head of 256, window": LONG,
    "window, cap and sinks": CASES["window, cap and sinks"],
}
FOUR_IN_A_TILE = (64, 4, 16, None, None, False, jnp.bfloat16)  # as many heads as fill one
MANY_QUERIES = (64, 70, 32, None, None, False, jnp.float16)


@pytest.fixture(autouse=True)
def _reads_of_products_are_checked():
    with wgmma_reads_checked():
        yield


class WholePages(Paged):
    """Pages of 16-bit numbers, read whole where a row needs a token: `first` is its first."""

    def __init__(self, case, first) -> None:
        head_dim, group, page_size, window, soft_cap, sinks, self.dtype = case
        super().__init__((head_dim, None, group, page_size, window, soft_cap, sinks, None))
        self.k, self.v = (
            np.asarray(jnp.asarray(x, self.dtype), np.float32) for x in (self.k, self.v)
        )
        self.seen = self.v.copy()
        read = [0] + [
            self.table[row, i]
            for row, length in enumerate(LENGTHS)
            for i in range(first(row) // page_size, -(-length // page_size))
        ]
        unread = np.setdiff1d(np.arange(len(self.v)), read)
        self.seen[unread] = np.nan
        self.seen[read] = np.where(np.isnan(self.v[read]), BESIDE, self.v[read])

    def queries(self, rows: int) -> np.ndarray:
        return np.asarray(jnp.asarray(super().queries(rows), self.dtype), np.float32)

    def attend(self, body, q, where) -> np.ndarray:
        arrays = (jnp.asarray(x, self.dtype) for x in (q, self.k, self.seen))
        table, where = jnp.asarray(self.table), jnp.asarray(where, jnp.int32)
        how = {"scale": SCALE, "window": self.window, "soft_cap": self.soft_cap}
        out = body(
            *arrays,
            table,
            where,
            sinks=self.sinks_array(),
            implementation="mosaic_interpreted",
            **how,
        )
        return np.asarray(out, np.float64)

    def same(self, found, wanted) -> None:
        rounding = float(jnp.finfo(self.dtype).eps)
        np.testing.assert_allclose(found, wanted, atol=3 * rounding, rtol=2 * rounding)


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (PLAIN, 1),
        (FOUR_IN_A_TILE, 1),
        (MANY_QUERIES, 2),
        *((case, 1 if case is LONG else 3) for case in CASES.values()),
    ],
    ids=["plain", "heads that share tiles", "70 queries a key", *CASES.keys()],
)
def test_decode_equals_dense_attention(case, splits, monkeypatch):
    monkeypatch.setattr(mosaic_decode, "num_splits", lambda programs, longest: splits)
    window = case[3]
    paged = WholePages(case, lambda row: max(0, LENGTHS[row] - window) if window else 0)
    q = paged.queries(len(LENGTHS))
    q[0] = np.nan  # a row that is done: it reads nothing and yields zeros
    out = paged.attend(paged_attention, q, LENGTHS)
    paged.same(out[0], 0)
    for row, length in enumerate(LENGTHS[1:], 1):
        paged.same(out[row], paged.dense(q[row], row, length - 1))


@pytest.mark.parametrize(
    ("case", "tiles"),
    [(PLAIN, WHOLE_TILE), *((case, SHORT_TILES) for case in PREFILL.values())],
    ids=["plain, a whole tile", *PREFILL.keys()],
)
def test_prefill_equals_dense_attention(case, tiles):
    begins, window = {row: position for _, count, row, position in tiles if count}, case[3]

    def first(row: int) -> int:
        if row not in begins:
            return LENGTHS[row]
        return max(0, begins[row] - window + 1) if window else 0

    paged = WholePages(case, first)
    rows = max(first + count for first, count, _, _ in tiles)
    q = paged.queries(rows + 3)
    q[rows:] = np.nan  # rows of no tile
    out = paged.attend(paged_prefill, q, tiles)
    paged.same(out[rows:], 0)
    for begin, count, row, position in tiles:
        for i in range(count):
            paged.same(out[begin + i], paged.dense(q[begin + i], row, position + i))


def test_shapes_that_are_not_hoppers_are_computed_by_triton(monkeypatch):
    """Heads of 16, whose pages may hold NaN values: the gathers of the Triton kernel pass them."""
    paged = Paged((16, None, 2, 16, None, None, False, None))
    q = paged.queries(len(LENGTHS))
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, paged.k, paged.v))
    where = jnp.asarray(paged.table), jnp.asarray(LENGTHS, jnp.int32)
    out = paged_attention(*arrays, *where, scale=SCALE, implementation="mosaic_interpreted")
    assert out.shape == (len(LENGTHS), KV_HEADS, 2, 16)
    np.testing.assert_allclose(out[3].astype(float), paged.dense(q[3], 3, 89), atol=0.05)
