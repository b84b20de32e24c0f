"""The Triton kernels, interpreted, against dense attention in float64: every feature of the
contract, over pools in which everything that must not be read is NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    paged_attention,
    splits,
    triton_blocks,
    triton_decode,
    triton_prefill,
)
from pallas_kernels.paged_attention.triton_blocks import Pool

SCALE, KV_HEADS, PAGES = 0.3, 2, 24
LENGTHS = (0, 1, 47, 90)  # of four rows, whose pages lie anywhere; the last two share a beginning
TILES = ((0, 30, 3, 60), (30, 5, 2, 42), (0, 0, 0, 0))  # the ends of the last two
CHUNK = 38  # rows of no tile follow

# head_dim, value_dim (None: values apart), group, page_size, window, soft_cap, sinks, quantised
PLAIN = (16, None, 2, 16, None, None, False, None)
CASES = {
    "plain": PLAIN,
    "head of 80, 3 queries a key": (80, None, 3, 32, None, None, False, None),
    "window": (64, None, 1, 16, 20, None, False, None),
    "soft cap": (128, None, 4, 64, None, 1.5, False, None),
    "sinks": (192, None, 2, 16, None, None, True, None),
    "window, cap and sinks": (256, None, 2, 16, 9, 2.0, True, None),
    "latent of DeepSeek": (576, 512, 20, 16, None, None, False, None),
    "int8": (96, None, 2, 16, None, None, False, jnp.int8),
    "int8, window, cap and sinks": (64, None, 5, 32, 33, 2.0, True, jnp.int8),
    "fp8 in a window": (128, None, 2, 32, 30, None, False, jnp.float8_e4m3fn),
}
WHOLE = ("plain", "window, cap and sinks", "latent of DeepSeek")  # with keys that are not split too
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Paged:
    """Rows of random keys and values in a pool that is NaN wherever nobody may look."""

    def __init__(self, case) -> None:
        self.head_dim, self.value_dim, self.group, self.page_size = case[:4]
        self.window, self.soft_cap, with_sinks, self.stored = case[4:]
        self.rng = rng = np.random.default_rng(7)
        self.width = -(-max(LENGTHS) // self.page_size) + 1
        pages = rng.permutation(np.arange(1, PAGES)).tolist()
        self.table = np.zeros((len(LENGTHS), self.width), np.int32)
        shape = (PAGES, KV_HEADS, self.page_size)
        self.k, self.v = (np.full((*shape, self.head_dim), np.nan, np.float32) for _ in "kv")
        scales = np.full((2, *shape), np.nan, np.float32)
        for row, length in enumerate(LENGTHS):
            count = -(-length // self.page_size)
            self.table[row, :count] = [pages.pop() for _ in range(count)]
            shared = LENGTHS[row - 1] // self.page_size if row == len(LENGTHS) - 1 else 0
            self.table[row, :shared] = self.table[row - 1, :shared]
            for i in range(shared * self.page_size, length):
                at = self.table[row, i // self.page_size], slice(None), i % self.page_size
                self.k[at], self.v[at] = rng.normal(size=(2, KV_HEADS, self.head_dim))
                scales[0][at], scales[1][at] = rng.uniform(0.1, 0.4, size=(2, KV_HEADS))
        self.table[1, 2] = PAGES - 1  # past its length: a page of somebody else, or of nobody
        self.scales = scales if self.stored else np.ones_like(scales)
        self.sinks = rng.normal(size=(KV_HEADS, self.group)) if with_sinks else None
        if self.stored is not None:  # integers have no NaN: their scales say it
            numbers = (np.round(4 * np.nan_to_num(x)) for x in (self.k, self.v))
            stored = (jnp.asarray(x, self.stored) for x in numbers)
            self.k, self.v = (np.asarray(x, np.float32) for x in stored)

    def pool(self, first: Callable[[int], int] = lambda row: 0) -> Pool:
        """Tokens of a row before its `first` are NaN too, unless another row needs them."""
        needed = np.zeros((PAGES, 1, self.page_size), bool)
        for row, length in enumerate(LENGTHS):
            where = np.arange(first(row), length)
            needed[self.table[row, where // self.page_size], 0, where % self.page_size] = True
        if self.stored is not None:
            pages = (jnp.asarray(x, self.stored) for x in (self.k, self.v))
            return Pool(*pages, *(jnp.where(needed, scale, np.nan) for scale in self.scales))
        k, v = (jnp.where(needed[..., None], x, np.nan) for x in (self.k, self.v))
        return Pool(k) if self.value_dim else Pool(k, v)

    def begins(self, position: int) -> int:
        """The first token that is seen from a position."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def queries(self, rows: int) -> np.ndarray:
        shape = (rows, KV_HEADS, self.group, self.head_dim)
        return self.rng.normal(size=shape).astype(np.float32)

    def dense(self, q: np.ndarray, row: int, position: int) -> np.ndarray:
        """One query [KV, G, hd] at a position of a row, in float64."""
        where = np.arange(self.begins(position), position + 1)
        pages, offsets = self.table[row, where // self.page_size], where % self.page_size
        k, v = (
            (x[pages, :, offsets] * scale[pages, :, offsets][..., None]).astype(np.float64)
            for x, scale in zip((self.k, self.v), self.scales)
        )
        v = k[..., : self.value_dim] if self.value_dim else v
        scores = np.einsum("kgd,tkd->kgt", q, k) * SCALE
        if self.soft_cap:
            scores = np.tanh(scores / self.soft_cap) * self.soft_cap
        sinks = np.full(scores.shape[:2], -np.inf) if self.sinks is None else self.sinks
        top = np.maximum(scores.max(-1), sinks)[..., None]
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks[..., None] - top)
        return np.einsum("kgt,tkd->kgd", weights / total, v)

    def how(self) -> dict:
        return {
            "scale": SCALE,
            "value_dim": self.value_dim or self.head_dim,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "interpret": True,
        }

    def sinks_array(self):
        return None if self.sinks is None else jnp.asarray(self.sinks, jnp.float32)


