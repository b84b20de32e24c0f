"""Others' attention for the same inputs, over keys and values that lie dense: XLA's, cuDNN's
through JAX, and PyTorch's. They are for plain attention only, and whatever a machine lacks is said.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.gpu_check.attention_kernels import Attention
from jaxinfer.gpu_check.on_device.registry import Baseline, Inputs
from jaxinfer.gpu_check.on_device.timing import RUNS, Timing, summary


def dense_baselines(case: Attention, phase: str) -> Mapping[str, Baseline]:
    """Baselines of a case, by name; none for what dense attention does not compute alike."""
    plain = case.window is None and case.soft_cap is None and not case.sinks
    if not plain or case.value_dim is not None or case.pages != "bfloat16":
        return {}
    prepare = functools.partial(_dense, phase)
    return {
        "XLA": Baseline(prepare, functools.partial(_attention, phase, "xla")),
        "cuDNN": Baseline(prepare, functools.partial(_attention, phase, "cudnn"), gpu_only=True),
        "torch": Baseline(prepare, timed=functools.partial(_torch, phase)),
    }


def _dense(phase: str, inputs: Inputs) -> Inputs:
    """q [B, T, heads, hd], and k and v [B, S, kv_heads, hd] out of the pages."""
    q = inputs["q"]
    flat = q.reshape(q.shape[0], -1, q.shape[-1])
    found = {"q": flat[:, None] if phase == "decode" else flat[None]}
    table = inputs["table"] if phase == "decode" else inputs["table"][:1]
    for name in ("k", "v"):
        pages = jnp.moveaxis(inputs[name][table], 3, 2)  # [B, W, ps, kv_heads, hd]
        pages = pages.reshape(table.shape[0], -1, *pages.shape[3:])
        found[name] = jnp.where(jnp.isfinite(pages), pages, 0)
    return found


def _attention(phase: str, implementation: Any, dense: Inputs) -> Float[Array, "B T N hd"]:
    return jax.nn.dot_product_attention(
        dense["q"],
        dense["k"],
        dense["v"],
        is_causal=phase == "prefill",
        implementation=implementation,
    )


def _torch(phase: str, dense: Inputs, times: int, runs: int = RUNS) -> Timing:
    """PyTorch's scaled dot product attention, launched `times` times between two waits.

    Raises ImportError where PyTorch is not installed.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        torch.from_dlpack(jnp.swapaxes(dense[name], 1, 2)).contiguous() for name in ("q", "k", "v")
    )

    def launch() -> None:
        causal = phase == "prefill"
        scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    wait: Callable[[], None] = torch.cuda.synchronize if q.is_cuda else lambda: None
    launch()
    wait()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(times):
            launch()
        wait()
        taken.append((time.perf_counter() - start) / times * 1e6)
    return summary(taken, times)
