"""A weight as the kernel of `matmul` reads it: from one end to the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.params import ParamSpec, Tree, is_spec

PANELS_AT_ONCE = 16  # that a thread copies
STORED = ("float32", "bfloat16", "float16")  # what kernels read


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A parameter [*outputs, *inputs] in the place of its array.

    Attributes:
        values: [panels, K, W]: W rows of the flat matrix [N, K] side by side, column by column;
            the last panel is filled up with zeros.
        shape: the parameter's own.
    """

    values: Any
    shape: tuple[int, ...] = field(default=(), metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        return self.values.dtype

    def array(self) -> Float[np.ndarray, "*shape"]:
        """The parameter itself."""
        count, columns, width = self.values.shape
        rows = np.asarray(self.values).swapaxes(1, 2).reshape(count * width, columns)
        return rows[: math.prod(self.shape) // columns].reshape(self.shape)


def in_panels(params: Tree, specs: Tree, width: int) -> Counter[str]:
    """Put the weights of products, but for those of experts and quantised ones, into panels of
    `width`; how many there were of each dtype.

    One after the other in the place of its array, so that both are in memory of one weight only.
    """
    counts = Counter[str]()
    with ThreadPoolExecutor() as threads:
        for place, key, spec in _places(params, specs):
            array = place[key]
            taken = spec.inputs and spec.axes[0] != "experts"
            if taken and isinstance(array, jax.Array) and array.dtype.name in STORED:
                matrix = np.asarray(array).reshape(-1, math.prod(spec.shape[-spec.inputs :]))
                del array
                place[key] = Panels(jnp.asarray(_packed(matrix, width, threads)), spec.shape)
                counts[matrix.dtype.name] += 1
    return counts


def without_panels(params: Tree) -> Tree:
    """A tree of its own in which arrays are in the place of panels."""

    def of(leaf: Any) -> Any:
        return jnp.asarray(leaf.array()) if isinstance(leaf, Panels) else leaf

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Panels))


def _places(params: Tree, specs: Tree) -> Iterator[tuple[Any, Any, ParamSpec]]:
    """The dict or list and the key in it of every parameter, and its spec."""
    for key in specs if isinstance(specs, dict) else range(len(specs)):
        if is_spec(specs[key]):
            yield params, key, specs[key]
        else:
            yield from _places(params[key], specs[key])


def _packed(
    matrix: Float[np.ndarray, "N K"], width: int, threads: ThreadPoolExecutor
) -> Float[np.ndarray, "P K W"]:
    rows, columns = matrix.shape
    count = -(-rows // width)
    panels = np.zeros((count, columns, width), matrix.dtype)

    def copy(first: int) -> None:
        for i in range(first, min(first + PANELS_AT_ONCE, count)):
            part = matrix[i * width : (i + 1) * width]
            panels[i, :, : len(part)] = part.T

    list(threads.map(copy, range(0, count, PANELS_AT_ONCE)))
    return panels


def multiply_panels(x: Float[Array, "T K"], weight: Panels) -> Float[Array, "T N"]:
    """x times the transposed matrix in float32, over its flat outputs."""
    from jaxinfer.cpu_kernels.matmul import multiply  # which needs LLVM

    columns = math.prod(weight.shape) // x.shape[1]
    product = multiply(x.astype(jnp.float32), weight.values)
    return product if product.shape[1] == columns else product[:, :columns]


def rows_of_panels(table: Panels, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table [V, D]."""
    width = table.values.shape[2]
    return table.values.at[tokens // width, :, tokens % width].get(mode="promise_in_bounds")
