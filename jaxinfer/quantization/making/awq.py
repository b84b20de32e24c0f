"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv:2306.00978): columns that meet large
activations are made larger before they are rounded, and what comes before them smaller by as much.

What a norm, a value projection or the ungated half of an MLP gives is divided; the model computes
the same. How much is found by what is left of the products' error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.config import ModelConfig
from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.making.grids import best_grid, by_groups, grid_of, stored
from jaxinfer.quantization.rounding import Rounded

STEPS = 20  # exponents from 0 to 1 that are tried
Params = dict[str, np.ndarray]
Moments = dict[str, np.ndarray]  # of a parameter's inputs, [K, K]


@dataclass(frozen=True)
class Fold:
    """Parameters whose columns are scaled together, and what undoes it before them.

    Attributes:
        names: whose inputs they are.
        divide: of a layer's parameters and factors [K], what comes before, divided by them.
        share: what makes factors alike where columns stand for the same thing.
    """

    names: tuple[str, ...]
    divide: Callable[[Params, np.ndarray], Params]
    share: Callable[[np.ndarray], np.ndarray] = lambda factors: factors


def folds(c: ModelConfig, params: Params) -> list[Fold]:
    """Where a layer's factors can go: not through routers, latents or activations that bend."""
    found: list[Fold] = []
    inner = tuple(name for name in ("gate_up", "up") if name in params)
    plain = "qkv" in params and c.norms != "post" and "attn_norm" in params
    if plain and c.norms != "shared":
        found.append(Fold(("qkv",), _through_norm(c, "attn_norm")))
    elif plain and inner:
        found.append(Fold(("qkv", *inner), _through_norm(c, "attn_norm")))
    if inner and c.norms in ("pre", "both") and "mlp_norm" in params:
        found.append(Fold(inner, _through_norm(c, "mlp_norm")))
    if "qkv" in params and "o" in params and c.qkv_clip is None:
        found.append(Fold(("o",), _through_values(c), _shared_by_queries(c)))
    if "gate_up" in params and "down" in params:
        found.append(Fold(("down",), _through_up))
    return found


def _through_norm(c: ModelConfig, name: str) -> Callable[[Params, np.ndarray], Params]:
    def divide(params: Params, factors: np.ndarray) -> Params:
        changed = {name: (params[name] + c.norm_offset) / factors - c.norm_offset}
        if f"{name}_bias" in params:
            changed[f"{name}_bias"] = params[f"{name}_bias"] / factors
        return params | changed

    return divide


def _through_values(c: ModelConfig) -> Callable[[Params, np.ndarray], Params]:
    def divide(params: Params, factors: np.ndarray) -> Params:
        by_head = factors.reshape(c.num_kv_heads, c.group_size, c.head_dim)[:, 0]
        changed = {}
        for name in ("qkv", "qkv_bias"):
            if name in params:
                rows = params[name].copy()
                shape = (c.num_kv_heads, c.head_dim, *[1] * (rows.ndim - 3))
                rows[:, c.group_size + 1] /= by_head.reshape(shape)
                changed[name] = rows
        return params | changed

    return divide


def _shared_by_queries(c: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """A value reaches all queries of its head."""

    def share(factors: np.ndarray) -> np.ndarray:
        heads = factors.reshape(c.num_kv_heads, c.group_size, c.head_dim)
        return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)

    return share


def _through_up(params: Params, factors: np.ndarray) -> Params:
    changed = {}
    for name in ("gate_up", "gate_up_bias"):
        if name in params:
            rows = params[name].copy()  # [F / block, 2, block, ...]
            shape = (rows.shape[0], rows.shape[2], *[1] * (rows.ndim - 3))
            rows[:, 1] /= factors.reshape(shape)
            changed[name] = rows
    return params | changed


def scale_layer(
    c: ModelConfig, params: Params, moments: Moments, layouts: dict[str, Layout]
) -> tuple[Params, Moments]:
    """A layer that computes the same, its columns scaled for rounding, and the moments of what
    they now meet."""
    moments = dict(moments)
    for fold in folds(c, params):
        names = [name for name in fold.names if name in layouts and name in moments]
        if len(names) != len(fold.names):
            continue
        matrices = {name: params[name].reshape(-1, len(moments[name])) for name in names}
        factors = _search(matrices, moments, layouts, fold.share)
        for name in names:
            scaled = matrices[name] * factors
            params = params | {name: scaled.reshape(params[name].shape)}
            moments[name] = moments[name] / np.outer(factors, factors)
        params = fold.divide(params, factors)
    return params, moments


def _search(
    matrices: Params, moments: Moments, layouts: dict[str, Layout], share: Any
) -> Float[np.ndarray, " K"]:
    """The activations' size to the power that leaves the least error."""
    first = next(iter(matrices))
    size = np.sqrt(np.maximum(np.diag(moments[first]), 1e-12))
    best, least = np.ones(len(size), np.float32), np.inf
    for step in range(STEPS):
        factors = share(size ** (step / STEPS)).astype(np.float32)
        factors = np.maximum(factors / np.sqrt(factors.max() * factors.min()), 1e-4)
        error = 0.0
        for name, matrix in matrices.items():
            group = layouts[name].group or matrix.shape[1]
            groups = (matrix * factors).reshape(len(matrix), -1, group)
            made = grid_of(groups, layouts[name]).nearest(groups).reshape(matrix.shape) / factors
            left = made - matrix
            error += float(np.vdot(left @ moments[name], left))
        if error < least:
            best, least = factors, error
    return best


def rounded_by_range(
    weight: Float[np.ndarray, "N K"], moments: Float[np.ndarray, "K K"], layout: Layout
) -> Rounded:
    """A matrix [N, K] to nearest, each group over the range that leaves the least error."""
    group = layout.group or weight.shape[1]
    groups = weight.reshape(len(weight), -1, group).astype(np.float32)
    used = best_grid(groups, by_groups(moments, group), layout)
    return stored(used.codes(groups), used, layout)
