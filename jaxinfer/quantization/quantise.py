"""Weights rounded to int8, on the host, parameter by parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, Tree, is_spec
from jaxinfer.quantization.kinds import KINDS, NONE, choose
from jaxinfer.quantization.weight import Quantised, quantised_spec
from pallas_kernels.quantised_matmul.activations import INT8_MOST, PAIR

if TYPE_CHECKING:
    from jaxinfer.checkpoints import LoadedModel

_PIECE = 1 << 18  # values rounded at once: the temporaries stay in the CPU's cache


def quantise(array: np.ndarray, spec: ParamSpec, quantization: str, dtype: str) -> Any:
    """A parameter in a kind (a name of `KINDS`, or none), as NumPy arrays: `Quantised`, or the
    array itself where no product takes it. `dtype` is what the model computes in.

    Rounds to nearest, with one float32 scale for the weights of an output.
    """
    if quantization == NONE or not spec.inputs:
        return array
    parts = quantised_spec(spec, KINDS[quantization], dtype)
    assert isinstance(parts, Quantised)
    rows = array.reshape(math.prod(parts.scales.shape), -1)
    values = np.empty(rows.shape, np.int8)
    low = None if parts.low is None else np.empty(rows.shape, np.int8)
    scales = np.empty(len(rows), np.float32)
    step = max(1, _PIECE // rows.shape[1])
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        part = rows[piece].astype(np.float32)
        scale = np.abs(part).max(axis=1) / np.float32(INT8_MOST)
        scales[piece] = scale = np.maximum(scale, np.finfo(np.float32).tiny)
        part /= scale[:, None]
        high = np.rint(part)
        values[piece] = high
        if low is not None:
            low[piece] = np.rint((part - high) * np.float32(PAIR))
    arrays: list[np.ndarray] = [values, scales] if low is None else [values, scales, low]
    specs = jax.tree.leaves(parts)
    placed = [part.reshape(spec.shape) for part, spec in zip(arrays, specs, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(parts), placed)


def quantise_params(params: Tree, specs: Tree, quantization: str, dtype: str) -> Tree:
    """Parameters that are in memory, of the plain `specs`; each stays where it is, or its parts on
    the first device."""

    def of(spec: ParamSpec, array: Any) -> Any:
        if quantization == NONE or not spec.inputs:
            return array
        return jax.tree.map(jnp.asarray, quantise(np.asarray(array), spec, quantization, dtype))

    return jax.tree.map(of, specs, params, is_leaf=is_spec)


def quantised_model(model: LoadedModel, quantization: str) -> LoadedModel:
    """A loaded model in another kind, its plain parameters shared. Raises ValueError where
    `kinds.choose` does."""
    kind = choose(quantization, model.quantization, jax.devices()[0].platform)
    if model.quantization != NONE:
        raise ValueError(f"the model's weights are {model.quantization} already")
    specs = family_of(model.config.family).param_specs(model.config)
    params = quantise_params(model.params, specs, kind, model.dtype)
    return dataclasses.replace(model, params=params, quantization=kind)


def placing(
    quantization: str, dtype: str, sharding_of: Callable[[ParamSpec], Any]
) -> Callable[[np.ndarray, ParamSpec], Any]:
    """What quantises a parameter that was read and puts its parts where they belong."""

    def place(array: np.ndarray, spec: ParamSpec) -> Any:
        if quantization == NONE:
            return jax.device_put(array, sharding_of(spec))
        parts = quantised_spec(spec, KINDS[quantization], dtype)
        return jax.tree.map(
            lambda part, part_spec: jax.device_put(part, sharding_of(part_spec)),
            quantise(array, spec, quantization, dtype),
            parts,
        )

    return place
