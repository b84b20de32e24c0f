"""A weight of int8 as the kernel of `matmul` reads it, whose activations are rounded to int8 too.

Instructions that add up four products at once (VNNI) take one side without a sign: weights are
stored 128 higher, and 128 times the sum of a row of x is taken off its products again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Int32

from jaxinfer.cpu_kernels.compiler import Vectors, host_has
from jaxinfer.cpu_kernels.panels import packed, unpacked
from jaxinfer.quantization.weight import Quantised
from pallas_kernels.quantised_matmul.activations import rounded
from pallas_kernels.quantised_matmul.pairs import pair_product

FOUR = 4  # neighbours of a row that are multiplied at once
ABOVE = 128  # what is stored is so much higher
MOST_COLUMNS = 1 << 16  # whose products are sure to fit into int32
FEATURES = {16: "avx512vnni", 8: "avxvnni"}  # by floats of a register


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IntegerPanels:
    """A quantised parameter [*outputs, *inputs] in the place of its `Quantised`.

    Attributes:
        values: i32 [panels, ceil(K / 4), W], each of four neighbours in a row of the flat matrix
            [N, K], 128 higher; laid out like `panels.Panels`, rows filled up to whole fours.
        scales: as the `Quantised` had them, one of each row.
        shape: the parameter's own.
        form: the `Quantised`, without arrays.
    """

    values: Any
    scales: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    form: Quantised = field(metadata={"static": True})

    @classmethod
    def of(cls, weight: Quantised, width: int, threads: ThreadPoolExecutor) -> IntegerPanels:
        """A weight in panels of `width` rows."""
        values = np.asarray(weight.values)
        matrix = fours(values.reshape(-1, math.prod(values.shape[-weight.inputs :])))
        form = dataclasses.replace(weight, values=None, scales=None)
        return cls(packed(matrix, width, threads), weight.scales, values.shape, form)

    def weight(self) -> Quantised:
        """The weight itself."""
        columns = math.prod(self.shape[-self.form.inputs :])
        matrix = unpacked(self.values, math.prod(self.shape) // columns)
        octets = np.ascontiguousarray(matrix).view(np.uint8)
        values = (octets ^ ABOVE).view(np.int8)[:, :columns]
        return dataclasses.replace(
            self.form, values=jnp.asarray(values.reshape(self.shape)), scales=self.scales
        )

    @property
    def dtype(self) -> str:
        """Of the numbers that it stands for."""
        return self.form.dtype

    @property
    def row_scales(self) -> Float[Array, " N"]:
        """Of all rows of the flat matrix."""
        return self.scales.reshape(-1).astype(jnp.float32)


def kernel_of_integers(vectors: Vectors) -> bool:
    """Whether this CPU has the instructions."""
    feature = FEATURES.get(vectors.lanes)
    return feature is not None and host_has(feature)


def takes(weight: Quantised, vectors: Vectors) -> bool:
    """Whether there is a kernel for a weight on this CPU."""
    integers = weight.layout.values == "int8" and weight.activations in ("int8", "int8_pair")
    parts = (weight.low, weight.zeros, weight.order)
    columns = math.prod(weight.shape[-weight.inputs :])
    whole = weight.block == (1, columns) and columns < MOST_COLUMNS
    whole = whole and not weight.experts and all(part is None for part in parts)
    return kernel_of_integers(vectors) and integers and whole


def fours(values: Int8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N K4"]:
    """Four neighbours in one number, as a panel has them."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % FOUR)))
    return (padded.view(np.uint8) ^ ABOVE).view(np.int32)


def multiply_integers(x: Float[Array, "T K"], weight: IntegerPanels) -> Float[Array, "T N"]:
    """x, rounded, times the transposed matrix in float32, over its flat outputs: to the bit what
    `quantised_matmul` makes of it in plain jax."""
    dot = functools.partial(_dot, weight)
    scales, activations = weight.row_scales, weight.form.activations
    if activations == "int8_pair":
        return pair_product(x, dot, scales)
    taken = rounded(x, activations)
    assert taken.scales is not None
    return dot(taken.values).astype(jnp.float32) * scales[None] * taken.scales[:, None]


def _dot(weight: IntegerPanels, x: Int8[Array, "R K"]) -> Int32[Array, "R N"]:
    from jaxinfer.cpu_kernels.matmul import multiply  # which needs LLVM

    rows, columns = x.shape
    sums = jnp.sum(x.astype(jnp.int32), axis=1)
    groups = jnp.pad(x, ((0, 0), (0, -columns % FOUR))).reshape(rows, -1, FOUR)
    product = multiply(lax.bitcast_convert_type(groups, jnp.int32), weight.values)
    return product[:, : weight.scales.size] - ABOVE * sums[:, None]


def rows_of_integers(table: IntegerPanels, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of a table [V, D], in its dtype."""
    width = table.values.shape[2]
    place = table.values.at[tokens // width, :, tokens % width]
    groups = place.get(mode="promise_in_bounds")
    values = lax.bitcast_convert_type(groups, jnp.uint8).reshape(tokens.shape[0], -1)
    numbers = values[:, : table.shape[-1]].astype(jnp.float32) - ABOVE
    scales = table.row_scales.at[tokens].get(mode="promise_in_bounds")
    return (numbers * scales[:, None]).astype(table.dtype)
