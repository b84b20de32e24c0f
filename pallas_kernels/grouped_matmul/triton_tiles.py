"""Which rows each program of a grouped product takes, found on the device in one launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.grouped_matmul.reference import most_tiles

TILES = 16  # of one program


def tile_table(
    group_sizes: Int[Array, " E"], rows: int, height: int, *, interpret: bool = False
) -> Int[Array, "tiles 3"]:
    """(expert, first row, rows) of every tile: at most `height` rows of one expert.

    Rows past the groups' sum are those of expert E, which has no weights. There are as many tiles
    as any division of so many rows could need; those it does not need have no rows.
    """
    most = most_tiles(rows, group_sizes.shape[0] + 1, height)
    return pl.pallas_call(
        functools.partial(_kernel, rows, height),
        grid=(pl.cdiv(most, TILES),),
        out_shape=jax.ShapeDtypeStruct((most, 3), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tiles_of_experts",
    )(group_sizes)


def _kernel(rows: int, height: int, group_sizes: Any, table: Any) -> None:
    experts, most = group_sizes.shape[0], table.shape[0]
    group = jnp.arange(1 << experts.bit_length())  # at least one more than there are experts
    sizes = plgpu.load(group_sizes.at[group], mask=group < experts, other=0)
    sizes = jnp.where(group == experts, rows - jnp.sum(sizes), sizes)
    counts = pl.cdiv(sizes, height)
    ends, last_tiles = jnp.cumsum(sizes), jnp.cumsum(counts)
    # Where a group's first tile would begin, were it tile 0.
    offsets = ends - sizes - (last_tiles - counts) * height
    tile = pl.program_id(0) * TILES + jnp.arange(TILES)
    before = (last_tiles[None, :] <= tile[:, None]).astype(jnp.int32)
    expert = jnp.minimum(jnp.sum(before, axis=1), experts)
    mine = group[None, :] == expert[:, None]

    def of_mine(values: Int[Array, " E2"]) -> Int[Array, " tiles"]:
        return jnp.sum(jnp.where(mine, values[None, :], 0), axis=1)

    first = of_mine(offsets) + tile * height
    count = jnp.clip(of_mine(ends) - first, 0, height)  # none where all groups' tiles are before
    for column, values in enumerate((expert, first, count)):
        plgpu.store(table.at[tile, jnp.full(TILES, column)], values, mask=tile < most)
