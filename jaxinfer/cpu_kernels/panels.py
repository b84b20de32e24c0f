"""A weight as the kernel of `matmul` reads it: from one end to the other."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

PANELS_AT_ONCE = 16  # that a thread copies
ALIGNED = 64  # bytes
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
        rows = math.prod(self.shape) // self.values.shape[1]
        return unpacked(self.values, rows).reshape(self.shape)


def packed(
    matrix: Num[np.ndarray, "N K"], width: int, threads: ThreadPoolExecutor
) -> Num[Array, "P K W"]:
    """A matrix in panels of `width` rows."""
    rows, columns = matrix.shape
    count = -(-rows // width)
    panels = _zeros((count, columns, width), matrix.dtype)

    def copy(first: int) -> None:
        for i in range(first, min(first + PANELS_AT_ONCE, count)):
            part = matrix[i * width : (i + 1) * width]
            panels[i, :, : len(part)] = part.T

    list(threads.map(copy, range(0, count, PANELS_AT_ONCE)))
    return jax.device_put(panels, may_alias=True)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Num[np.ndarray, ...]:
    """Aligned as JAX has its arrays, which then need not be copied."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    octets = np.zeros(size + ALIGNED, np.uint8)
    start = -octets.ctypes.data % ALIGNED
    return octets[start : start + size].view(dtype).reshape(shape)


def unpacked(panels: Num[Any, "P K W"], rows: int) -> Num[np.ndarray, "N K"]:
    """The matrix of so many rows that lies in panels."""
    count, columns, width = panels.shape
    return np.asarray(panels).swapaxes(1, 2).reshape(count * width, columns)[:rows]


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
