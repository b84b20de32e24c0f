"""Mixtures whose checkpoints hold all experts of a layer in one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig, MoeConfig
from jaxinfer.models.base import HfSource
from jaxinfer.models.layers import fuse_gate_up


def with_fused(
    sources: dict[str, HfSource], c: ModelConfig, m: MoeConfig, hf: str
) -> dict[str, HfSource]:
    """A layer's `sources`, or what transformers 5 holds in memory and may write: one tensor for
    the gates and ups of all experts, all gate rows before all up rows, and one for the downs."""
    size, width, count = m.intermediate_size, c.hidden_size, m.num_experts

    def fuse(rows: np.ndarray) -> np.ndarray:
        return fuse_experts(count, lambda i: fuse_gate_up(rows[i, :size], rows[i, size:]))

    fused = {
        "router": HfSource({f"{hf}mlp.gate.weight": (count, width)}),
        "experts_gate_up": HfSource(
            {f"{hf}mlp.experts.gate_up_proj": (count, 2 * size, width)}, fuse
        ),
        "experts_down": HfSource({f"{hf}mlp.experts.down_proj": (count, width, size)}),
    }
    return sources | {
        name: dataclasses.replace(sources[name], others=(source,)) for name, source in fused.items()
    }


def fuse_experts(count: int, expert: Callable[[int], np.ndarray]) -> np.ndarray:
    """Arrays of all experts side by side, made one after the other: temporaries are of one."""
    first = expert(0)
    out = np.empty((count, *first.shape), first.dtype)
    out[0] = first
    for i in range(1, count):
        out[i] = expert(i)
    return out


def interleaved_sources(
    c: ModelConfig, m: MoeConfig, experts: str, apart: dict[str, HfSource]
) -> dict[str, HfSource]:
    """gpt-oss: rows of gate and up alternate, transposed. GGUF files have them `apart`, with biases
    likewise, and so MXFP4 is seen."""
    size, width, count = m.intermediate_size, c.hidden_size, m.num_experts

    def gate_up(rows: np.ndarray) -> np.ndarray:
        return fuse_gate_up(rows[0::2], rows[1::2])

    def source(name: str, rows: int, columns: int, fuse: Any) -> HfSource:
        return HfSource(
            {f"{experts}{name}": (count, columns, rows)},
            lambda weights: fuse_experts(count, lambda i: fuse(weights[i].T)),
        )

    def biases(projection: str, rows: int) -> dict[str, tuple[int, ...]]:
        return {f"{experts}{i}.{projection}_proj.bias": (rows,) for i in range(count)}

    sources = {
        "experts_gate_up": source("gate_up_proj", 2 * size, width, gate_up),
        "experts_down": source("down_proj", width, size, lambda rows: rows),
        "experts_gate_up_bias": HfSource(
            {f"{experts}gate_up_proj_bias": (count, 2 * size)},
            lambda rows: fuse_experts(count, lambda i: gate_up(rows[i])),
            others=(HfSource(biases("gate", size) | biases("up", size), stack_gate_up),),
        ),
        "experts_down_bias": HfSource(
            {f"{experts}down_proj_bias": (count, width)},
            others=(HfSource(biases("down", width), stack),),
        ),
    }
    for name, form in apart.items():
        others = (*sources[name].others, dataclasses.replace(form, others=()))
        sources[name] = dataclasses.replace(sources[name], others=others)
    return sources


def stack_gate_up(*parts: Any) -> Any:
    """Of arrays of all experts' gates, then all their ups."""
    xp, half = parts[0].__array_namespace__(), len(parts) // 2
    return xp.stack([fuse_gate_up(gate, up) for gate, up in zip(parts[:half], parts[half:])])


def stack(*parts: Any) -> Any:
    return parts[0].__array_namespace__().stack(parts)
