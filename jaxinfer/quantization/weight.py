"""A parameter of products stored in few bits, in the place of the array that it stands for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.params import ParamSpec, Tree, is_spec, map_specs
from jaxinfer.quantization.kinds import CHANNEL, KINDS, NONE, Kind
from jaxinfer.sharding import on_each_device, partition_spec
from pallas_kernels.quantised_matmul import (
    Implementation,
    QuantisedWeight,
    matmul_in_parts,
    quantised_matmul,
)
from pallas_kernels.quantised_matmul.activations import PAIR

GROUPS = (128, 64, 32)  # columns that share a scale: what kernels take
MOST_SHARDS = 8  # devices over which inputs are divided, each with whole groups of them


@dataclass(frozen=True, slots=True)
class Multiplier:
    """What multiplies with a weight: a body, which is run on each device of a mesh for its part if
    it is a kernel."""

    body: Implementation = "reference"
    mesh: Mesh | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """(values + low / 254) * scales, as a node of the parameters' tree.

    Its leaves are arrays, their structs, or their `ParamSpec`s: what holds for a parameter holds
    for each of them.

    Attributes:
        values: in the parameter's own shape [*outputs, *inputs], or [E, *outputs, *inputs]; of
            int4 the last axis has bytes of two, packed as `QuantisedWeight` has them.
        scales: float32. Of every output, [*outputs] or [E, *outputs]; of blocks [groups of inputs,
            groups of outputs], flat, or [E, ...].
        low: int8 like `values`, the second term; None: there is none.
        kind: a name of `kinds.KINDS`.
        axes: the parameter's logical axes.
        inputs: how many trailing axes a product sums over.
        block: outputs and inputs that share a scale; `CHANNEL`: all inputs of one output.
        dtype: of the numbers that it stands for.
        multiplier: what multiplies with it.
    """

    values: Any
    scales: Any
    low: Any = None
    kind: str = field(default="int8", metadata={"static": True})
    axes: tuple[str | None, ...] = field(default=(), metadata={"static": True})
    inputs: int = field(default=1, metadata={"static": True})
    block: tuple[int, int] = field(default=CHANNEL, metadata={"static": True})
    dtype: str = field(default="float32", metadata={"static": True})
    multiplier: Multiplier = field(default=Multiplier(), metadata={"static": True})

    @property
    def bits(self) -> int:
        return 4 if KINDS[self.kind].stored == "int4" else 8

    @property
    def experts(self) -> bool:
        """Whether the first axis is of experts, each with a matrix of its own."""
        return self.axes[0] == "experts"

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's, or of a device's part of it."""
        return (*self.values.shape[:-1], self.values.shape[-1] * (8 // self.bits))

    @property
    def terms(self) -> list[QuantisedWeight]:
        """Matrices [N, K], or [E, N, K], that add up to it."""
        lead = self.shape[:1] if self.experts else ()
        columns = math.prod(self.shape[-self.inputs :])
        rows, group = self.block
        whole = (*lead, 1, -1) if self.block == CHANNEL else self.scales.shape
        scales = self.scales.reshape(whole)
        parts = [(self.values, scales)]
        if self.low is not None:
            parts.append((self.low, scales / PAIR))
        return [
            QuantisedWeight(
                values.reshape(*lead, -1, columns * self.bits // 8),
                scale,
                bits=self.bits,
                block=(rows, group or columns),
                activations=KINDS[self.kind].activations,
            )
            for values, scale in parts
        ]

    def placed(self) -> Quantised:
        """In the place of every leaf, which mesh axes its axes are divided over."""
        return jax.tree.map(lambda spec: partition_spec(spec.axes), self.specs(), is_leaf=is_spec)

    def specs(self) -> Quantised:
        """In the place of every leaf, its `ParamSpec`."""
        values = ParamSpec(self.values.shape, self.axes, dtype=jnp.dtype(self.values.dtype).name)
        lead, rest = self.axes[: self.experts], self.axes[self.experts :]
        axes = (*lead, rest[-self.inputs], rest[0])  # inputs by outputs
        if self.block == CHANNEL:
            axes = self.axes[: -self.inputs]
        scales = ParamSpec(self.scales.shape, axes, "ones", "float32")
        low = None if self.low is None else values
        return dataclasses.replace(self, values=values, scales=scales, low=low)


def multiply(x: Float[Array, "T K"], weight: Quantised, out_dtype: Any) -> Float[Array, "T N"]:
    """x times the transposed matrix that the weight stands for, over its flat outputs."""
    body, mesh = weight.multiplier.body, weight.multiplier.mesh
    if body == "reference" or mesh is None:
        return multiply_own(x, weight, out_dtype)
    # Kernels are opaque to the compiler's partitioner.
    outputs, inputs = partition_spec((weight.axes[0], weight.axes[-weight.inputs]))

    def part(x: Array, weight: Quantised) -> Array:
        product = multiply_own(x, weight, out_dtype)
        return product if inputs is None else lax.psum(product, inputs)

    specs = (PartitionSpec(None, inputs), weight.placed())
    return on_each_device(part, mesh, specs, PartitionSpec(None, outputs))(x, weight)


def multiply_own(x: Float[Array, "T K"], weight: Quantised, out_dtype: Any) -> Float[Array, "T N"]:
    """`multiply` on one device, for its part of the weight."""
    terms, body = weight.terms, weight.multiplier.body
    if len(terms) == 1:
        return quantised_matmul(x, terms[0], implementation=body, out_dtype=out_dtype)
    products = [
        quantised_matmul(x, term, implementation=body, out_dtype=jnp.float32) for term in terms
    ]
    return sum(products[1:], start=products[0]).astype(out_dtype)


def multiply_in_parts(x: Float[Array, "T K"], weight: Quantised) -> Float[Array, "P T N"]:
    """`multiply_own` as float32 parts that add up, for a kernel that adds them."""
    if len(weight.terms) > 1:
        return multiply_own(x, weight, jnp.float32)[None]
    return matmul_in_parts(x, weight.terms[0], implementation=weight.multiplier.body)


def rows_of(table: Quantised, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table [V, D] with a scale each, in its dtype."""

    def take(array: Array) -> Array:
        return array.at[tokens].get(mode="promise_in_bounds")

    rows = take(table.values).astype(jnp.float32)
    if table.low is not None:
        rows = rows + take(table.low).astype(jnp.float32) / PAIR
    return (rows * take(table.scales)[:, None]).astype(table.dtype)


def quantised_spec(spec: ParamSpec, name: str, dtype: str) -> ParamSpec | Quantised:
    """The parts of a parameter in the kind of that name; the parameter itself where no product
    takes it, or the kind leaves it as it is."""
    kind = KINDS[name]
    if not spec.inputs or (spec.axes[0] == "vocab" and not kind.vocabulary):
        return spec
    shape, block = spec.shape, _block(spec, kind)
    if kind.stored == "int4":
        if shape[-1] % 2 or block[1] % 2:
            return spec  # no byte has two
        shape = (*shape[:-1], shape[-1] // 2)
    lead = shape[:1] if spec.axes[0] == "experts" else ()
    outputs = spec.shape[len(lead) : -spec.inputs]
    scales = (*lead, *outputs)
    if block != CHANNEL:
        columns = math.prod(spec.shape[-spec.inputs :])
        scales = (*lead, columns // block[1], math.ceil(math.prod(outputs) / block[0]))
    stored = jnp.uint8 if kind.stored == "int4" else jnp.dtype(kind.stored)
    values = jax.ShapeDtypeStruct(shape, stored)
    return Quantised(
        values,
        jax.ShapeDtypeStruct(scales, jnp.float32),
        values if kind.terms == 2 else None,
        name,
        spec.axes,
        spec.inputs,
        block,
        spec.resolve_dtype(dtype).name,
    ).specs()


def _block(spec: ParamSpec, kind: Kind) -> tuple[int, int]:
    """Outputs and inputs of a parameter that share a scale: no more than the kind says, and never
    such as devices may have to divide, or such as a model's other rows come between."""
    if kind.block == CHANNEL:
        return CHANNEL
    rows, most = kind.block
    outputs = spec.shape[1 if spec.axes[0] == "experts" else 0 : -spec.inputs]
    if len(outputs) > 1:
        rows = math.gcd(rows, outputs[-1])
    inputs, columns = spec.shape[-1], spec.shape[-1]
    if spec.inputs == 1 and spec.axes[-1] != "embed" and columns % MOST_SHARDS == 0:
        inputs = columns // MOST_SHARDS
    for size in (inputs, columns):
        for group in GROUPS:
            if group <= most and size % group == 0:
                return rows, group
    return rows, columns


def quantised_specs(specs: Tree, quantization: str, dtype: str) -> Tree:
    """The specs of a model whose weights are in a kind, by its name."""
    if quantization == NONE:
        return specs
    return map_specs(lambda spec: quantised_spec(spec, quantization, dtype), specs)


def specs_of(params: Tree, specs: Tree) -> Tree:
    """The specs of parameters that may be quantised, given those of the plain model."""

    def of(spec: ParamSpec, param: Any) -> Any:
        return param.specs() if isinstance(param, Quantised) else spec

    return jax.tree.map(of, specs, params, is_leaf=is_spec)
