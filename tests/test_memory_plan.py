"""Memory is divided before serving, every byte named, and refused with figures when it is short."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer import memory_plan
from jaxinfer.config import EngineConfig, LayerKind, ModelConfig
from jaxinfer.kv_pool import host_pages_for, kv_groups, least_pages, pages_for, pages_that_fit
from jaxinfer.memory_plan import (
    CPU_POOL_BYTES,
    MemoryPlanError,
    plan_memory,
    state_bytes,
    workspace_bytes,
)
from jaxinfer.page_transfer import BATCH, MOST_BATCHES
from jaxinfer.platform import allocator_fraction
from jaxinfer.sizes import seconds_text, size_text
from jaxinfer.startup import has_room
from jaxinfer.step_plan import chunk_pages

GIB = 1 << 30
MODEL = ModelConfig("llama", 32_000, 2048, 5632, 16, 16, 4, 128, max_position=4096)
CONFIG = EngineConfig(max_num_seqs=16, page_size=64)
PAGE_BYTES = 16 * 2 * 4 * 64 * 128 * 4  # layers, k and v, heads, tokens, head_dim, float32


def device(platform: str, size: int):
    """A device of `size` bytes, of which JAX's allocator may take its share."""
    stats = {"bytes_limit": int(size * allocator_fraction())}
    return types.SimpleNamespace(platform=platform, memory_stats=lambda: stats)


@pytest.fixture(autouse=True)
def allocator_takes_nearly_all(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def gpu():
    return device("gpu", 80 * GIB)


def plan(config: EngineConfig = CONFIG, weights: int = 4 * GIB, on=None, max_model_len: int = 4096):
    return plan_memory(MODEL, config, max_model_len, weights, 10 << 20, on or gpu())


def test_page_bytes_count_every_layer_and_head():
    (group,) = kv_groups(MODEL, 10, 64, "float32")
    assert group.page_bytes == PAGE_BYTES
    assert kv_groups(MODEL, 10, 64, "bfloat16")[0].page_bytes == PAGE_BYTES // 2
    assert group.capacity == 9 * 64, "page 0 holds nothing"


def test_an_accelerator_gives_what_is_left_but_no_more_than_slots_can_fill():
    memory, (group,) = plan()
    assert memory.usable_bytes == int(80 * GIB * 0.9)
    assert group.num_pages == 16 * 64 + 1, "16 slots of 4096 tokens, and the null page"
    assert memory.pool_bytes == group.num_pages * PAGE_BYTES
    many = dataclasses.replace(CONFIG, max_num_seqs=1000)
    memory, (group,) = plan(many)
    parts = memory.weights_bytes + memory.slot_bytes + memory.workspace_bytes + memory.pool_bytes
    assert memory.usable_bytes - 17 * PAGE_BYTES < parts <= memory.usable_bytes


def test_the_allocators_own_limit_holds_whatever_is_asked(monkeypatch):
    greedy = dataclasses.replace(CONFIG, memory_utilization=1.0)
    assert plan(greedy)[0].usable_bytes == int(80 * GIB * 0.95)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert plan(greedy)[0].usable_bytes == 40 * GIB


def test_a_host_gives_a_modest_pool_of_its_own_memory(monkeypatch):
    virtual = types.SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: virtual)
    memory, _ = plan(on=device("cpu", 0))
    assert memory.device_bytes == 64 * GIB
    assert CPU_POOL_BYTES - 17 * PAGE_BYTES < memory.pool_bytes <= CPU_POOL_BYTES
    virtual.total, virtual.available = 8 * GIB, 2 * GIB
    memory, _ = plan(on=device("cpu", 0), weights=6 * GIB)
    parts = memory.weights_bytes + memory.slot_bytes + memory.workspace_bytes + memory.pool_bytes
    assert memory.pool_bytes < CPU_POOL_BYTES and parts <= int(8 * GIB * 0.9)
    virtual.total, virtual.available = 64 * GIB, 1 * GIB  # others use nearly all of it
    memory, _ = plan(on=device("cpu", 0), weights=6 * GIB)
    assert memory.usable_bytes == 7 * GIB + memory.slot_bytes
    assert memory.pool_bytes + memory.workspace_bytes <= 1 * GIB
    virtual.total, virtual.available = 64 * GIB, GIB  # the rest is taken by others
    memory, _ = plan(on=device("cpu", 0))
    assert memory.workspace_bytes + memory.pool_bytes <= GIB


