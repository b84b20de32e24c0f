"""The kernels beside attention, for the compiler to judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.kernel_case import KernelCase, abstract
from pallas_kernels.sampling_threshold import triton_threshold

SAMPLED_ROWS = 264
VOCABULARIES = {"SmolLM2": 49_152, "Llama 3": 128_256, "Qwen3": 151_936}


def other_cases() -> Iterator[KernelCase]:
    """The sampler's filters over the vocabularies of some models."""
    for models, size in VOCABULARIES.items():
        yield KernelCase(
            "sampling threshold",
            models,
            f"{SAMPLED_ROWS} × {size:,}, float32",
            functools.partial(_sampling, size),
            entry="sampling_threshold",
            tensor_cores=False,
        )


def _sampling(size: int, mesh: Mesh) -> Any:
    logits = abstract(mesh, jnp.float32, SAMPLED_ROWS, size)
    numbers = abstract(mesh, jnp.float32, SAMPLED_ROWS)
    top_k = abstract(mesh, jnp.int32, SAMPLED_ROWS)
    return triton_threshold.program.lower(logits, numbers, numbers, top_k, numbers)
