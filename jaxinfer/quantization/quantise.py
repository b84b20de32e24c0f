"""Weights made `Quantised`, on the host, parameter by parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cpu_kernels.panels import Panels
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, Tree, is_spec
from jaxinfer.quantization.kinds import KINDS, NONE, Kind, Layout, choose
from jaxinfer.quantization.rounding import Rounded, round_matrix
from jaxinfer.quantization.weight import (
    Quantised,
    activations_for,
    own_layout,
    quantised_spec,
)

if TYPE_CHECKING:
    from jaxinfer.checkpoints import LoadedModel


def quantise(array: np.ndarray, spec: ParamSpec, quantization: str, dtype: str) -> Any:
    """A parameter in a kind (a name of `KINDS`, or none), as NumPy arrays: `Quantised`, or the
    array itself where no product takes it. `dtype` is what the model computes in.
    """
    layout = None if quantization == NONE else own_layout(spec, KINDS[quantization])
    if layout is None:
        return array
    matrices = array.reshape(*_lead(spec), -1, math.prod(spec.shape[-spec.inputs :]))
    rounded = [round_matrix(rows, layout) for rows in (matrices if _lead(spec) else [matrices])]
    return assembled(rounded, spec, layout, KINDS[quantization], dtype)


def assembled(
    matrices: list[Rounded],
    spec: ParamSpec,
    layout: Layout,
    kind: Kind,
    dtype: str,
) -> Quantised:
    """A parameter made of its matrix [N, K], or of each expert's."""
    parts = quantised_spec(spec, layout, activations_for(layout, kind), dtype)
    assert isinstance(parts, Quantised)

    def of(name: str, by_row: bool) -> np.ndarray | None:
        own = [getattr(matrix, name) for matrix in matrices]
        if own[0] is None:
            return None
        arrays = [part.T if by_row else part for part in own]
        wanted = getattr(parts, name)
        stacked = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        return np.ascontiguousarray(stacked.reshape(wanted.shape), wanted.dtype)

    return dataclasses.replace(
        parts,
        values=of("values", False),
        scales=of("scales", True),
        low=of("low", False),
        zeros=of("zeros", True),
        order=of("order", False),
    )


def _lead(spec: ParamSpec) -> tuple[int, ...]:
    return spec.shape[:1] if spec.axes[0] == "experts" else ()


def quantise_params(params: Tree, specs: Tree, quantization: str, dtype: str) -> Tree:
    """Parameters that are in memory, of the plain `specs`; each stays where it is, or its parts on
    the first device."""

    def of(spec: ParamSpec, array: Any) -> Any:
        if quantization == NONE or own_layout(spec, KINDS[quantization]) is None:
            return array
        plain = array.array() if isinstance(array, Panels) else np.asarray(array)
        return jax.tree.map(jnp.asarray, quantise(plain, spec, quantization, dtype))

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
) -> Callable[[Any, ParamSpec], Any]:
    """What quantises a parameter that was read, unless it was read so, and puts its parts where
    they belong."""

    def place(array: Any, spec: ParamSpec) -> Any:
        made = (
            quantise(array, spec, quantization, dtype) if isinstance(array, np.ndarray) else array
        )
        if not isinstance(made, Quantised):
            return jax.device_put(made, sharding_of(spec))
        parts = quantised_spec(spec, made.layout, made.activations, dtype)
        return jax.tree.map(
            lambda part, part_spec: jax.device_put(part, sharding_of(part_spec)), made, parts
        )

    return place