def test_a_pool_size_that_was_asked_for_is_honoured_or_refused():
    memory, (group,) = plan(dataclasses.replace(CONFIG, kv_pool_bytes=200 * PAGE_BYTES))
    assert group.num_pages == 192 and memory.pool_bytes == 192 * PAGE_BYTES
    with pytest.raises(MemoryPlanError, match=r"KV pool of 70.00 GiB does not fit.*72.00 GiB usab"):
        plan(dataclasses.replace(CONFIG, kv_pool_bytes=70 * GIB))


def test_a_model_that_leaves_no_room_is_refused_with_figures():
    with pytest.raises(MemoryPlanError, match=r"max_model_len 4096 needs 260 MiB of KV pool"):
        plan(weights=72 * GIB - 200 * 2**20)
    with pytest.raises(MemoryPlanError, match=r"fit into 80.00 GiB: .*weights 90.00 GiB"):
        plan(weights=90 * GIB)
    with pytest.raises(MemoryPlanError, match="max_model_len 4096"):
        plan(dataclasses.replace(CONFIG, kv_pool_bytes=64 * PAGE_BYTES))
    _, (group,) = plan(dataclasses.replace(CONFIG, kv_pool_bytes=80 * PAGE_BYTES))
    assert group.capacity >= 4096, "one full sequence always fits"


def test_small_and_negative_sizes_are_said_in_their_own_units():
    with pytest.raises(MemoryPlanError, match=r"of KV pool, 1 KiB is there"):
        plan(dataclasses.replace(CONFIG, kv_pool_bytes=1 << 10))
    with pytest.raises(MemoryPlanError, match=r"a KV pool of 3\.5 MiB does not fit.* leave -1\d"):
        plan(dataclasses.replace(CONFIG, kv_pool_bytes=7 << 19), weights=90 * GIB)
    said = [size_text(n) for n in (0, 1023, 1 << 10, 1536, 5 << 20, 3 << 30, -(3 << 30))]
    assert said == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "5 MiB", "3.00 GiB", "-3.00 GiB"]
    said = [seconds_text(s) for s in (0.0015, 0.5, 1, 27.414)]
    assert said == ["1.5 ms", "500.0 ms", "1.00 s", "27.41 s"]


@given(
    pool=st.integers(0, 1 << 36), page_size=st.sampled_from([16, 32, 64]), jitter=st.integers(0, 3)
)
def test_page_counts_are_round_and_fit(pool, page_size, jitter):
    (group,) = kv_groups(MODEL, 1, page_size, "float32")
    (pages,) = pages_that_fit((group,), pool, 1 << 20, 4096, 512)
    assert pages * group.page_bytes <= pool
    assert pages <= 64 or pages % 16 == 0
    assert pool - pages * group.page_bytes < 17 * group.page_bytes


WINDOWS = dataclasses.replace(
    MODEL, num_layers=12, kinds=(LayerKind(), *(LayerKind(1024),) * 5) * 2
)


def at_once(groups, pages, length: int) -> float:
    """Sequences of one length that so many pages hold."""
    return min(count / group.pages_of(length) for count, group in zip(pages, groups))


@given(
    pool=st.integers(400 << 20, 64 << 30),
    lengths=st.integers(1, 14).map(lambda n: (1 << n, 1 << 14)),
    windows=st.sampled_from([(1024,), (128,), (4096, 512)]),
    slots=st.sampled_from([4, 256]),
)
@example(pool=8 << 30, lengths=(1 << 14, 1 << 14), windows=(4096, 512), slots=4)
def test_of_any_length_at_least_half_as_many_fit_as_in_a_pool_divided_for_it(
    pool, lengths, windows, slots
):
    length, longest = lengths
    kinds = (LayerKind(), *(LayerKind(window) for window in windows)) * 6
    groups = kv_groups(dataclasses.replace(MODEL, kinds=kinds, num_layers=6), 1, 64, "bfloat16")
    pages = pages_that_fit(groups, pool, slots, longest, 512)
    least = least_pages(groups, longest, 512)
    of_one = sum(count * group.page_bytes for count, group in zip(least, groups))
    assert sum(count * group.page_bytes for count, group in zip(pages, groups)) <= pool
    assert all(have >= need for have, need in zip(pages, least)) == (pool >= of_one)
    if pool >= of_one:
        best = (pool - of_one) / sum(group.pages_of(length) * group.page_bytes for group in groups)
        rounded = min((count - 18) / count for count in pages)
        assert at_once(groups, pages, length) >= min(slots, rounded * best / 2)
    host = host_pages_for(groups, pool, longest)
    assert sum(count * group.page_bytes for count, group in zip(host, groups)) <= pool
    of_one = sum(group.page_bytes for group in groups)
    best = (pool - of_one) / sum(group.pages_of(length) * group.page_bytes for group in groups)
    assert at_once(groups, host, length) >= best / 2, "of those that were preempted, too"
    assert host_pages_for(groups, of_one - 1, longest) == (0,) * len(groups)
    assert host_pages_for(groups, of_one, longest) == (1,) * len(groups)


