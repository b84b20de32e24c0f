"""The kernels beside attention, for the compiler to judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.kernel_case import KernelCase, abstract
from pallas_kernels.paged_attention import triton_write
from pallas_kernels.paged_attention.dispatch import PAGES
from pallas_kernels.paged_attention.rotary import Pairs
from pallas_kernels.sampling_threshold import triton_threshold

SAMPLED_ROWS = 264
VOCABULARIES = {"SmolLM2": 49_152, "Llama 3": 128_256, "Qwen3": 151_936}
WRITTEN_TOKENS, WRITTEN_PAGES = 64, 512


@dataclass(frozen=True, slots=True)
class Write:
    """Keys and values as some models write them."""

    models: str
    head_dim: int
    group: int
    kv_heads: int = 8
    page_size: int = 64
    rotary_dim: int | None = None  # None: all of a head
    pairs: Pairs = "halves"
    pages: str = "bfloat16"
    normed: bool = False


WRITES = (
    Write("Llama 3 8B, Qwen3 32B", 128, 4),
    Write("Qwen3 32B, normed", 128, 8, normed=True),
    Write("SmolLM2", 64, 3, kv_heads=3),
    Write("Phi-2", 80, 1, kv_heads=32, rotary_dim=32),
    Write("Phi 3 mini", 96, 1, kv_heads=32),
    Write("Gemma 2 9B", 256, 2),
    Write("GLM4", 128, 16, kv_heads=2, rotary_dim=64, pairs="neighbours"),
    Write("int8 pages", 128, 4, page_size=32, pages="int8"),
    Write("float8 pages", 128, 4, page_size=32, pages="float8_e4m3fn"),
)


def other_cases() -> Iterator[KernelCase]:
    """The sampler's filters over the vocabularies of some models, and each of `WRITES`."""
    for models, size in VOCABULARIES.items():
        yield KernelCase(
            "sampling threshold",
            models,
            f"{SAMPLED_ROWS} × {size:,}, float32",
            functools.partial(_sampling, size),
            entry="sampling_threshold",
            tensor_cores=False,
        )
    for case in WRITES:
        heads = f"{case.kv_heads} × {case.group} of {case.head_dim}"
        yield KernelCase(
            "rotation and write",
            case.models,
            f"{heads}, pages of {case.page_size}, {case.pages}",
            functools.partial(_write, case),
            entry="rotate_and_write",
            oldest=PAGES[case.pages],
            tensor_cores=False,
        )


def _sampling(size: int, mesh: Mesh) -> Any:
    logits = abstract(mesh, jnp.float32, SAMPLED_ROWS, size)
    numbers = abstract(mesh, jnp.float32, SAMPLED_ROWS)
    top_k = abstract(mesh, jnp.int32, SAMPLED_ROWS)
    return triton_threshold.program.lower(logits, numbers, numbers, top_k, numbers)


def _write(case: Write, mesh: Mesh) -> Any:
    ints = abstract(mesh, jnp.int32, WRITTEN_TOKENS)
    members = (WRITTEN_TOKENS, case.kv_heads, case.group + 2, case.head_dim)
    half = (case.rotary_dim or case.head_dim) // 2
    angles = abstract(mesh, jnp.float32, WRITTEN_TOKENS, half)
    places = (WRITTEN_PAGES, case.kv_heads, case.page_size)
    pages = abstract(mesh, jnp.dtype(case.pages), *places, case.head_dim)
    pools: tuple[Any, ...] = (pages, pages)
    if case.pages != "bfloat16":
        pools += (abstract(mesh, jnp.float32, *places),) * 2
    qkv = abstract(mesh, jnp.bfloat16, *members)
    norms = (abstract(mesh, jnp.bfloat16, case.head_dim),) * 2 if case.normed else None
    arrays = (qkv, (angles, angles), pools, ints, ints, norms)
    return triton_write.program.lower(*arrays, how=triton_write.Heads(case.pairs, 1e-6))
