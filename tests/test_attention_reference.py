"""Paged attention in plain jax against dense attention in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import TILE_ROWS, paged_attention, paged_prefill, write_kv

attend = jax.jit(paged_attention, static_argnames=("scale", "implementation", "block"))
prefill = jax.jit(paged_prefill, static_argnames=("scale", "implementation", "block"))

IMPLEMENTATIONS = ("reference", "reference_static")
SCALE = 0.37
POOL_TOKENS, TABLE_TOKENS, CHUNK, TILES = 2048, 384, 240, 12  # one shape serves all tests
JUNK = 1e4  # what pages hold that must not be read: values are finite, keys may be anything


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query [KV, G, hd] over keys and values [T, KV, hd], in float64."""
    scores = np.einsum("kgd,tkd->kgt", q.astype(np.float64), k.astype(np.float64)) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgt,tkd->kgd", weights, v.astype(np.float64))


class Paged:
    """Sequences of random keys and values in a pool where everything else is NaN and junk."""

    def __init__(self, rng, lengths, page_size, kv_heads=2, head_dim=16, shared=0):
        self.rng, self.lengths, self.page_size = rng, lengths, page_size
        self.k = [rng.normal(size=(n, kv_heads, head_dim)).astype(np.float32) for n in lengths]
        self.v = [rng.normal(size=(n, kv_heads, head_dim)).astype(np.float32) for n in lengths]
        counts = [-(-n // page_size) for n in lengths]
        width, num_pages = TABLE_TOKENS // page_size, POOL_TOKENS // page_size
        pages = rng.permutation(np.arange(1, num_pages)).tolist()
        shape = (num_pages, kv_heads, page_size, head_dim)
        self.k_pool = np.full(shape, np.nan, np.float32)
        self.v_pool = np.full(shape, JUNK, np.float32)
        self.k_pool[0] = self.v_pool[0] = JUNK
        # Entries past a row's length name pages of others, as after a slot was used again.
        self.table = rng.integers(0, num_pages, (len(lengths), width)).astype(np.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = [pages.pop() for _ in range(count)]
        for row in range(1, len(lengths)):  # a prefix of whole pages in common with row 0
            common = min(shared, lengths[row] // page_size, lengths[0] // page_size)
            self.table[row, :common] = self.table[0, :common]
            self.k[row][: common * page_size] = self.k[0][: common * page_size]
            self.v[row][: common * page_size] = self.v[0][: common * page_size]
        for row, length in enumerate(lengths):
            for i in range(length):
                page, offset = self.table[row, i // page_size], i % page_size
                self.k_pool[page, :, offset] = self.k[row][i]
                self.v_pool[page, :, offset] = self.v[row][i]

    def queries(self, rows: int, group: int) -> np.ndarray:
        _, kv_heads, _, head_dim = self.k_pool.shape
        return self.rng.normal(size=(rows, kv_heads, group, head_dim)).astype(np.float32)

    def pools(self):
        return jnp.asarray(self.k_pool), jnp.asarray(self.v_pool)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 3])
def test_decode_equals_dense_attention(implementation, page_size, group):
    lengths = [1, page_size - 1, page_size, page_size + 1, 0, 127, 128, 129, 300, 0]
    paged = Paged(np.random.default_rng(page_size), lengths, page_size)
    q = paged.queries(len(lengths), group)
    q[4] = np.nan  # a row that is done: it reads nothing and yields zeros
    out = attend(
        jnp.asarray(q),
        *paged.pools(),
        jnp.asarray(paged.table),
        jnp.asarray(lengths, jnp.int32),
        scale=SCALE,
        implementation=implementation,
    )
    for row, length in enumerate(lengths):
        want = dense(q[row], paged.k[row], paged.v[row]) if length else np.zeros(q[row].shape)
        np.testing.assert_allclose(out[row], want, atol=2e-6, err_msg=f"row {row}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_decode_of_random_tables(implementation, data):
    page_size = data.draw(st.sampled_from([16, 32, 64]))
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=4, max_size=4))
    shared = data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    paged = Paged(rng, lengths, page_size, shared=shared)
    q = paged.queries(4, 2)
    out = attend(
        jnp.asarray(q),
        *paged.pools(),
        jnp.asarray(paged.table),
        jnp.asarray(lengths, jnp.int32),
        scale=SCALE,
        implementation=implementation,
    )
    for row, length in enumerate(lengths):
        want = dense(q[row], paged.k[row], paged.v[row]) if length else np.zeros(q[row].shape)
        np.testing.assert_allclose(out[row], want, atol=2e-6)


def tiles_of(pieces: list[tuple[int, int, int]]) -> np.ndarray:
    """Tiles of pieces (row of the table, start, length), as the step packs them."""
    tiles, first = [], 0
    for slot, start, length in pieces:
        for done in range(0, length, TILE_ROWS):
            tiles.append((first + done, min(TILE_ROWS, length - done), slot, start + done))
        first += length
    return np.array(tiles + [(0, 0, 0, 0)] * (TILES - len(tiles)), np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0, 1)],
        [(0, 0, 64)],
        [(0, 0, 65), (1, 3, 1), (2, 0, 63)],
        [(2, 100, 130), (0, 15, 17), (1, 0, 2), (3, 128, 40)],
        [(1, 250, 50)],
    ],
    ids=str,
)
def test_prefill_equals_dense_causal_attention(implementation, page_size, pieces):
    """Ragged pieces, some with a prefix that earlier chunks computed; chunks with padding rows."""
    lengths = [0, 0, 0, 0]
    for slot, start, length in pieces:
        lengths[slot] = start + length
    paged = Paged(np.random.default_rng(page_size), lengths, page_size)
    used = sum(length for _, _, length in pieces)
    q = paged.queries(CHUNK, group=3)
    q[used:] = np.nan  # padding rows of the chunk
    out = prefill(
        jnp.asarray(q),
        *paged.pools(),
        jnp.asarray(paged.table),
        jnp.asarray(tiles_of(pieces)),
        scale=SCALE,
        implementation=implementation,
    )
    row = 0
    for slot, start, length in pieces:
        for position in range(start, start + length):
            seen = slice(0, position + 1)
            want = dense(q[row], paged.k[slot][seen], paged.v[slot][seen])
            np.testing.assert_allclose(out[row], want, atol=2e-6, err_msg=f"row {row}")
            row += 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tiles_of_a_piece_may_lie_apart(implementation):
    """Two that would be taken at once where they are neighbours."""
    paged = Paged(np.random.default_rng(6), [110], 16)
    q, tiles = paged.queries(CHUNK, group=3), np.zeros((TILES, 4), np.int32)
    tiles[:2] = (3, 60, 0, 0), (100, 50, 0, 60)
    how = {"scale": SCALE, "implementation": implementation}
    arrays = (jnp.asarray(x) for x in (q, *paged.pools(), paged.table, tiles))
    out = prefill(*arrays, **how)
    for position in range(110):
        row, seen = position + (3 if position < 60 else 40), slice(0, position + 1)
        want = dense(q[row], paged.k[0][seen], paged.v[0][seen])
        np.testing.assert_allclose(out[row], want, atol=2e-6, err_msg=f"row {row}")


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float16"])
def test_output_has_the_dtype_of_the_queries(pool_dtype):
    """The pool may be narrower: decode and prefill then lose the same, and only in k and v."""
    lengths = [70]
    paged = Paged(np.random.default_rng(0), lengths, 16)
    pools = [jnp.asarray(pool, pool_dtype) for pool in (paged.k_pool, paged.v_pool)]
    table, q = jnp.asarray(paged.table), jnp.asarray(paged.queries(1, 2))
    how = {"scale": SCALE, "implementation": "reference"}
    decoded = attend(q, *pools, table, jnp.asarray([70], jnp.int32), **how)
    tiles = jnp.asarray([[0, 1, 0, 69]], jnp.int32)
    prefilled = prefill(q, *pools, table, tiles, **how)
    assert decoded.dtype == prefilled.dtype == jnp.float32
    np.testing.assert_allclose(decoded, prefilled, atol=1e-6)
    want = dense(np.asarray(q)[0], paged.k[0], paged.v[0])
    np.testing.assert_allclose(decoded[0], want, atol=1e-6 if pool_dtype == "float32" else 2e-2)


