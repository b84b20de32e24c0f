"""Mixtures of experts in a step: which body multiplies, and on which devices.

Kernels are opaque to the compiler's partitioner: over several devices each runs them for its part
of every expert, and the parts of the result are added.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.models.base import Experts, Routed
from jaxinfer.models.moe import moe_specs
from jaxinfer.quantization.kinds import NONE
from jaxinfer.quantization.multipliers import own_part, terms_of
from jaxinfer.quantization.weight import Quantised, quantised_specs
from jaxinfer.sharding import on_each_device, partition_spec
from jaxinfer.step_model import StepModel
from pallas_kernels.dispatch import Body, Device
from pallas_kernels.grouped_matmul import Implementation, choose_body, grouped_matmul

# Logical axes of what experts have on a device.
GATE_UP, DOWN = ("experts", "mlp", None, None, "embed"), ("experts", "embed", "mlp")
BIAS = (None, "mlp", None, None)


def choose_experts(
    device: Device, config: ModelConfig, dtype: Any, ways: int = 1, quantization: str = NONE
) -> Body[Implementation] | None:
    """What multiplies with weights of that dtype, or in that kind, over `ways` devices; None
    without experts."""
    if config.moe is None:
        return None
    specs, bodies = moe_specs(config, config.moe), []
    for name in ("experts_gate_up", "experts_down"):
        part = own_part(quantised_specs(specs[name], quantization, dtype), ways, dtype)
        matrices: Any
        if isinstance(part, Quantised):
            matrices = terms_of(part)[0]
        else:
            shape = (part.shape[0], math.prod(part.shape[1:-1]), part.shape[-1])
            matrices = jax.ShapeDtypeStruct(shape, part.dtype)
        bodies.append(choose_body(device, matrices, dtype))
    return next((body for body in bodies if body.why), bodies[0])


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
    mesh = model.mesh if model.experts.startswith("triton") else None
    if mesh is None:
        return body(*arrays)
    if mesh.shape["expert"] > 1:
        raise ValueError("kernels divide every expert over devices: the mesh axis 'expert' is 1")
    axes = (GATE_UP, DOWN, BIAS if bias is not None else ())
    specs: list[Any] = [PartitionSpec(), *(partition_spec(names) for names in axes)]
    for i, weight in ((1, gate_up), (2, down)):
        if isinstance(weight, Quantised):
            specs[i] = weight.placed()

    def part(*arrays: Any) -> Array:
        return jax.lax.psum(body(*arrays), "model")

    return on_each_device(part, mesh, tuple(specs), PartitionSpec())(*arrays)
