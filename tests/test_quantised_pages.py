"""Pages of 8 bits: what is stored of a key or value, and attention over it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import (
    paged_attention,
    paged_prefill,
    rotate_and_write,
    write_kv,
)
from pallas_kernels.paged_attention.quantised import as_numbers, largest, quantise

BODIES = ("reference", "reference_static", "triton_interpreted")
DTYPES = ("int8", "float8_e4m3fn")
SCALE, HEADS, GROUP, DIM, PAGE, PAGES = 0.3, 2, 3, 32, 16, 12
LENGTHS = (0, 1, 33, 60)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


@EACH_DTYPE
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.floats(-30, 30))
def test_the_error_has_a_bound(dtype, seed, size):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(5, HEADS, DIM)) * 10.0**size).astype(np.float32)
    x[0] = 0
    stored, scale = jax.jit(functools.partial(quantise, dtype=jnp.dtype(dtype)))(x)
    found = numbers(stored) * np.asarray(scale, np.float64)[..., None]
    assert np.isfinite(found).all() and (found[0] == 0).all()
    step = np.asarray(scale, np.float64)[..., None]
    bound = step / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, step / 1024)
    assert (np.abs(found - x) <= bound * (1 + 1e-5)).all()
    most = np.abs(numbers(stored[1:])).max(-1)
    np.testing.assert_array_equal(most, largest(jnp.dtype(dtype)))


@EACH_DTYPE
def test_what_can_be_stored_is_stored_exactly(dtype):
    """Numbers times a power of two, of which the largest is there."""
    rng = np.random.default_rng(0)
    most = int(largest(jnp.dtype(dtype)))
    x = rng.integers(-127, 128, (6, HEADS, DIM)).astype(np.float32)
    if dtype != "int8":
        x = np.array(jnp.asarray(x).astype(dtype).astype(jnp.float32))
    x[..., 3] = most
    x *= 2.0 ** rng.integers(-20, 20, (6, HEADS, 1))
    stored, scale = quantise(jnp.asarray(x, jnp.float32), jnp.dtype(dtype))
    np.testing.assert_array_equal(numbers(stored) * np.asarray(scale)[..., None], x)


class Rows:
    """Rows of quantised keys and values in pages; keys nobody may see are NaN by their scale."""

    def __init__(self, dtype: str) -> None:
        rng = np.random.default_rng(5)
        shape = (PAGES, HEADS, PAGE, DIM)
        self.pools = [
            *(jnp.zeros(shape, dtype) for _ in "kv"),
            jnp.full(shape[:3], np.nan, jnp.float32),
            jnp.full(shape[:3], 1e4, jnp.float32),
        ]
        self.table = np.zeros((len(LENGTHS), 5), np.int32)
        free, self.k, self.v = rng.permutation(np.arange(1, PAGES)).tolist(), [], []
        for row, length in enumerate(LENGTHS):
            count = -(-length // PAGE)
            self.table[row, :count] = [free.pop() for _ in range(count)]
            k, v = rng.normal(size=(2, length, HEADS, DIM)).astype(np.float32)
            at = np.arange(length)
            places = (jnp.asarray(self.table[row, at // PAGE]), jnp.asarray(at % PAGE, jnp.int32))
            if length:
                self.pools = write_kv(tuple(self.pools), *places, jnp.asarray(k), jnp.asarray(v))
            self.k.append(k)
            self.v.append(v)
        self.q = rng.normal(size=(len(LENGTHS), HEADS, GROUP, DIM)).astype(np.float32)

    def dense(self, row: int, exact: bool) -> np.ndarray:
        """Attention of a row's query over all of it in float64, of what is stored or what was."""
        k, v = self.k[row], self.v[row]
        if not exact:
            dtype = self.pools[0].dtype
            k, v = (numbers(s) * np.asarray(c, np.float64)[..., None]
                    for s, c in (quantise(jnp.asarray(x), dtype) for x in (k, v)))  # fmt: skip
        scores = np.einsum("kgd,tkd->kgt", self.q[row].astype(np.float64), k) * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("kgt,tkd->kgd", weights, v)


filled = functools.cache(Rows)


@EACH_DTYPE
@pytest.mark.parametrize("body", BODIES)
def test_attention_equals_dense_attention_over_what_is_stored(dtype, body):
    rows = filled(dtype)
    k, v, k_scale, v_scale = rows.pools
    how = {"scale": SCALE, "implementation": body, "k_scale": k_scale, "v_scale": v_scale}
    table, lens = jnp.asarray(rows.table), jnp.asarray(LENGTHS, jnp.int32)
    q = jnp.asarray(rows.q)
    decoded = paged_attention(q, k, v, table, lens, **how)
    tiles = [(row, 1, row, length - 1) for row, length in enumerate(LENGTHS) if length]
    prefilled = paged_prefill(q, k, v, table, jnp.asarray(tiles, jnp.int32), **how)
    assert (decoded[0] == 0).all()
    for row in range(1, len(LENGTHS)):
        stored, was = rows.dense(row, exact=False), rows.dense(row, exact=True)
        np.testing.assert_allclose(decoded[row], stored, atol=2e-6)
        np.testing.assert_allclose(prefilled[row], stored, atol=2e-6)
        assert 1e-5 < np.abs(decoded[row] - was).max() < (0.03 if dtype == "int8" else 0.15)