def test_every_tile_reads_no_further_than_its_own_rows():
    """Keys of the piece's later rows, and of stale entries past its end, do not matter."""
    paged = Paged(np.random.default_rng(5), [90], 16)
    q, table = jnp.asarray(paged.queries(70, 1)), jnp.asarray(paged.table)
    tiles = jnp.asarray(tiles_of([(0, 20, 70)]))
    how = {"scale": SCALE, "implementation": "reference"}
    whole = prefill(q, *paged.pools(), table, tiles, **how)
    for position in range(50, 90):
        page, offset = paged.table[0, position // 16], position % 16
        paged.k_pool[page, :, offset] = np.nan
        paged.v_pool[page, :, offset] = JUNK
    cut = prefill(q, *paged.pools(), table, tiles, **how)
    np.testing.assert_allclose(cut[:30], whole[:30], atol=1e-6)
    assert np.isnan(cut[30:]).all()


def written(pools, pages, offsets, k, v):
    """write_kv, jitted and in place."""
    jitted = jax.jit(write_kv, donate_argnums=0)
    return jitted(tuple(pools), *map(jnp.asarray, (pages, offsets, k, v)))


def test_write_puts_each_token_at_its_place_and_changes_nothing_else():
    rng = np.random.default_rng(1)
    before = rng.normal(size=(2, 5, 2, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 6, 2, 8)).astype(np.float32)
    pages = np.array([3, 1, 0, 3, 0, 4], np.int32)
    offsets = np.array([0, 2, 0, 3, 0, 1], np.int32)
    after = written(map(jnp.asarray, before), pages, offsets, k, v)
    for old, new, values in zip(before, after, (k, v)):
        want = old.copy()
        for page, offset, value in zip(pages, offsets, values):
            want[page, :, offset] = value
        np.testing.assert_array_equal(np.asarray(new)[1:], want[1:])
        assert np.isfinite(new).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_values_in_the_pool_are_always_finite(bad, dtype):
    """A masked key is dropped by selection, a masked value only by a weight of 0: 0 * NaN is NaN.

    So a value that is not finite is kept out of the pool, and its key says that it was not.
    """
    pools = [jnp.zeros((3, 2, 4, 8), dtype) for _ in range(2)]
    k, v = np.ones((2, 3, 2, 8), np.float32)
    v[1, 1, 5] = bad
    if dtype == "float16":
        v[2, 0, 0] = 1e6  # finite until it is stored
    k_pool, v_pool = written(
        pools, np.array([1, 1, 2], np.int32), np.arange(3, dtype=np.int32), k, v
    )
    assert np.isfinite(v_pool).all()
    poisoned = {(1, 1, 1)} | ({(2, 0, 2)} if dtype == "float16" else set())
    found = {tuple(map(int, place)) for place in np.argwhere(np.isnan(k_pool).any(-1))}
    assert found == poisoned
    assert k_pool.dtype == v_pool.dtype == dtype


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [16, 48, 64, 256])
def test_a_block_size_that_was_asked_for(implementation, block):
    """It changes what is added up when, and nothing else; also where the table is no multiple."""
    lengths = [90, 1, 200, 0]
    paged = Paged(np.random.default_rng(block), lengths, 16)
    table, q = jnp.asarray(paged.table), jnp.asarray(paged.queries(4, 3))
    tiles = jnp.asarray(tiles_of([(0, 88, 2), (2, 198, 2)]))
    how = {"scale": SCALE, "implementation": implementation, "block": block}
    decoded = attend(q, *paged.pools(), table, jnp.asarray(lengths, jnp.int32), **how)
    prefilled = prefill(q, *paged.pools(), table, tiles, **how)
    for row, length in enumerate(lengths):
        want = dense(np.asarray(q)[row], paged.k[row], paged.v[row]) if length else 0
        np.testing.assert_allclose(decoded[row], want, atol=2e-6)
    for row, (slot, length) in enumerate([(0, 89), (0, 90), (2, 199), (2, 200)]):
        want = dense(np.asarray(q)[row], paged.k[slot][:length], paged.v[slot][:length])
        np.testing.assert_allclose(prefilled[row], want, atol=2e-6)
