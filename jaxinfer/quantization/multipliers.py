"""Which body multiplies with each quantised weight: the kernels, wherever they take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.params import ParamSpec, Tree, map_specs
from jaxinfer.quantization.weight import Multiplier, Quantised
from jaxinfer.sharding import MESH_AXES, sharding_of
from pallas_kernels.dispatch import Device
from pallas_kernels.quantised_matmul import QuantisedWeight, choose_body


def with_multipliers(params: Tree, device: Device, mesh: Mesh | None) -> tuple[Tree, str]:
    """Parameters, arrays or structs, whose quantised weights know what multiplies with them; and
    why some are multiplied by XLA where a kernel would be expected, empty if none are."""
    ways, problems = 1 if mesh is None else mesh.shape["model"], dict[str, None]()

    def of(param: Any) -> Any:
        if not isinstance(param, Quantised) or param.experts:
            return param
        part = own_part(param.specs(), ways, param.dtype)
        bodies = [choose_body(device, term, param.dtype) for term in terms_of(part)]
        problems.update((body.why, None) for body in bodies if body.why)
        body = next((body for body in bodies if body.why), bodies[0])
        return dataclasses.replace(param, multiplier=Multiplier(body.implementation, mesh))

    chosen = jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return chosen, "; ".join(problems)


def own_part(specs: Any, ways: int, dtype: Any) -> Any:
    """What one of `ways` devices has of a parameter, as structs: its `ParamSpec`, or a weight's.

    Raises ShardingError when it does not divide.
    """
    mesh = AbstractMesh(tuple(ways if axis == "model" else 1 for axis in MESH_AXES), MESH_AXES)

    def own(spec: ParamSpec) -> Any:
        shape = sharding_of(spec, mesh).shard_shape(spec.shape)
        return jax.ShapeDtypeStruct(shape, spec.resolve_dtype(dtype))

    return map_specs(own, specs)


def terms_of(weight: Quantised) -> list[QuantisedWeight]:
    """Its matrices, as structs like its leaves."""
    return jax.eval_shape(lambda weight: weight.terms, weight)
