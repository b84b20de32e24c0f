"""Grouped products in plain jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import QuantisedWeight, dequantise, quantised_matmul
from pallas_kernels.quantised_matmul.activations import rounded

Weights = Float[Array, "E N K"] | QuantisedWeight

FEWEST_TILE_ROWS, MOST_TILE_ROWS = 8, 128


def tile_rows(rows: int, experts: int) -> int:
    """Rows of one product: the power of two above an expert's mean share. Less work is wasted on
    experts with few rows, and weights are read once for most of the others."""
    share = 1 << (rows // experts).bit_length()
    return min(max(share, FEWEST_TILE_ROWS), MOST_TILE_ROWS, rows)


def most_tiles(rows: int, experts: int, height: int) -> int:
    """Tiles of at most `height` rows of one expert that any division of the rows could need."""
    return (rows + min(experts, rows) * (height - 1)) // height


def segments(
    x: Float[Array, "R K"],
    weights: Weights,
    group_sizes: Int[Array, " E"],
    *,
    static: bool = False,
) -> Float[Array, "R N"]:
    """A loop over tiles of at most `tile_rows` rows of one expert: over those there are, or, where
    a device cannot decide how long to go on, over as many as there could be."""
    rows, (experts, width, _) = x.shape[0], weights.shape
    height = tile_rows(rows, experts)
    ends = jnp.cumsum(group_sizes)
    tiles = -(-group_sizes // height)
    last_tiles = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, height), (0, 0)))

    def tile(i: Int[Array, ""], out: Float[Array, "R2 N"]) -> Float[Array, "R2 N"]:
        expert = jnp.sum(last_tiles <= i)
        within = i - (last_tiles[expert] - tiles[expert])
        first = ends[expert] - group_sizes[expert] + within * height
        first = jnp.where(expert < experts, first, rows)  # past all: nobody's rows
        part = lax.dynamic_slice_in_dim(padded, first, height, axis=0)
        matrix = jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(array, expert, axis=0, keepdims=False), weights
        )
        product = _product(part, matrix)
        # A tile may overrun its expert's rows: those of the next tile overwrite them, and what is
        # past the last one is cut off or masked.
        return lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), first, axis=0)

    turns = most_tiles(rows, experts, height) if static else last_tiles[-1]
    out = lax.fori_loop(0, turns, tile, jnp.zeros((rows + height, width), x.dtype))
    return jnp.where((jnp.arange(rows) < ends[-1])[:, None], out[:rows], 0)


def _product(
    x: Float[Array, "R K"], matrix: Float[Array, "N K"] | QuantisedWeight
) -> Float[Array, "R N"]:
    if isinstance(matrix, QuantisedWeight):
        return quantised_matmul(x, matrix, implementation="reference", out_dtype=jnp.float32)
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def ragged(
    x: Float[Array, "R K"], weights: Weights, group_sizes: Int[Array, " E"]
) -> Float[Array, "R N"]:
    """XLA's ragged product, of numbers: rows and weights that are rounded are so before."""
    dtype = x.dtype
    if isinstance(weights, QuantisedWeight):
        taken = rounded(x, weights.activations)
        if taken.scales is not None:
            values = taken.values.astype(jnp.float32) * taken.scales[:, None]
            x = taken.total(values)
        weights = dequantise(weights, x.dtype)
    product = lax.ragged_dot(
        x, weights.swapaxes(1, 2), group_sizes, preferred_element_type=jnp.float32
    )
    inside = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(inside[:, None], product, 0).astype(dtype)
