"""The kernel that rotates, quantises and writes, interpreted, against plain jax and float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.layers import rms_norm
from pallas_kernels.paged_attention import rotate_and_write

PAGES, PAGE, TOKENS, HEADS = 6, 16, 7, 2
# Two padding rows meet on the null page; one more writes there alone.
WHERE = np.array([3, 1, 0, 3, 0, 5, 0], np.int32), np.array([0, 2, 0, 15, 0, 1, 9], np.int32)
# head_dim, group, rotary_dim, pairs, dtype of activations, of pages
CASES = {
    "plain": (16, 2, 16, "halves", "float32", "float32"),
    "3 queries a key": (64, 3, 64, "halves", "bfloat16", "bfloat16"),
    "head of 80, part of it": (80, 1, 32, "halves", "float32", "float32"),
    "head of 96": (96, 4, 96, "halves", "float32", "float16"),
    "neighbours": (256, 5, 16, "neighbours", "float32", "bfloat16"),
    "int8": (128, 2, 128, "halves", "float32", "int8"),
    "int8 of a head of 80": (80, 1, 80, "neighbours", "bfloat16", "int8"),
    "float8": (192, 2, 16, "halves", "float32", "float8_e4m3fn"),
}
BODIES = ("reference", "triton_interpreted")
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def setup(case, seed=0):
    """Arguments of a call: every page holds something of its own before."""
    head_dim, group, rotary_dim, _, dtype, pages = case
    rng = np.random.default_rng(seed)
    shapes = ((TOKENS, HEADS, group, head_dim), *[(TOKENS, HEADS, head_dim)] * 2)
    q, k, v = (jnp.asarray(rng.normal(size=shape) * 3, dtype) for shape in shapes)
    angles = rng.uniform(0, 100, (TOKENS, rotary_dim // 2))
    rotary = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    places = (PAGES, HEADS, PAGE)
    pools = [jnp.asarray(rng.integers(-99, 99, (*places, head_dim)), pages) for _ in "kv"]
    if pages in ("int8", "float8_e4m3fn"):
        pools += [jnp.asarray(rng.random(places), jnp.float32) for _ in "kv"]
    return q, k, v, rotary, tuple(pools), *map(jnp.asarray, WHERE)


def call(case, arguments, body):
    run = functools.partial(rotate_and_write, pairs=case[3], implementation=body)
    return jax.jit(run)(*arguments)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.dtype(f"u{x.dtype.itemsize}"))


def rotated(x, rotary, pairs) -> np.ndarray:
    """x [T, ..., hd] in float64, one pair after the other."""
    cos, sin = (np.asarray(table, np.float64) for table in rotary)
    x = np.asarray(x.astype(jnp.float32), np.float64)
    out, half = x.copy(), cos.shape[1]
    middle = (1,) * (x.ndim - 2)
    for i in range(half):
        a, b = (i, i + half) if pairs == "halves" else (2 * i, 2 * i + 1)
        c, s = (table[:, i].reshape(-1, *middle) for table in (cos, sin))
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def untouched() -> np.ndarray:
    free = np.ones((PAGES, PAGE), bool)
    free[WHERE] = False
    return free


@EACH
@pytest.mark.parametrize("body", BODIES)
def test_queries_and_keys_are_rotated_and_all_is_where_it_belongs(case, body):
    arguments = setup(case)
    q, k, v, rotary, before, *_ = arguments
    found_q, after = call(case, arguments, body)
    loose = {"float32": 1e-5, "bfloat16": 1e-2}[case[4]]
    assert found_q.dtype == q.dtype
    turned, found_q = rotated(q, rotary, case[3]), found_q.astype(jnp.float32)
    np.testing.assert_allclose(found_q, turned, rtol=loose, atol=loose * 3)
    wanted = (rotated(k, rotary, case[3]), np.asarray(v.astype(jnp.float32), np.float64))
    error = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2, "int8": 6e-2, "float8_e4m3fn": 0.6}
    pages, offsets = WHERE
    for i, want in enumerate(wanted):
        stored = np.asarray(after[i].astype(jnp.float32), np.float64)
        if len(after) == 4:
            stored = stored * np.asarray(after[2 + i], np.float64)[..., None]
        for token in (0, 1, 3, 5, 6):
            row = stored[pages[token], :, offsets[token]]
            assert np.abs(row - want[token]).max() <= error[case[5]]
        assert np.isfinite(stored).all(), "whoever writes last to the null page"
    for old, new in zip(before, after, strict=True):
        free = untouched()[:, None, :].repeat(HEADS, 1)
        np.testing.assert_array_equal(bits(new)[free], bits(old)[free])


@EACH
def test_the_kernel_says_what_plain_jax_says(case):
    """But for the last bit of a rotation, which may move what is stored to its neighbour."""
    arguments = setup(case, seed=1)
    reference, kernel = (
        call(case, arguments, body) for body in ("reference", "triton_interpreted")
    )
    pages, offsets = (part[[0, 1, 3, 5, 6]] for part in WHERE)
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(kernel), strict=True):
        if a.shape[0] == PAGES:
            a, b = a[pages, :, offsets], b[pages, :, offsets]
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        loose = {"float32": 1e-5, "int8": 1.01, "float8_e4m3fn": 33}.get(case[5], 0.07)
        np.testing.assert_allclose(a, b, atol=loose)
        assert np.mean(np.abs(a - b) > 1e-5 * np.abs(a)) < 0.02


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pages", ["float32", "float16", "int8", "float8_e4m3fn"])
def test_what_is_not_finite_reaches_the_key_alone(bad, pages):
    """The key's scale in pages of 8 bits, also where it is the key that is not finite."""
    case = (16, 2, 16, "halves", "float32", pages)
    q, k, v, *rest = setup(case)
    v, in_8_bits = v.at[1, 1, 5].set(bad), len(rest[1]) == 4
    k = k.at[5, 0, 3].set(bad) if in_8_bits else k
    arguments = (q, k, v.at[3, 0, 2].set(1e6) if pages == "float16" else v, *rest)
    by_body = [call(case, arguments, body)[1] for body in BODIES]
    poisoned = {(1, 1, 2)} | ({(3, 0, 15)} if pages == "float16" else set())
    poisoned |= {(5, 0, 1)} if in_8_bits else set()
    for after in by_body:
        says = np.isnan(np.asarray(after[2] if in_8_bits else after[0], np.float32))
        says = says if in_8_bits else says.any(-1)
        assert {tuple(map(int, place)) for place in np.argwhere(says)} == poisoned
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in after[1::2])