def same(found, wanted) -> None:
    np.testing.assert_allclose(found, wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize(
    ("case", "splits"),
    [*((CASES[name], 1) for name in WHOLE), *((case, 3) for case in CASES.values())],
    ids=[*(f"{name}, whole" for name in WHOLE), *CASES.keys()],
)
def test_decode_equals_dense_attention(case, splits, monkeypatch):
    monkeypatch.setattr(triton_decode, "num_splits", lambda programs, longest: splits)
    paged = Paged(case)
    q = paged.queries(len(LENGTHS))
    q[0] = np.nan  # a row that is done: it reads nothing and yields zeros
    pool = paged.pool(lambda row: paged.begins(LENGTHS[row] - 1))
    out = triton_decode.paged_attention(
        jnp.asarray(q), pool, jnp.asarray(paged.table), jnp.asarray(LENGTHS, jnp.int32),
        paged.sinks_array(), **paged.how(),
    )  # fmt: skip
    same(out[0], 0)
    for row, length in enumerate(LENGTHS[1:], 1):
        same(out[row], paged.dense(q[row], row, length - 1))


@EACH
def test_prefill_equals_dense_attention(case):
    paged = Paged(case)
    q = paged.queries(CHUNK)
    q[35:] = np.nan  # rows of no tile
    starts = {row: position for _, count, row, position in TILES if count}
    pool = paged.pool(lambda row: paged.begins(starts.get(row, LENGTHS[row])))
    out = triton_prefill.paged_prefill(
        jnp.asarray(q), pool, jnp.asarray(paged.table), jnp.asarray(TILES, jnp.int32),
        paged.sinks_array(), **paged.how(),
    )  # fmt: skip
    same(out[35:], 0)
    for first, count, row, position in TILES:
        for i in range(count):
            same(out[first + i], paged.dense(q[first + i], row, position + i))


@pytest.mark.parametrize("kernel", ["decode", "prefill", "reference"])
def test_small_values_in_8_bits_are_not_lost_beside_float16_queries(kernel):
    """Weights times scales as small as these would have two or three bits in float16."""
    paged = Paged(CASES["int8"])
    paged.v = np.clip(8 * paged.v, -127, 127)
    paged.scales[1] *= 3e-6
    q = jnp.asarray(paged.queries(CHUNK), jnp.float16)
    pool, table = paged.pool(), jnp.asarray(paged.table)
    where, rows = jnp.asarray(LENGTHS, jnp.int32), [(3, 3, 89)]
    if kernel != "prefill":
        q = q[: len(LENGTHS)]
    if kernel == "decode":
        out = triton_decode.paged_attention(q, pool, table, where, None, **paged.how())
    elif kernel == "reference":
        scales = {"k_scale": pool.k_scale, "v_scale": jnp.nan_to_num(pool.v_scale)}
        how = {"scale": SCALE, "implementation": "reference", **scales}
        out = paged_attention(q, pool.k, pool.v, table, where, **how)
    else:
        where, rows = jnp.asarray(TILES, jnp.int32), [(29, 3, 89), (34, 2, 46)]
        out = triton_prefill.paged_prefill(q, pool, table, where, None, **paged.how())
    out = np.asarray(out, np.float64)
    for i, row, position in rows:
        wanted = paged.dense(np.asarray(q[i], np.float32), row, position)
        assert np.abs(out[i] - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_splits_follow_from_shapes_and_fill_a_device():
    assert splits.num_splits(1, 100_000) == splits.MOST_SPLITS
    assert splits.num_splits(64 * 8, 100_000) == 1
    assert splits.num_splits(64 * 2, 100_000) == 3
    assert splits.num_splits(8, 300) == 2, "few keys are not worth more"
    assert splits.num_splits(8, 64) == 1


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192])
def test_quantised_heads_in_parts_have_fewer_keys_in_registers(head_dim):
    """With 64, those of 96 and 112 spill on H200 as compiled."""
    whole, parts = (triton_decode.rule(4, size, quantised=True) for size in (64, head_dim))
    assert (whole.columns, parts.columns) == (64, 32)
    assert triton_decode.rule(4, head_dim).columns == 64


