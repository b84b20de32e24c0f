"""The attention kernels as models use them, for the compiler to judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.kernel_case import KernelCase, abstract
from pallas_kernels.paged_attention import (
    mosaic_decode,
    mosaic_prefill,
    triton_decode,
    triton_prefill,
)
from pallas_kernels.paged_attention.dispatch import HOPPER, PAGES, hopper_takes
from pallas_kernels.paged_attention.triton_blocks import Pool

SLOTS, CHUNK, TILES, TABLE_WIDTH = 64, 512, 16, 128


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention as some models have it, on one device.

    Of an array of more than 4 GiB kernels compute offsets in 64 bits, which takes more registers.
    """

    models: str
    head_dim: int
    group: int
    kv_heads: int = 8
    page_size: int = 64
    value_dim: int | None = None  # of keys that begin with their values
    pages: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    num_pages: int = 512


ATTENTION = (
    Attention("Llama 3 8B, Qwen3 32B", 128, 4),
    Attention("Llama 3 70B over 8 GPUs", 128, 8, kv_heads=1),
    Attention("pages of 16, 5 GiB of keys", 128, 4, page_size=16, num_pages=5 << 15),
    Attention("SmolLM2", 64, 3, kv_heads=3),
    Attention("gpt-oss", 64, 8, window=128, sinks=True),
    Attention("Phi-2, Phi 3 medium", 80, 1, kv_heads=32),
    Attention("Phi 3 mini", 96, 1, kv_heads=32),
    Attention("Gemma 3 27B, windows", 128, 2, kv_heads=16, window=1024),
    Attention("keys of 192", 192, 4),
    Attention("Gemma 2 9B", 256, 2, window=4096, soft_cap=50.0),
    Attention("DeepSeek V3, latent", 576, 128, kv_heads=1, value_dim=512),
    Attention("int8 pages", 128, 4, page_size=32, pages="int8"),
    Attention("float8 pages", 128, 4, page_size=32, pages="float8_e4m3fn"),
    # Every feature at once, and offsets of 64 bits: the most registers that they can take.
    Attention(
        "int8 pages, window, cap and sinks, 5 GiB of keys",
        *(96, 4),
        page_size=32,
        pages="int8",
        window=1024,
        soft_cap=50.0,
        sinks=True,
        num_pages=7 << 15,
    ),
)


def attention_cases() -> Iterator[KernelCase]:
    """Decode and prefill for each of `ATTENTION`, by Hopper's own kernels too where they take it,
    and what comes before them for some."""
    for case in ATTENTION:
        heads = f"{case.kv_heads} × {case.group} of {case.head_dim}"
        shape = f"{heads}, pages of {case.page_size}, {case.pages}"
        for kernel, lower in (("decode", _decode), ("prefill", _prefill)):
            yield KernelCase(
                f"attention, {kernel}",
                case.models,
                shape,
                functools.partial(lower, case),
                entry="paged_",
                oldest=PAGES[case.pages],
            )
        value_dim = case.value_dim or case.head_dim
        pages = (case.head_dim, value_dim, case.page_size, case.pages)
        for kernel, lower in (("decode", _hopper_decode), ("prefill", _hopper_prefill)):
            if not hopper_takes(*pages, prefill=kernel == "prefill"):
                continue
            yield KernelCase(
                f"attention, {kernel}, Mosaic",
                case.models,
                shape,
                functools.partial(lower, case),
                entry="paged_",
                oldest=HOPPER,
                newest=HOPPER,  # compiling it for another architecture aborts the process
                instructions=("wgmma.mma_async", "cp.async.bulk.tensor"),
            )


def _decode(case: Attention, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    q, where = _decode_arrays(case, mesh)
    return triton_decode.program.lower(q, pool, *where, _sinks(case, mesh), **how)


def _hopper_decode(case: Attention, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    del how["value_dim"]
    q, where = _decode_arrays(case, mesh)
    return mosaic_decode.program.lower(q, pool.k, pool.v, *where, _sinks(case, mesh), **how)


def _decode_arrays(case: Attention, mesh: Mesh) -> tuple[Any, tuple[Any, Any]]:
    """Queries, and the page table and lengths."""
    shape = (SLOTS, case.kv_heads, case.group, case.head_dim)
    table, lens = abstract(mesh, jnp.int32, SLOTS, TABLE_WIDTH), abstract(mesh, jnp.int32, SLOTS)
    return abstract(mesh, jnp.bfloat16, *shape), (table, lens)


def _prefill(case: Attention, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    q, where = _prefill_arrays(case, mesh)
    return triton_prefill.program.lower(q, pool, *where, _sinks(case, mesh), **how)


def _hopper_prefill(case: Attention, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    del how["value_dim"]
    q, where = _prefill_arrays(case, mesh)
    return mosaic_prefill.program.lower(q, pool.k, pool.v, *where, _sinks(case, mesh), **how)


def _prefill_arrays(case: Attention, mesh: Mesh) -> tuple[Any, tuple[Any, Any]]:
    """Queries, and the page table and tiles."""
    shape = (CHUNK, case.kv_heads, case.group, case.head_dim)
    table, tiles = (
        abstract(mesh, jnp.int32, SLOTS, TABLE_WIDTH),
        abstract(mesh, jnp.int32, TILES, 4),
    )
    return abstract(mesh, jnp.bfloat16, *shape), (table, tiles)


def _pool(case: Attention, mesh: Mesh) -> tuple[Pool, dict[str, Any]]:
    places = (case.num_pages, case.kv_heads, case.page_size)
    pages = abstract(mesh, jnp.dtype(case.pages), *places, case.head_dim)
    pool = Pool(pages, pages if case.value_dim is None else None)
    if case.pages != "bfloat16":
        scales = abstract(mesh, jnp.float32, *places)
        pool = pool._replace(k_scale=scales, v_scale=scales)
    how = {
        "scale": case.head_dim**-0.5,
        "value_dim": case.value_dim or case.head_dim,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }
    return pool, how


def _sinks(case: Attention, mesh: Mesh) -> Any:
    if not case.sinks:
        return None
    return abstract(mesh, jnp.float32, case.kv_heads, case.group)