@EACH_DTYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_and_their_scales_are_always_finite(dtype, bad):
    """The scale of the key says with NaN that its own numbers or its value's were not."""
    pools = (
        *(jnp.ones((3, HEADS, 4, DIM), dtype) for _ in "kv"),
        *(jnp.ones((3, HEADS, 4)) for _ in "kv"),
    )
    k, v = np.ones((2, 3, HEADS, DIM), np.float32)
    v[1, 1, 5], k[2, 0, 7] = bad, -bad
    places = jnp.asarray([1, 1, 2], jnp.int32), jnp.arange(3, dtype=jnp.int32)
    stored = write_kv(pools, *places, jnp.asarray(k), jnp.asarray(v))
    assert all(np.isfinite(numbers(pool)).all() for pool in (*stored[:2], stored[3]))
    found = {tuple(map(int, place)) for place in np.argwhere(np.isnan(stored[2]))}
    assert found == {(1, 1, 1), (2, 0, 2)}


def test_arrays_that_do_not_go_together_are_refused():
    pool = jnp.zeros((3, HEADS, PAGE, DIM), jnp.int8)
    scale = jnp.zeros((3, HEADS, PAGE))
    q, table, lens = jnp.zeros((1, HEADS, 1, DIM)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, int)
    attend = functools.partial(paged_attention, scale=1.0, implementation="reference")
    with pytest.raises(ValueError, match="pages of int8 need k_scale and v_scale"):
        attend(q, pool, pool, table, lens)
    with pytest.raises(ValueError, match="both k_scale and v_scale"):
        attend(q, pool, pool, table, lens, k_scale=scale)
    with pytest.raises(ValueError, match="both k_scale and v_scale"):
        attend(q, pool, None, table, lens, value_dim=8, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match="either v_pool or the value_dim"):
        attend(q, pool, None, table, lens)


@pytest.mark.parametrize("body", [paged_attention, rotate_and_write])
def test_pages_that_kernels_would_not_find_are_refused(body):
    """Offsets of 32 bits are signed; into arrays of more than 4 GiB they have 64."""
    struct, heads = jax.ShapeDtypeStruct, (8, 64, 128)

    def trace(pages: int, dtype: str) -> None:
        pool = struct((pages, *heads), dtype)
        scales = (struct((pages, *heads[:2]), jnp.float32),) * 2 * (dtype == "int8")
        q, ids = struct((1, 8, 1, 128), jnp.float32), struct((1,), jnp.int32)
        how: dict = {"implementation": "triton_interpreted"}
        if body is paged_attention:
            named = dict(zip(("k_scale", "v_scale"), scales))
            run = functools.partial(body, scale=1.0, **how)
            jax.eval_shape(run, q, pool, pool, struct((1, 4), jnp.int32), ids, **named)
        else:
            token, angle = struct((1, 8, 128), jnp.float32), struct((1, 64), jnp.float32)
            run = functools.partial(body, pairs="halves", **how)
            pools = (pool, pool, *scales)
            jax.eval_shape(run, q, token, token, (angle, angle), pools, ids, ids)

    most = 2**31 // math.prod(heads)
    for pages, dtype in ((most, "int8"), (2 * most + 1, "int8"), (most, "bfloat16")):
        trace(pages, dtype)
    for pages in (most + 1, 2 * most):
        with pytest.raises(ValueError, match=f"all of {pages} pages of int8 .* take {most} pages"):
            trace(pages, "int8")


def test_float8_as_its_bits_is_read_and_written_as_float8():
    """Every number there is, exactly; and a token's key and value."""
    bits = jnp.arange(256, dtype=jnp.uint8)
    wanted = numbers(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn))
    finite = np.isfinite(wanted)
    assert finite.sum() == 254
    for dtype in ("float32", "bfloat16", "float16"):
        found = numbers(as_numbers(bits, jnp.dtype(dtype)))
        np.testing.assert_array_equal(found[finite], wanted[finite])
    rng = np.random.default_rng(3)
    places = jnp.asarray([1, 2, 2], jnp.int32), jnp.asarray([0, 3, 1], jnp.int32)
    k, v = jnp.asarray(rng.normal(size=(2, 3, HEADS, DIM)), jnp.float32)
    stored = []
    for dtype in ("float8_e4m3fn", "uint8"):
        pools = (
            *(jnp.zeros((3, HEADS, 4, DIM), dtype) for _ in "kv"),
            *(jnp.zeros((3, HEADS, 4)) for _ in "kv"),
        )
        stored.append(write_kv(pools, *places, k, v))
    for one, other in zip(*stored):
        np.testing.assert_array_equal(
            numbers(one), numbers(as_numbers(other, jnp.dtype(jnp.float32)))
        )
    q, table, lens = jnp.ones((1, HEADS, 1, DIM)), jnp.ones((1, 1), jnp.int32), jnp.ones(1, int)
    k_pool, v_pool, k_scale, v_scale = stored[1]
    attend = functools.partial(paged_attention, scale=1.0, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(ValueError, match="pages of uint8 are read by XLA only, not by triton"):
        attend(q, k_pool, v_pool, table, lens, implementation="triton_interpreted")