@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, 64), (96, 64), (128, 32), (192, 32), (256, 16)]
)
def test_wide_heads_have_fewer_queries_in_registers(head_dim, rows):
    """With 64, those of 128 and 192 spill on A100 as compiled, over pools of more than 4 GiB."""
    assert triton_decode.rule(71, head_dim).rows == rows
    assert triton_decode.rule(8, head_dim).rows == 16


def test_narrow_quantised_heads_in_a_window_have_fewer_warps():
    """With 8, prefill of gpt-oss over int8 pages spills on A100 and L40 as compiled."""
    assert triton_prefill.rule(8, 64, 128, quantised=True).warps == 4
    assert triton_prefill.rule(8, 64, None, quantised=True).warps == 8
    assert triton_prefill.rule(8, 64, 128, quantised=False).warps == 8
    assert triton_prefill.rule(8, 128, 128, quantised=True).warps == 8


def test_a_row_of_no_length_costs_nothing(monkeypatch):
    """Its parts are not even written: the interpreter begins with NaN."""
    monkeypatch.setattr(triton_decode, "num_splits", lambda programs, longest: 3)
    found: list[splits.Parts] = []

    def combine(parts, *_, **how):
        found.append(parts)
        return parts.values[:, :, 0]

    monkeypatch.setattr(triton_decode, "combine", combine)
    paged = Paged(PLAIN)
    triton_decode.paged_attention(
        jnp.asarray(paged.queries(len(LENGTHS))), paged.pool(), jnp.asarray(paged.table),
        jnp.asarray(LENGTHS, jnp.int32), None, **paged.how(),
    )  # fmt: skip
    for part in found[0]:
        assert np.isnan(part[0]).all() and np.isfinite(part[1:]).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(splits, monkeypatch):
    monkeypatch.setattr(triton_decode, "num_splits", lambda programs, longest: splits)
    paged = Paged(PLAIN)
    q, table = jnp.asarray(paged.queries(len(LENGTHS))), jnp.asarray(paged.table)
    attend = functools.partial(triton_decode.paged_attention, sinks=None, **paged.how())
    whole = attend(q, paged.pool(), table, jnp.asarray(LENGTHS, jnp.int32))
    alone = attend(q, paged.pool(), table, jnp.asarray((0, 0, 0, 90), jnp.int32))
    assert (whole[3] == alone[3]).all()
    page, offset = paged.table[2, 46 // 16], 46 % 16  # of its last token, whose value overflowed
    pool = paged.pool()
    pool = pool._replace(k=pool.k.at[page, :, offset].set(np.nan))
    failed = attend(q, pool, table, jnp.asarray(LENGTHS, jnp.int32))
    assert np.isnan(failed[2]).all() and (failed[3] == whole[3]).all()


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256, 576])
def test_a_head_is_taken_in_powers_of_two(size):
    parts = triton_blocks.parts(size)
    assert [first for first, _ in parts] == np.cumsum([0, *(n for _, n in parts)])[:-1].tolist()
    assert sum(n for _, n in parts) == size and all(n & (n - 1) == 0 for _, n in parts)


def test_jit_takes_them_whole():
    """As the step does: one program, no pool copied by the call itself."""
    paged = Paged(PLAIN)
    program = jax.jit(functools.partial(triton_decode.paged_attention, sinks=None, **paged.how()))
    q, lens = jnp.asarray(paged.queries(len(LENGTHS))), jnp.asarray(LENGTHS, jnp.int32)
    out = program(q, paged.pool(), jnp.asarray(paged.table), lens)
    same(out[3], paged.dense(np.asarray(q)[3], 3, 89))
