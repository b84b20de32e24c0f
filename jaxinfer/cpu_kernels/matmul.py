"""Products of rows with weights that lie in panels: see `panels` and `integer_panels`. Sums are in
float32, of integers in int32.

A sum is made in one lane of a register, in the order of the columns, whatever the number of rows: a
row's result does not depend on its neighbours. A panel is read once for as many rows as registers
hold sums of, and is in the CPU's cache for those that follow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num
from llvmlite import ir

from jaxinfer.cpu_kernels import xla_call
from jaxinfer.cpu_kernels.compiler import Vectors, vectors
from jaxinfer.cpu_kernels.emit import BYTE, I64, SIZES, STORED, Emitter, number
from jaxinfer.cpu_kernels.tiles import LINE, UNROLLED, Tile, tile
from jaxinfer.cpu_kernels.xla_call import Buffer

# A thread takes one piece of the panels after the other, for a block of rows. Few rows wait for
# panels, which lie in a row in a piece; with many, threads should end together.
PIECES, MANY_ROWS = 8, 64
BLOCK = 128  # rows that stay in the CPU's cache beside a panel
AHEAD = 2048  # numbers between what is read of a panel and what is fetched: memory answers late


class Product(NamedTuple):
    """What a kernel is made of.

    Attributes:
        dtype: of the panels.
        vectors: what it computes with.
        tiles: products of 1, 2, … rows with a panel.
    """

    dtype: str
    vectors: Vectors
    tiles: list[ir.Function]

    @property
    def lines(self) -> int:
        """Of a panel, in a turn of a tile."""
        numbers = UNROLLED * self.vectors.panel
        return max(1, numbers * SIZES[self.dtype] // LINE)

    def at(self, e: Emitter, panel: ir.Value, index: ir.Value) -> ir.Value:
        """The address of a number of a panel."""
        return e.at(panel, index, STORED[self.dtype])


def multiply(x: Num[Array, "T K"], panels: Num[Array, "P K W"]) -> Num[Array, "T PW"]:
    """float32 x times all columns of the panels, side by side; int32 x, of four int8 in each, times
    fours of integers in int32."""
    count, _, width = panels.shape
    result = jax.ShapeDtypeStruct((x.shape[0], count * width), x.dtype)
    stored = "int8" if x.dtype == jnp.int32 else panels.dtype.name
    return jax.ffi.ffi_call(register(stored), result)(x, panels)


def register(dtype: str) -> str:
    """Make the kernel for panels of `dtype` known to XLA, which compiles it; its name there."""
    return _registered(dtype)()


@functools.cache
def _registered(dtype: str) -> xla_call.Named:
    @xla_call.once
    def register() -> str:
        found = vectors()
        assert found is not None
        name, module = f"jaxinfer_matmul_{dtype}_{found.lanes}", ir.Module("matmul")
        tiles = [
            tile(module, rows, found.wide, found.lanes, found.panel, dtype, fetches=True)
            for rows in range(1, found.rows + 1)
        ]
        compute = functools.partial(_piece, Product(dtype, found, tiles))
        xla_call.register(name, module, (2, 3, 2), 1, _items, compute)
        return name

    return register


def _pieces(e: Emitter, x: Buffer, panels: Buffer) -> ir.Value:
    """How many pieces the panels are taken in."""
    many = e.icmp_signed(">", x.shape[0], number(MANY_ROWS))
    return e.select(many, panels.shape[0], number(PIECES))


def _blocks(e: Emitter, x: Buffer) -> ir.Value:
    """How many blocks of rows there are."""
    return e.sdiv(e.add(x.shape[0], number(BLOCK - 1)), number(BLOCK))


def _items(e: Emitter, buffers: Sequence[Buffer]) -> ir.Value:
    """Pieces of the panels, each for every block of rows."""
    return e.mul(_pieces(e, *buffers[:2]), _blocks(e, buffers[0]))


def _piece(product: Product, e: Emitter, buffers: Sequence[Buffer], item: ir.Value) -> None:
    """A block of rows times consecutive panels."""
    x, panels, out = buffers
    (count, depth, _), width = panels.shape, out.shape[1]
    pieces, blocks = _pieces(e, x, panels), _blocks(e, x)
    piece, row = e.sdiv(item, blocks), e.mul(e.srem(item, blocks), number(BLOCK))
    left = e.sub(x.shape[0], row)
    rows = e.select(e.icmp_signed("<", left, number(BLOCK)), left, number(BLOCK))
    block = Buffer(e.at(x.data, e.mul(row, depth)), (rows, depth))
    first, last = (e.sdiv(e.mul(e.add(piece, number(i)), count), pieces) for i in range(2))
    side = number(product.vectors.panel)
    with e.each(first, last) as i:
        panel = product.at(e, panels.data, e.mul(i, e.mul(depth, side)))
        columns = e.at(out.data, e.add(e.mul(row, width), e.mul(i, side)))
        _panel(product, e, block, panel, Buffer(columns, out.shape))


def _panel(product: Product, e: Emitter, x: Buffer, panel: ir.Value, out: Buffer) -> None:
    """All rows times one panel, in tiles of nearly equal height, each of which fetches its part of
    the next panel; one alone of what lies ahead of it."""
    (rows, depth), width, most = x.shape, out.shape[1], number(product.vectors.rows)
    tiles = e.sdiv(e.add(rows, e.sub(most, number(1))), most)
    lines = e.sdiv(e.add(number(product.lines - 1), tiles), tiles)
    part = e.mul(e.mul(lines, number(LINE)), e.sdiv(depth, number(UNROLLED)))
    beyond = product.at(e, panel, e.mul(depth, number(product.vectors.panel)))
    alone = e.icmp_signed("==", tiles, number(1))
    next_panel = e.select(alone, product.at(e, panel, number(AHEAD)), beyond)
    first, height = e.variable(I64), e.variable(I64)
    e.store(number(0), first)
    with e.each(number(0), tiles) as i:
        row = e.load(first, typ=I64)
        left, turns = e.sub(rows, row), e.sub(tiles, i)
        e.store(e.sdiv(e.sub(e.add(left, turns), number(1)), turns), height)
        ahead = e.at(next_panel, e.mul(i, part), BYTE)
        start, place = e.at(x.data, e.mul(row, depth)), e.at(out.data, e.mul(row, width))
        e.store(e.add(row, e.load(height, typ=I64)), first)
        given = Tile(start, panel, ahead, place, depth, depth, width, lines)
        e.call_one_of(product.tiles, e.sub(e.load(height, typ=I64), number(1)), given)
