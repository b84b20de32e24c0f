"""The kernels around latent attention, and the one that adds parts, for the compiler to judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.kernel_case import KernelCase, abstract
from pallas_kernels.latent_attention import triton_queries, triton_write
from pallas_kernels.paged_attention import triton_combine
from pallas_kernels.paged_attention.splits import Parts

PAGES, PAGE_SIZE = 512, 64


@dataclass(frozen=True, slots=True)
class Latents:
    """Latent attention as some models have it, on one device, in a step of `tokens`."""

    models: str
    heads: int
    tokens: int
    parts: int  # of the products before
    splits: int  # of attention's keys
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128


LATENTS = (
    Latents("DeepSeek V3 over 8 GPUs, 64 rows", 16, 64, 8, 5),
    Latents("DeepSeek V3 over 8 GPUs, 256 rows", 16, 256, 2, 2),
    Latents("DeepSeek V2 Lite, 16 rows", 16, 16, 8, 16, q_rank=0),
)
# Rows, key/value heads, query heads of each, dimensions and parts.
COMBINED = {
    "Llama 3 8B, 8 rows": (8, 8, 4, 128, 5),
    "Phi-2, 4 rows": (4, 32, 1, 80, 3),
    "Llama 3 70B over 8 GPUs, 64 rows": (64, 1, 8, 128, 5),
}


def latent_cases() -> Iterator[KernelCase]:
    """Each of `LATENTS` and of `COMBINED`."""
    for case in LATENTS:
        heads = f"{case.heads} of {case.nope_dim} and {case.rope_dim}, latents of {case.kv_rank}"
        for kernel, lower, entry in (
            ("latents, norm and write", _write, "norm_and_write"),
            ("latents, queries", _queries, "absorbed_queries"),
            ("latents, values of parts", _values, "combine_parts"),
        ):
            products = lower is not _write
            yield KernelCase(
                kernel,
                case.models,
                heads,
                functools.partial(lower, case),
                entry=entry,
                tensor_cores=products,
            )
    for models, sizes in COMBINED.items():
        _, kv_heads, group, size, splits = sizes
        yield KernelCase(
            "attention, sum of parts",
            models,
            f"{kv_heads} × {group} of {size}, {splits} parts",
            functools.partial(_combined, *sizes),
            entry="combine_parts",
            tensor_cores=False,
        )


def _angles(case: Latents, mesh: Mesh) -> Any:
    return (abstract(mesh, jnp.float32, case.tokens, case.rope_dim // 2),) * 2


def _write(case: Latents, mesh: Mesh) -> Any:
    ints = abstract(mesh, jnp.int32, case.tokens)
    key = case.kv_rank + case.rope_dim
    projected = abstract(mesh, jnp.float32, case.parts, case.tokens, case.q_rank + key)
    sizes = (case.q_rank, case.kv_rank)
    norms = tuple(abstract(mesh, jnp.bfloat16, size) if size else None for size in sizes)
    pool = abstract(mesh, jnp.bfloat16, PAGES, 1, PAGE_SIZE, key)
    arrays = ((projected,), norms, _angles(case, mesh), pool, ints, ints)
    how: dict[str, Any] = {"pairs": "neighbours", "eps": 1e-6, "dtype": jnp.bfloat16}
    return triton_write.program.lower(*arrays, **how)


def _queries(case: Latents, mesh: Mesh) -> Any:
    width = case.nope_dim + case.rope_dim
    q = abstract(mesh, jnp.float32, case.parts, case.tokens, case.heads, width)
    weights = abstract(mesh, jnp.bfloat16, case.heads, case.kv_rank, case.nope_dim)
    rotary = _angles(case, mesh)
    return triton_queries.program.lower(q, weights, rotary, pairs="neighbours")


def _values(case: Latents, mesh: Mesh) -> Any:
    weights = abstract(mesh, jnp.bfloat16, case.heads, case.v_dim, case.kv_rank)
    return _lower_parts(mesh, case.tokens, 1, case.heads, case.kv_rank, case.splits, weights)


def _combined(slots: int, kv_heads: int, group: int, size: int, splits: int, mesh: Mesh) -> Any:
    return _lower_parts(mesh, slots, kv_heads, group, size, splits, None)


def _lower_parts(
    mesh: Mesh, slots: int, kv_heads: int, group: int, size: int, splits: int, weights: Any
) -> Any:
    per_row: Any = abstract(mesh, jnp.float32, slots, kv_heads, splits, group)
    values: Any = abstract(mesh, jnp.float32, slots, kv_heads, splits, group, size)
    arrays = (Parts(per_row, per_row, values), abstract(mesh, jnp.int32, slots), None, weights)
    return triton_combine.program.lower(*arrays, group=group, dtype=jnp.bfloat16)
