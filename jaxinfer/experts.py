"""Mixtures of experts in a step: which body multiplies, and on which devices.

Kernels are opaque to the compiler's partitioner, and of a loop it would add up every turn: over
several devices each runs them for its part of every expert, and the parts of the result are added.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.models.base import Experts, Routed
from jaxinfer.params import ParamSpec, Tree
from jaxinfer.quantization.multipliers import own_part, terms_of
from jaxinfer.quantization.weight import Quantised
from jaxinfer.sharding import on_each_device, partition_spec
from jaxinfer.step_model import StepModel
from pallas_kernels.dispatch import Body, Device
from pallas_kernels.grouped_matmul import Implementation, choose_body, grouped_matmul

# Logical axes of what experts have on a device.
GATE_UP, DOWN = ("experts", "mlp", None, None, "embed"), ("experts", "embed", "mlp")
BIAS = (None, "mlp", None, None)


def choose_experts(
    device: Device, specs: Tree, dtype: Any, ways: int = 1
) -> Body[Implementation] | None:
    """What multiplies with the experts' matrices among parameters, as they are stored, over `ways`
    devices; None without experts. If a kernel does not take one of them, none is used."""
    bodies = [
        choose_body(device, matrices, dtype)
        for spec in _experts_among(specs)
        for matrices in _matrices(own_part(spec, ways, dtype))
    ]
    return next((body for body in bodies if body.why), bodies[0] if bodies else None)


def largest_copied(specs: Tree, dtype: Any) -> int:
    """Bytes of an expert's largest matrix, which XLA copies, or makes numbers of, to multiply with
    it on a GPU without kernels."""

    def copied(spec: ParamSpec | Quantised) -> int:
        if isinstance(spec, Quantised):
            return spec.made
        return math.prod(spec.shape[1:]) * spec.resolve_dtype(dtype).itemsize

    return max(map(copied, _experts_among(specs)), default=0)


def _experts_among(specs: Tree) -> list[ParamSpec | Quantised]:
    """The parameters that are matrices of experts."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Quantised | ParamSpec))
    return [spec for spec in leaves if spec.axes[0] == "experts" and spec.inputs]


def _matrices(part: Any) -> list[Any]:
    """[E, N, K], quantised or not, that add up to a parameter."""
    if isinstance(part, Quantised):
        return list(terms_of(part))
    shape = (part.shape[0], math.prod(part.shape[1:-1]), part.shape[-1])
    return [jax.ShapeDtypeStruct(shape, part.dtype)]


def run_experts(
    model: StepModel,
    compute: Experts,
    routed: Routed,
    gate_up: Float[Array, "E blocks 2 block D"] | Quantised,
    down: Float[Array, "E D F"] | Quantised,
    bias: Float[Array, "R blocks 2 block"] | None,
) -> Float[Array, "T D"]:
    """`compute` with the body that the step's model was given, on each device for its part."""
    assert model.experts is not None
    multiply = functools.partial(grouped_matmul, implementation=model.experts)
    body, arrays = functools.partial(compute, multiply), (routed, gate_up, down, bias)
    mesh = None if model.experts in ("segments", "ragged") else model.mesh
    if mesh is None:
        return body(*arrays)
    if mesh.shape["expert"] > 1:
        raise ValueError("every expert is divided over devices: the mesh axis 'expert' is 1")
    axes = (GATE_UP, DOWN, BIAS if bias is not None else ())
    specs: list[Any] = [PartitionSpec(), *(partition_spec(names) for names in axes)]
    for i, weight in ((1, gate_up), (2, down)):
        if isinstance(weight, Quantised):
            specs[i] = weight.placed()

    def part(*arrays: Any) -> Array:
        return jax.lax.psum(body(*arrays), "model")

    return on_each_device(part, mesh, tuple(specs), PartitionSpec())(*arrays)
