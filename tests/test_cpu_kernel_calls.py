"""What XLA does when it calls a kernel for CPUs, at its worst: threads that never come, come late
or are refused, and buffers at whose edges memory ends."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xla_ffi_frames import Threads, address_of, at_an_edge

from jaxinfer.cpu_kernels.compiler import vectors
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.integer_panels import kernel_of_integers
from pallas_kernels.paged_attention.reference import TILE_ROWS

if vectors() is None:
    pytest.skip("no kernels for this CPU", allow_module_level=True)

from llvmlite import ir

from jaxinfer.cpu_kernels import attention, matmul, xla_call
from jaxinfer.cpu_kernels.emit import F32


@pytest.fixture(scope="module")
def counting() -> int:
    """A kernel whose items each add 1 to their place of the result."""

    def compute(e, buffers, item):
        place = e.at(buffers[-1].data, item)
        e.store(e.fadd(e.load(place, typ=F32), e.read(buffers[0].data, item)), place)

    def register():
        items = lambda e, buffers: buffers[0].shape[0]  # noqa: E731
        xla_call.register("counting", ir.Module("counting"), (1, 1), 1, items, compute)

    with pytest.MonkeyPatch.context() as monkeypatch:
        return address_of(monkeypatch, register)


def counted(address: int, threads: Threads, items: int) -> np.ndarray:
    result = np.zeros(items, np.float32)
    assert threads.call(address, [np.ones(items, np.float32)], [result]) is None
    return result


@pytest.mark.parametrize("items", [0, 1, 2, 50])
@pytest.mark.parametrize("count", [None, 0, 1, 2, 9])
def test_threads_that_are_refused_are_not_waited_for(counting, items, count):
    threads = Threads(count)
    assert np.all(counted(counting, threads, items) == 1)
    assert threads.errors == 0, "errors are destroyed by who gets them"


@pytest.mark.parametrize("items", [2, 50])
def test_threads_that_come_late_find_nothing_to_do(counting, items):
    late = []
    threads = Threads(4, lambda task, data: late.append((task, data)) or True)
    result = counted(counting, threads, items)
    assert len(late) == min(3, items - 1)
    result[:] = -1
    for task, data in late:
        task(data)
    assert np.all(result == -1)


def test_every_item_is_computed_once_whoever_takes_it(counting):
    started = []

    def start(task, data):
        started.append(threading.Thread(target=task, args=(data,)))
        started[-1].start()
        return True

    for takes in (start, lambda task, data: task(data) or True):  # a full pool runs it at once
        for _ in range(20):
            assert np.all(counted(counting, Threads(5, takes), 300) == 1)
    for thread in started:
        thread.join()


def test_jobs_are_freed(counting):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])  # in pages of 4 KiB

    if not sys.platform.startswith("linux"):
        pytest.skip("no /proc")
    threads = Threads(3, lambda task, data: task(data) or True)
    counted(counting, threads, 2)
    before = resident()
    for _ in range(20_000):  # of 72 bytes and more
        counted(counting, threads, 2)
    assert resident() - before < 100


# Values' dimensions that differ from keys', one row of registers and several, a group of one.
HEADS = [
    Heads(1, 32, 16, 16),
    Heads(3, 16, 48, 32, soft_cap=20.0, pages="bfloat16"),
    Heads(7, 64, 32, 16, pages="float16"),
]
AT_ONCE = {"takes": lambda task, data: task(data) or True, "count": 3}
SETTINGS = settings(max_examples=30, deadline=None)


@functools.cache
def handler(register: Callable[..., object], *key: object) -> int:
    """Of a kernel, made anew: XLA takes a name once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return address_of(monkeypatch, register(*key))


def call(address: int, operands: list, result: np.ndarray, end: bool, aliased: bool = False):
    """The result of a kernel between pages of memory that nobody may touch."""
    placed, out = [at_an_edge(array, end) for array in operands], at_an_edge(result, end)
    Threads(**AT_ONCE).call(address, [*placed, *[out] * aliased], [out])
    return out


@SETTINGS
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 64, 65, 127, 128, 129, 200]),
    depth=st.integers(1, 70),
    panels=st.integers(1, 12),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    end=st.booleans(),
)
def test_products_stay_within_their_buffers(rows, depth, panels, dtype, end):
    rng, width = np.random.default_rng(depth), vectors().panel
    x = rng.standard_normal((rows, depth), np.float32)
    matrix = rng.standard_normal((panels, depth, width), np.float32).astype(jnp.dtype(dtype))
    result = np.full((rows, panels * width), np.nan, np.float32)
    found = call(handler(matmul._registered.__wrapped__, dtype), [x, matrix], result, end)
    flat = matrix.astype(np.float64).swapaxes(1, 2).reshape(-1, depth)
    np.testing.assert_allclose(found, x.astype(np.float64) @ flat.T, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not kernel_of_integers(vectors()), reason="no products of integers here")
