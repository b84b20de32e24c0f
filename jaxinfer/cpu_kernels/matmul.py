"""Products of rows with float32 weights that lie in panels: see `panels`.

A sum is made in one lane of a register, in the order of the columns, whatever the number of rows: a
row's result does not depend on its neighbours. A panel is read once for as many rows as registers
hold sums of, and is in the CPU's cache for those that follow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jaxinfer.cpu_kernels import xla_call
from jaxinfer.cpu_kernels.compiler import Vectors, vectors
from jaxinfer.cpu_kernels.emit import I64, Emitter, number
from jaxinfer.cpu_kernels.tiles import Tile, tile
from jaxinfer.cpu_kernels.xla_call import Buffer

PIECES = 8  # that all panels are divided into: a thread takes one after the other
AHEAD = 2048  # floats between what is read of a panel and what is fetched: memory answers late


def multiply(x: Float[Array, "T K"], panels: Float[Array, "P K W"]) -> Float[Array, "T PW"]:
    """x times all columns of the panels, side by side."""
    count, _, width = panels.shape
    result = jax.ShapeDtypeStruct((x.shape[0], count * width), jnp.float32)
    return jax.ffi.ffi_call(register(), result)(x, panels)


@xla_call.once
def register() -> str:
    """Make the kernel known to XLA, which compiles it; its name there."""
    found = vectors()
    assert found is not None
    name, module = f"jaxinfer_matmul_{found.lanes}", ir.Module("matmul")
    width = found.panel
    tiles = [
        tile(module, rows, found.wide, found.lanes, width, fetches=True)
        for rows in range(1, found.rows + 1)
    ]
    compute = functools.partial(_piece, tiles, found)
    xla_call.register(name, module, (2, 3, 2), 1, lambda e, _: number(PIECES), compute)
    return name


def _piece(
    tiles: list[ir.Function],
    found: Vectors,
    e: Emitter,
    buffers: Sequence[Buffer],
    item: ir.Value,
) -> None:
    """All rows times consecutive panels."""
    x, panels, out = buffers
    count, depth = panels.shape[0], x.shape[1]
    first, last = (e.sdiv(e.mul(e.add(item, number(i)), count), number(PIECES)) for i in range(2))
    with e.each(first, last) as i:
        panel = e.at(panels.data, e.mul(i, e.mul(depth, number(found.panel))))
        columns = e.at(out.data, e.mul(i, number(found.panel)))
        _panel(tiles, found, e, x, panel, Buffer(columns, out.shape))


def _panel(
    tiles: list[ir.Function], found: Vectors, e: Emitter, x: Buffer, panel: ir.Value, out: Buffer
) -> None:
    """All rows times one panel, in tiles of nearly equal height."""
    (rows, depth), width, most = x.shape, out.shape[1], number(found.rows)
    far = number(AHEAD)
    beyond = e.at(panel, e.add(e.mul(depth, number(found.panel)), far))
    first, height = e.variable(I64), e.variable(I64)
    e.store(number(0), first)
    with e.as_long_as(lambda: e.icmp_signed("<", e.load(first, typ=I64), rows)):
        row = e.load(first, typ=I64)
        left = e.sub(rows, row)
        turns = e.sdiv(e.add(left, e.sub(most, number(1))), most)
        e.store(e.sdiv(e.sub(e.add(left, turns), number(1)), turns), height)
        # The first tile waits for its own panel, the second has time to fetch the next one.
        begins = e.icmp_signed("==", row, number(0))
        second = e.icmp_signed("<=", row, most)
        ahead = e.select(begins, e.at(panel, far), e.select(second, beyond, panel))
        start, place = e.at(x.data, e.mul(row, depth)), e.at(out.data, e.mul(row, width))
        e.store(e.add(row, e.load(height, typ=I64)), first)
        given = Tile(start, panel, ahead, place, depth, depth, width)
        e.call_one_of(tiles, e.sub(e.load(height, typ=I64), number(1)), given)
