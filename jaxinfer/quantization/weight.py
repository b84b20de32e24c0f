"""A parameter of products stored in few bits, in the place of the array that it stands for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.params import ParamSpec, Tree, is_spec, map_specs
from jaxinfer.quantization.kinds import KINDS, NONE, Activations, Kind
from pallas_kernels.quantised_matmul import QuantisedWeight, quantised_matmul
from pallas_kernels.quantised_matmul.activations import PAIR


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """(values + low / 254) * scales, as a node of the parameters' tree.

    Its leaves are arrays, their structs, or their `ParamSpec`s: what holds for a parameter holds
    for each of them.

    Attributes:
        values: int8 in the parameter's own shape [*outputs, *inputs], or [E, *outputs, *inputs].
        scales: float32 of every output, [*outputs] or [E, *outputs].
        low: int8 like `values`, the second term; None: there is none.
        inputs: how many trailing axes a product sums over.
        experts: the first axis is of experts, each with a matrix of its own.
        activations: see `kinds.Kind`.
        dtype: of the numbers that it stands for.
    """

    values: Any
    scales: Any
    low: Any = None
    inputs: int = field(default=1, metadata={"static": True})
    experts: bool = field(default=False, metadata={"static": True})
    activations: Activations = field(default="as_given", metadata={"static": True})
    dtype: str = field(default="float32", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return self.values.shape

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes that a product has of it."""
        return self.shape[1 if self.experts else 0 : -self.inputs]

    @property
    def terms(self) -> list[QuantisedWeight]:
        """Matrices [N, K], or [E, N, K], that add up to it."""
        lead = self.shape[:1] if self.experts else ()
        columns = math.prod(self.shape[-self.inputs :])
        scales = self.scales.reshape(*lead, 1, -1)
        parts = [(self.values, scales)]
        if self.low is not None:
            parts.append((self.low, scales / PAIR))
        return [
            QuantisedWeight(
                values.reshape(*lead, -1, columns),
                scale,
                block=(1, columns),
                activations=self.activations,
            )
            for values, scale in parts
        ]


def multiply(x: Float[Array, "T K"], weight: Quantised, out_dtype: Any) -> Float[Array, "T N"]:
    """x times the transposed matrix that the weight stands for, over its flat outputs."""
    products = [
        quantised_matmul(x, term, implementation="reference", out_dtype=jnp.float32)
        for term in weight.terms
    ]
    return sum(products[1:], start=products[0]).astype(out_dtype)


def rows_of(table: Quantised, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table [V, D], in its dtype."""

    def take(array: Array) -> Array:
        return array.at[tokens].get(mode="promise_in_bounds")

    rows = take(table.values).astype(jnp.float32)
    if table.low is not None:
        rows = rows + take(table.low).astype(jnp.float32) / PAIR
    return (rows * take(table.scales)[:, None]).astype(table.dtype)


def quantised_spec(spec: ParamSpec, kind: Kind, dtype: str) -> ParamSpec | Quantised:
    """The parts of a parameter in a kind; the parameter itself where no product takes it."""
    if not spec.inputs:
        return spec
    values = dataclasses.replace(spec, dtype="int8", inputs=0)
    scales = ParamSpec(spec.shape[: -spec.inputs], spec.axes[: -spec.inputs], "ones", "float32")
    return Quantised(
        values,
        scales,
        values if kind.terms == 2 else None,
        spec.inputs,
        spec.axes[0] == "experts",
        kind.activations,
        spec.resolve_dtype(dtype).name,
    )


def quantised_specs(specs: Tree, quantization: str, dtype: str) -> Tree:
    """The specs of a model whose weights are in a kind, by its name."""
    if quantization == NONE:
        return specs
    kind = KINDS[quantization]
    return map_specs(lambda spec: quantised_spec(spec, kind, dtype), specs)


def specs_of(params: Tree, specs: Tree) -> Tree:
    """The specs of parameters that may be quantised, given those of the plain model."""

    def of(spec: ParamSpec, param: Any) -> Any:
        if not isinstance(param, Quantised):
            return spec
        kind = Kind(1 if param.low is None else 2, param.activations, (), "")
        return quantised_spec(spec, kind, param.dtype)

    return jax.tree.map(of, specs, params, is_leaf=is_spec)