def test_what_a_group_cannot_use_is_left_to_the_others():
    groups = kv_groups(WINDOWS, 1, 64, "bfloat16")
    whole, window = pages_that_fit(groups, 8 << 30, 4, 1 << 20, 512)
    assert window == 2 * 4 * 18 + 2 * chunk_pages(512, 64) + 1
    left = (8 << 30) - window * groups[1].page_bytes
    assert left // groups[0].page_bytes - whole in range(16)
    assert pages_that_fit(groups, 1 << 40, 4, 2048, 512) == (4 * 32 + 1, 4 * 32 + 1)


def test_windows_are_counted_in_what_is_promised():
    """A pool in which one full sequence fits because most layers keep its window alone."""
    config = dataclasses.replace(CONFIG, kv_pool_bytes=1 << 30)
    memory, groups = plan_memory(WINDOWS, config, 1 << 16, 0, 0, gpu())
    whole, window = groups
    assert whole.capacity >= 1 << 16 > 8 * window.capacity
    lines = memory.lines(groups, 1 << 16)
    assert any("sequences at a window of 1024 tokens" in line for line in lines)
    ones = memory.sequences_in(whole, 1 << 16), memory.sequences_in(window, 1 << 16)
    assert lines[-1] == f"KV pool: {min(ones):.1f} sequences at the full 65536 tokens"
    assert window.num_pages - 1 == pytest.approx(ones[1] * 18 + chunk_pages(512, 64))
    least = sum(n * g.page_bytes for n, g in zip(least_pages(groups, 1 << 16, 512), groups))
    just = dataclasses.replace(CONFIG, kv_pool_bytes=least)
    _, groups = plan_memory(WINDOWS, just, 1 << 16, 0, 0, gpu())
    assert [g.num_pages for g in groups] == [*least_pages(groups, 1 << 16, 512)]
    with pytest.raises(MemoryPlanError, match="max_model_len 65536 needs"):
        plan_memory(
            WINDOWS, dataclasses.replace(just, kv_pool_bytes=least - 1), 1 << 16, 0, 0, gpu()
        )


def test_room_for_weights_that_are_not_loaded_yet_is_what_a_host_has_beside_the_smallest_pool(
    monkeypatch,
):
    virtual = types.SimpleNamespace(total=64 * GIB, available=20 * GIB)
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: virtual)
    (least,) = least_pages(kv_groups(MODEL, 1, 64, "bfloat16"), 4096, 512)
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    beside = least * PAGE_BYTES // 2 + state_bytes(MODEL, config, 4096)
    beside += workspace_bytes(MODEL, config, 2)
    assert has_room(CONFIG, MODEL, "bfloat16", 20 * GIB - beside)
    assert not has_room(CONFIG, MODEL, "bfloat16", 20 * GIB - beside + 1)
    virtual.available = 64 * GIB
    assert not has_room(CONFIG, MODEL, "bfloat16", int(0.9 * 64 * GIB)), "of all memory 0.9"


def test_a_little_more_or_less_free_memory_gives_the_same_pool():
    """The page count is part of every program's shape, and so of what is cached."""
    many = dataclasses.replace(CONFIG, max_num_seqs=1000)
    counts = {
        plan(many, weights=4 * GIB + extra)[1][0].num_pages for extra in (0, 1 << 10, 1 << 20)
    }
    assert len(counts) == 1


@given(tokens=st.integers(1, 10_000), page_size=st.integers(1, 128))
def test_pages_for_tokens(tokens, page_size):
    pages = pages_for(tokens, page_size)
    assert (pages - 1) * page_size < tokens <= pages * page_size


def test_tensor_parallel_devices_share_the_pool():
    two = dataclasses.replace(CONFIG, tensor_parallel_size=2, kv_pool_bytes=200 * PAGE_BYTES)
    memory, (group,) = plan(two, weights=2 * GIB)
    assert group.num_pages == 400 and memory.pool_bytes == 200 * PAGE_BYTES