@SETTINGS
@given(
    rows=st.sampled_from([1, 2, 8, 9, 64, 65, 129]),
    depth=st.integers(1, 40),
    panels=st.integers(1, 12),
    end=st.booleans(),
)
def test_products_of_integers_stay_within_their_buffers(rows, depth, panels, end):
    rng, width = np.random.default_rng(depth), vectors().panel
    x = rng.integers(-(1 << 31), 1 << 31, (rows, depth), np.int32)
    matrix = rng.integers(-(1 << 31), 1 << 31, (panels, depth, width), np.int32)
    result = np.zeros((rows, panels * width), np.int32)
    found = call(handler(matmul._registered.__wrapped__, "int8"), [x, matrix], result, end)
    flat = np.ascontiguousarray(matrix.swapaxes(1, 2)).view(np.uint8).reshape(-1, 4 * depth)
    np.testing.assert_array_equal(found, x.view(np.int8).astype(int) @ flat.T.astype(int))


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Heads, int, list[tuple[int, int]], int | None, int, bool]:
    """Heads, how many share keys, (tokens, position) of sequences, a window, a seed, an edge."""
    heads = draw(st.sampled_from(HEADS))
    lengths = st.one_of(st.sampled_from([0, 1, 15, 16, 17]), st.integers(0, 70))
    pieces = st.lists(st.tuples(st.integers(1, 70), lengths), min_size=1, max_size=4)
    window = st.one_of(st.none(), st.integers(1, 80))
    seed = st.integers(0, 99)
    return heads, draw(st.integers(1, 3)), *map(draw, (pieces, window, seed, st.booleans()))


class Cache:
    """Pages of sequences, of which null pages and all that nobody sees have no number as a key."""

    def __init__(self, heads: Heads, kv_heads: int, seen: list[tuple[int, int]], seed: int):
        self.rng, self.heads, size = np.random.default_rng(seed), heads, heads.page_size
        self.shape, width = (kv_heads, heads.group), 1 + max(end for _, end in seen) // size
        places = np.arange(len(seen) * width * size).reshape(len(seen), -1)
        self.k, self.v = (
            self.rng.standard_normal((len(seen) * width + 1, kv_heads, size, dim), np.float32)
            for dim in (heads.key_dim, heads.value_dim)
        )
        self.k, self.v = (array.astype(jnp.dtype(heads.pages)) for array in (self.k, self.v))
        self.table = self.rng.permutation(np.arange(1, len(self.k))).reshape(len(seen), width)
        self.table, self.k[0] = self.table.astype(np.int32), np.nan
        for row, (first, end) in zip(self.table, seen, strict=True):
            unseen = (places[0] < first) | (places[0] >= end)
            for turn, gone in enumerate(unseen.reshape(width, size)):
                self.k[row[turn], :, gone] = np.nan
                row[turn] = 0 if gone.all() else row[turn]
        self.sinks = self.rng.standard_normal(self.shape).astype(np.float32)

    def queries(self, count: int) -> np.ndarray:
        return self.rng.standard_normal((count, *self.shape, self.heads.key_dim), np.float32)

    def attended(self, query: np.ndarray, row: int, first: int, end: int) -> np.ndarray:
        """Dense attention of a token [KV, G, hd] to its keys, in float64."""
        k, v = (
            pool[self.table[row]].swapaxes(1, 2).reshape(-1, *pool.shape[1::2])[first:end]
            for pool in (self.k.astype(np.float64), self.v.astype(np.float64))
        )
        scores = np.einsum("hgd,thd->hgt", query.astype(np.float64), k)
        cap = self.heads.soft_cap
        scores = np.tanh(scores / cap) * cap if cap else scores
        scores = np.concatenate([self.sinks[..., None], scores], axis=2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hgt,thd->hgd", weights[..., 1:] / weights.sum(-1, keepdims=True), v)


@SETTINGS
@given(sequences())
def test_decode_stays_within_its_buffers_and_reads_what_is_seen(given):
    heads, kv_heads, pieces, window, seed, end = given
    ends = [position for _, position in pieces]
    firsts = [0 if window is None else max(0, last - window) for last in ends]
    cache = Cache(heads, kv_heads, list(zip(firsts, ends, strict=True)), seed)
    q, bounds = cache.queries(len(ends)), (np.array(b, np.int32) for b in (firsts, ends))
    operands = [q, cache.k, cache.v, cache.table, *bounds, cache.sinks]
    result = np.full((*q.shape[:3], heads.value_dim), np.nan, np.float32)
    found = call(handler(attention._registered.__wrapped__, heads, False), operands, result, end)
    for row, (first, last) in enumerate(zip(firsts, ends, strict=True)):
        wanted = cache.attended(q[row], row, first, last)
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)


@SETTINGS
@given(sequences())
def test_prefill_stays_within_its_buffers_and_reads_what_is_seen(given):
    heads, kv_heads, pieces, window, seed, end = given
    sees = window or 1000
    seen = [(max(0, start + 1 - sees), start + tokens) for tokens, start in pieces]
    cache = Cache(heads, kv_heads, seen, seed)
    tiles, rows = [(0, 0, 0, 0)], []
    for row, (tokens, start) in enumerate(pieces):
        for done in range(0, tokens, TILE_ROWS):
            tiles.append((len(rows) + done, min(TILE_ROWS, tokens - done), row, start + done))
        rows += [(row, start + i) for i in range(tokens)]
    q = cache.queries(len(rows) + 1)
    operands = [q, cache.k, cache.v, cache.table, np.array(tiles, np.int32)]
    operands += [np.array([sees], np.int32), cache.sinks]
    result = np.zeros((*q.shape[:3], heads.value_dim), np.float32)
    address = handler(attention._registered.__wrapped__, heads, True)
    found = call(address, operands, result, end, aliased=True)
    for i, (row, position) in enumerate(rows):
        wanted = cache.attended(q[i], row, max(0, position + 1 - sees), position + 1)
        np.testing.assert_allclose(found[i], wanted, rtol=1e-4, atol=1e-4)
    assert not found[-1].any(), "a row of no tile"
