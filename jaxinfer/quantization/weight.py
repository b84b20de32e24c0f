"""A parameter of products stored in few bits, in the place of the array that it stands for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.params import Init, ParamSpec, Tree, is_spec, map_named_specs, named_leaves
from jaxinfer.quantization.kinds import KINDS, NONE, Activations, Kind, Layout
from jaxinfer.sharding import on_each_device, partition_spec
from pallas_kernels.quantised_matmul import (
    Implementation,
    QuantisedWeight,
    dequantise,
    matmul_in_parts,
    quantised_matmul,
)
from pallas_kernels.quantised_matmul.activations import PAIR

Layouts = Mapping[str, Layout]  # by a parameter's path; those that are not named are numbers
KERNELS_GROUP = 32  # columns with one scale: kernels take no fewer
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
    """(values - zeros) * scales, as a node of the parameters' tree; see `kinds.Layout`.

    Its leaves are arrays, their structs, or their `ParamSpec`s: what holds for a parameter holds
    for each of them.

    Attributes:
        values: in the parameter's own shape [*outputs, *inputs], or [E, *outputs, *inputs], of
            which 4 bits take half the last axis; packed as a `QuantisedWeight`'s are.
        scales: of the flat matrix's groups, [groups, ceil(N / rows)] or [E, ...].
        low: int8 like `values`, the second term, in units of 1/254; None: there is none.
        zeros: like `scales`, or None.
        order: i32[K], or None: where the flat matrix's columns are sorted.
        axes: the parameter's logical axes.
        inputs: how many trailing axes a product sums over.
        layout: how it is stored.
        activations: see `kinds.Kind`.
        dtype: of the numbers that it stands for.
        multiplier: what multiplies with it.
    """

    values: Any
    scales: Any
    low: Any = None
    zeros: Any = None
    order: Any = None
    axes: tuple[str | None, ...] = field(default=(), metadata={"static": True})
    inputs: int = field(default=1, metadata={"static": True})
    layout: Layout = field(default=Layout(), metadata={"static": True})
    activations: Activations = field(default="as_given", metadata={"static": True})
    dtype: str = field(default="float32", metadata={"static": True})
    multiplier: Multiplier = field(default=Multiplier(), metadata={"static": True})

    @property
    def experts(self) -> bool:
        """Whether the first axis is of experts, each with a matrix of its own."""
        return self.axes[0] == "experts"

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's, or of a device's part of it."""
        *axes, last = self.values.shape
        return (*axes, last * (8 // self.layout.bits))

    @property
    def bits(self) -> int:
        """Of a value."""
        return self.layout.bits

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the flat matrix that share a scale."""
        return self.layout.rows, self.layout.group or math.prod(self.shape[-self.inputs :])

    @property
    def made(self) -> int:
        """Bytes of the numbers that XLA makes of a matrix to multiply with it."""
        if self.activations != "as_given" and self.layout.values == "int8":
            return 0  # integers are multiplied
        itemsize = jnp.dtype(self.dtype).itemsize if self.layout.values == "int8" else 4
        return math.prod(self.shape[self.experts :]) * itemsize

    @property
    def terms(self) -> list[QuantisedWeight]:
        """Matrices [N, K], or [E, N, K], that add up to it."""
        parts = [(self.values, self.scales)]
        if self.low is not None:
            parts.append((self.low, self.scales / PAIR))
        return [self._matrix(values, scales) for values, scales in parts]

    def _matrix(self, values: Any, scales: Any) -> QuantisedWeight:
        lead = self.shape[:1] if self.experts else ()
        return QuantisedWeight(
            values.reshape(*lead, -1, math.prod(values.shape[-self.inputs :])),
            scales,
            self.zeros,
            self.order,
            bits=self.bits,
            block=self.block,
            activations=self.activations,
            codes="e2m1" if self.layout.values == "float4_e2m1fn" else "integers",
        )

    def specs(self) -> Quantised:
        """In the place of every leaf, its `ParamSpec`."""
        lead, rest = self.axes[: self.experts], self.axes[self.experts :]
        by_group = (*lead, rest[-self.inputs], rest[0])

        def spec(array: Any, axes: tuple[str | None, ...], init: Init) -> Any:
            if array is None:
                return None
            sizes = zip(axes, array.shape, strict=True)
            whole = tuple(None if size == 1 else axis for axis, size in sizes)
            return ParamSpec(array.shape, whole, init, jnp.dtype(array.dtype).name)

        return dataclasses.replace(
            self,
            values=spec(self.values, self.axes, "normal"),
            scales=spec(self.scales, by_group, "ones"),
            low=spec(self.low, self.axes, "normal"),
            zeros=spec(self.zeros, by_group, "zeros"),
            order=spec(self.order, (None,), "zeros"),
        )

    def placed(self) -> Quantised:
        """In the place of every leaf, which mesh axes its axes are divided over."""
        return jax.tree.map(lambda spec: partition_spec(spec.axes), self.specs(), is_leaf=is_spec)


@dataclass(frozen=True)
class Heard:
    """A parameter that lets somebody hear what it is multiplied with, outside of programs."""

    array: Any
    hear: Callable[[Float[Array, "T K"]], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return self.array.shape


def multiply(x: Float[Array, "T K"], weight: Quantised, out_dtype: Any) -> Float[Array, "T N"]:
    """x times the transposed matrix that the weight stands for, over its flat outputs."""
    body, mesh = weight.multiplier.body, weight.multiplier.mesh
    if body == "reference" or mesh is None:
        return multiply_own(x, weight, out_dtype)
    # Kernels are opaque to the compiler's partitioner.
    if weight.order is not None:  # which is of all devices' columns
        x, weight = x[:, weight.order], dataclasses.replace(weight, order=None)
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
    """Rows of a table [V, D], in its dtype."""

    def of(term: QuantisedWeight) -> Array:
        place = {"mode": "promise_in_bounds"}
        blocks = tokens // term.block[0]
        taken = dataclasses.replace(
            term,
            values=term.values.at[tokens].get(**place),
            scales=term.scales.at[:, blocks].get(**place),
            zeros=None if term.zeros is None else term.zeros.at[:, blocks].get(**place),
            block=(1, term.block[1]),
        )
        return dequantise(taken)

    rows = [of(term) for term in table.terms]
    return sum(rows[1:], start=rows[0]).astype(table.dtype)


def quantised_spec(
    spec: ParamSpec, layout: Layout | None, activations: Activations, dtype: str
) -> ParamSpec | Quantised:
    """The parts of a parameter in a layout; the parameter itself without one."""
    if layout is None:
        return spec
    lead = spec.shape[:1] if spec.axes[0] == "experts" else ()
    rows = math.prod(spec.shape[len(lead) : -spec.inputs])
    columns = math.prod(spec.shape[-spec.inputs :])
    *axes, last = spec.shape
    stored = jnp.dtype("uint8" if layout.bits == 4 else layout.values)
    values = jax.ShapeDtypeStruct((*axes, last // (8 // layout.bits)), stored)
    blocks = (*lead, columns // (layout.group or columns), math.ceil(rows / layout.rows))
    return Quantised(
        values,
        jax.ShapeDtypeStruct(blocks, jnp.dtype(layout.scales)),
        values if layout.terms == 2 else None,
        jax.ShapeDtypeStruct(blocks, jnp.dtype(layout.zeros)) if layout.zeros else None,
        jax.ShapeDtypeStruct((columns,), jnp.int32) if layout.order else None,
        spec.axes,
        spec.inputs,
        layout,
        activations,
        spec.resolve_dtype(dtype).name,
    ).specs()


def own_layout(spec: ParamSpec, kind: Kind) -> Layout | None:
    """What a kind makes of a parameter; None where no product takes it, or the kind leaves it.

    Groups of columns do not reach over what devices may have to divide, nor blocks of rows over
    those that others come between.
    """
    if not spec.inputs or spec.axes[0] == "vocab":
        return kind.vocabulary if spec.inputs else None
    layout, columns = kind.layout, spec.shape[-1]
    outputs = spec.shape[1 if spec.axes[0] == "experts" else 0 : -spec.inputs]
    if len(outputs) > 1:
        layout = dataclasses.replace(layout, rows=math.gcd(layout.rows, outputs[-1]))
    units = [columns]
    if spec.inputs == 1 and spec.axes[-1] != "embed":
        shards = (MOST_SHARDS, MOST_SHARDS // 2, 2, 1)  # of as many devices as can be
        units = [columns // count for count in shards if columns % count == 0]
    by_row = Layout() if layout.bits == 4 else dataclasses.replace(layout, group=0, rows=1)
    fits = [fit for unit in units if (fit := layout.fitted(unit))]
    return next((fit for fit in fits if fit.group >= KERNELS_GROUP), fits[0] if fits else by_row)


def own_layouts(specs: Tree, quantization: str) -> Layouts:
    """What a kind makes of each parameter, by its name."""
    kind = KINDS[quantization]
    found = ((path, own_layout(spec, kind)) for path, spec in named_leaves(specs))
    return {path: layout for path, layout in found if layout is not None}


def largest_made(params: Tree) -> int:
    """Bytes of the largest matrix that XLA makes numbers of to multiply with it."""
    weights = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return max((weight.made for weight in weights if isinstance(weight, Quantised)), default=0)


def widened(params: Tree) -> int:
    """Bytes of float32 numbers that XLA makes on a CPU of plain weights of 16 bits: of all at once,
    at the beginning of a step. Not those in panels, nor experts, whose turn comes one by one."""
    is_leaf = lambda leaf: not isinstance(leaf, dict | list)  # noqa: E731
    return sum(
        4 * leaf.size
        for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_leaf)
        if isinstance(leaf, jax.Array) and leaf.ndim > 1
        if leaf.dtype in (jnp.bfloat16, jnp.float16) and "experts_" not in str(path[-1])
    )


def activations_for(layout: Layout, kind: Kind) -> Activations:
    """What a kind does to activations that meet a weight of that layout: rounding to what the
    kind's own values are multiplied with is of no use to others."""
    return kind.activations if layout.values == kind.layout.values else "as_given"


def quantised_specs(
    specs: Tree, quantization: str, dtype: str, layouts: Layouts | None = None
) -> Tree:
    """The specs of a model whose weights are in a kind, by its name: in the kind's own layouts, or
    in those that are given."""
    if quantization == NONE:
        return specs
    kind = KINDS[quantization]
    given = own_layouts(specs, quantization) if layouts is None else layouts

    def of(path: str, spec: ParamSpec) -> ParamSpec | Quantised:
        layout = given.get(path)
        if layout is None:
            return spec
        return quantised_spec(spec, layout, activations_for(layout, kind), dtype)

    return map_named_specs(of, specs)


def specs_of(params: Tree, specs: Tree) -> Tree:
    """The specs of parameters that may be quantised, given those of the plain model."""

    def of(spec: ParamSpec, param: Any) -> Any:
        if not isinstance(param, Quantised):
            return spec
        return param.specs()

    return jax.tree.map(of, specs, params, is_leaf=is_spec)