@pytest.mark.parametrize(
    ("ways", "layers", "cut"), [(1, 16, True), (2, 16, True), (2, 32, False), (1, 8, False)]
)
def test_of_pages_in_8_bits_there_are_as_many_as_kernels_reach(ways, layers, cut):
    """Of 80 GiB a layer's keys would take 4.8, 2.4 or 1.2 GiB of a device: those of 2.4 are cut."""
    model = dataclasses.replace(MODEL, num_layers=layers)
    asked = {"max_num_seqs": 10_000, "kv_dtype": "int8", "kv_pool_bytes": 80 * GIB}
    config = dataclasses.replace(CONFIG, **asked, tensor_parallel_size=ways)
    memory, (group,) = plan_memory(model, config, 4096, GIB, 10 << 20, device("gpu", 180 * GIB))
    text = "\n".join(memory.lines((group,), 4096))
    of_layer = math.prod(group.layer_shape) // ways
    assert cut == (of_layer == 2 * GIB) == ("kernels reach 2.00 GiB" in text)
    assert memory.pool_bytes == group.num_pages * group.page_bytes // ways
    would_fit = memory.pool_bytes + memory.unreached_bytes
    assert 80 * GIB - 17 * group.page_bytes < would_fit <= 80 * GIB


def test_offloading_takes_host_memory_and_room_for_pages_on_their_way(monkeypatch):
    virtual = types.SimpleNamespace(total=256 * GIB, available=100 * GIB)
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: virtual)
    offload = dataclasses.replace(CONFIG, max_num_seqs=1000, kv_offload_bytes=30 * GIB + 5)
    plain, (fewer,) = plan(dataclasses.replace(offload, kv_offload_bytes=0))
    memory, (group,) = plan(offload)
    assert (plain.host_bytes, plain.transfer_bytes) == (0, 0)
    assert memory.host_bytes == host_pages_for((group,), 30 * GIB, 8192)[0] * PAGE_BYTES == 30 * GIB
    assert memory.transfer_bytes == 2 * MOST_BATCHES * BATCH * PAGE_BYTES
    assert memory.workspace_bytes >= 2 * BATCH * PAGE_BYTES, "the temporaries of one program"
    taken = (fewer.num_pages - group.num_pages) * PAGE_BYTES
    assert 0 <= taken - memory.transfer_bytes < 17 * PAGE_BYTES, "of the device: nothing else"
    host, (on_host,) = plan(offload, on=device("cpu", 0))
    more = dataclasses.replace(offload, kv_pool_bytes=int(256 * GIB * 0.9))
    with pytest.raises(MemoryPlanError, match="leave 6"):  # 104 available, less 30 for the host's
        plan(more, on=device("cpu", 0))
    assert host.usable_bytes == 104 * GIB + host.slot_bytes - host.host_bytes
    assert on_host.num_pages * PAGE_BYTES <= CPU_POOL_BYTES


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (PAGE_BYTES // 2, r"kv_offload_bytes is 2 MiB; it must hold one page of 4 MiB"),
        (7 * GIB, r"kv_offload_bytes is 7.00 GiB; .* fit into the 6.00 GiB of host memory that"),
    ],
    ids=["no page", "too much"],
)
def test_offloading_that_cannot_be_is_refused(monkeypatch, asked, message):
    virtual = types.SimpleNamespace(total=8 * GIB, available=6 * GIB)
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: virtual)
    with pytest.raises(MemoryPlanError, match=message):
        plan(dataclasses.replace(CONFIG, kv_offload_bytes=asked))


def test_the_workspace_grows_with_what_needs_it():
    base = workspace_bytes(MODEL, CONFIG, 4)
    assert workspace_bytes(MODEL, dataclasses.replace(CONFIG, max_num_seqs=64), 4) > base
    larger = dataclasses.replace(CONFIG, max_num_batched_tokens=4096)
    assert workspace_bytes(MODEL, larger, 4) > base
    wide = dataclasses.replace(MODEL, vocab_size=128_000)
    assert workspace_bytes(wide, CONFIG, 4) - base >= 2 * 4 * 96_000 * 16


def test_the_report_names_every_part():
    memory, (group,) = plan()
    text = "\n".join(memory.lines((group,), 4096))
    for part in (
        "80.00 GiB on the device",
        "72.00 GiB usable",
        "weights 4.00 GiB",
        "KV pool 4.00 GiB",
    ):
        assert part in text
    assert "1024 pages of 64 tokens = 65536 tokens, 16.0 sequences at the full 4096" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"page_size": -16}, "page_size is -16"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"max_queued_requests": 0}, "max_queued_requests is 0"),
        ({"max_queued_tokens": -1}, "max_queued_tokens is -1"),
        ({"memory_utilization": 0.0}, "memory_utilization is 0.0; it must be above 0, at most 1"),
        ({"memory_utilization": 1.01}, "memory_utilization is 1.01"),
        ({"memory_utilization": float("nan")}, "memory_utilization is nan"),
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of float32, bfloat16, float16"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'"),
    ],
    ids=str,
)
def test_settings_that_nothing_could_be_served_with_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