@pytest.mark.parametrize(
    ("name", "offset"), [("plain", 0.0), ("3 queries a key", 1.0), ("head of 80, part of it", 0.0)]
)
def test_the_kernel_norms_heads_before_it_rotates_them(name, offset):
    case = CASES[name]
    q, k, v, rotary, pools, *where = setup(case)
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=case[0]), q.dtype) for i in (5, 6)]
    how = {"pairs": case[3], "eps": 1e-6, "norm_offset": offset}
    run = functools.partial(rotate_and_write, **how, implementation="triton_interpreted")
    found_q, after = jax.jit(run)(q, k, v, rotary, pools, *where, tuple(weights))

    def normed(x, weight):
        flat = rms_norm(x.reshape(-1, x.shape[-1]), weight, 1e-6, offset)
        return flat.reshape(x.shape)

    loose = {"float32": 2e-5, "bfloat16": 3e-2}[case[4]]
    wanted = rotated(normed(q, weights[0]), rotary, case[3])
    found_q = np.asarray(found_q.astype(jnp.float32))
    np.testing.assert_allclose(found_q, wanted, rtol=loose, atol=loose)
    keys, stored = rotated(normed(k, weights[1]), rotary, case[3]), after[0].astype(jnp.float32)
    for token in (0, 1, 3, 5):
        row = np.asarray(stored)[WHERE[0][token], :, WHERE[1][token]]
        np.testing.assert_allclose(row, keys[token], rtol=loose, atol=loose)


def test_plain_jax_takes_no_norms():
    case = CASES["plain"]
    with pytest.raises(ValueError, match="kernels only"):
        call(case, (*setup(case), (jnp.ones(16), jnp.ones(16))), "reference")


def test_the_pools_are_updated_in_place():
    case = CASES["plain"]
    run = functools.partial(rotate_and_write, pairs="halves", implementation="triton_interpreted")
    lowered = jax.jit(run, donate_argnums=4).lower(*setup(case))
    nbytes = sum(pool.nbytes for pool in setup(case)[4])
    assert lowered.compile().memory_analysis().alias_size_in_bytes >= nbytes
