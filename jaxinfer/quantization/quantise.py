"""Weights rounded to few bits, on the host, parameter by parameter."""

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
from jaxinfer.quantization.kinds import CHANNEL, KINDS, NONE, Stored, choose
from jaxinfer.quantization.weight import Quantised, quantised_spec
from pallas_kernels.quantised_matmul.activations import FLOAT8_MOST, INT8_MOST, PAIR
from pallas_kernels.quantised_matmul.weight import ZERO_OF_INT4, pack_int4

if TYPE_CHECKING:
    from jaxinfer.checkpoints import LoadedModel

_VALUES: dict[Stored, Any] = {
    "int8": np.int8,
    "int4": np.uint8,
    "float8_e4m3fn": jnp.float8_e4m3fn.dtype,
}
# What the largest magnitude becomes.
_MOST: dict[Stored, float] = {"int8": INT8_MOST, "int4": 7.0, "float8_e4m3fn": FLOAT8_MOST}
_PIECE = 1 << 18  # values rounded at once: the temporaries stay in the CPU's cache


def quantise(array: np.ndarray, spec: ParamSpec, quantization: str, dtype: str) -> Any:
    """A parameter in a kind (a name of `KINDS`, or none), as NumPy arrays: `Quantised`, or the
    array itself where no product takes it or the kind leaves it as it is. `dtype` is what the
    model computes in.

    Rounds to nearest, with one float32 scale for the weights of an output or of a block.
    """
    parts = spec if quantization == NONE else quantised_spec(spec, quantization, dtype)
    if not isinstance(parts, Quantised):
        return array
    kind, (height, width) = KINDS[quantization], parts.block
    columns = math.prod(spec.shape[-spec.inputs :])
    # Where a block has one row, experts' rows are as good as one matrix's.
    experts = spec.shape[0] if parts.experts and height > 1 else 1
    matrices = array.reshape(experts, -1, columns)
    blocks = (math.ceil(matrices.shape[1] / height), columns // (width or columns))
    values = np.empty(matrices.shape, _VALUES[kind.stored])
    low = None if parts.low is None else np.empty(matrices.shape, np.int8)
    scales = np.empty((experts, *blocks), np.float32)
    for i, matrix in enumerate(matrices):
        rest = None if low is None else low[i]
        _round(matrix, kind.stored, height, values[i], scales[i], rest)
    if parts.block != CHANNEL:
        lead = spec.shape[: parts.experts]
        scales = scales.reshape(*lead, -1, blocks[1]).swapaxes(-1, -2).copy()
    if kind.stored == "int4":
        values = np.asarray(pack_int4(values, width))
    arrays = [array for array in (values, scales, low) if array is not None]
    specs = jax.tree.leaves(parts)
    placed = [part.reshape(spec.shape) for part, spec in zip(arrays, specs, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(parts), placed)


def _round(
    matrix: np.ndarray,
    stored: Stored,
    height: int,
    values: np.ndarray,
    scales: np.ndarray,
    low: np.ndarray | None,
) -> None:
    """Fill values [N, K] of a matrix, the scales [N / height, groups] of its blocks, and what is
    left over, in units of 1 / 254 of theirs."""
    groups = scales.shape[1]
    step = max(1, _PIECE // (matrix.shape[1] * height))
    for start in range(0, len(scales), step):
        piece, own = slice(start * height, (start + step) * height), slice(start, start + step)
        part = matrix[piece].astype(np.float32)
        blocks = np.abs(part if height == 1 else _padded(part, height))
        largest = blocks.reshape(-1, height, groups, part.shape[1] // groups).max(axis=(1, 3))
        scale = largest / np.float32(_MOST[stored])
        scales[own] = scale = np.maximum(scale, np.finfo(np.float32).tiny)
        scale = scale if height == 1 else np.repeat(scale, height, axis=0)[: len(part)]
        units = part.reshape(len(part), groups, -1)
        units /= scale[:, :, None]
        high = part if stored == "float8_e4m3fn" else np.rint(part)
        values[piece] = high + ZERO_OF_INT4 if stored == "int4" else high
        if low is not None:
            low[piece] = np.rint((part - high) * np.float32(PAIR))


def _padded(part: np.ndarray, height: int) -> np.ndarray:
    """With rows of zeros up to a multiple of `height`."""
    return np.pad(part, ((0, -len(part) % height), (0, 0)))


def quantise_params(params: Tree, specs: Tree, quantization: str, dtype: str) -> Tree:
    """Parameters that are in memory, of the plain `specs`; each stays where it is, or its parts on
    the first device."""

    def of(spec: ParamSpec, array: Any) -> Any:
        if quantization == NONE or is_spec(quantised_spec(spec, quantization, dtype)):
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
        parts = quantised_spec(spec, quantization, dtype)
        return jax.tree.map(
            lambda part, part_spec: jax.device_put(part, sharding_of(part_spec)),
            quantise(array, spec, quantization, dtype),
            parts,
        )

    return place
