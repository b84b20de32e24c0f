"""A few rows times a matrix whose rows are contiguous: what registers hold the sums of."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import BYTE, F32, I32, I64, POINTER, Emitter, number

UNROLLED = 4  # rows of the matrix in a turn of the innermost loop
LINE = 64  # bytes that come from memory at once


class Tile(NamedTuple):
    """Arguments of a call: addresses, and sizes in numbers.

    Attributes:
        x: the rows, `stride` apart, each of `depth` floats, or fours of integers.
        matrix: [depth, columns].
        ahead: what will be read next, and is fetched meanwhile, `lines` of it a turn.
        out: the rows of the result, `width` apart.
    """

    x: ir.Value
    matrix: ir.Value
    ahead: ir.Value
    out: ir.Value
    depth: ir.Value
    stride: ir.Value
    width: ir.Value
    lines: ir.Value


def tile(
    module: ir.Module,
    rows: int,
    wide: int,
    lanes: int,
    columns: int,
    dtype: str = "float32",
    adds: bool = False,
    fetches: bool = False,
) -> ir.Function:
    """A function of a `Tile`: `rows` rows times `wide` registers of the columns of a matrix, which
    has `columns` of `dtype`.

    Sums stay in registers over all of the depth, each made in the order of it. `adds`: they begin
    with what the result holds.
    """
    name = f"tile_{rows}_{wide}_{columns}{'_adds' if adds else ''}"
    e = Emitter(module, name, [POINTER] * 4 + [I64] * 4)
    integers = dtype == "int8"
    number_kind = I32 if integers else F32
    given, kind = Tile(*e.arguments), ir.VectorType(number_kind, lanes)
    add = e.add_fours if integers else lambda total, w, x: e.multiply_add(x, w, total)
    sums = [[e.variable(kind) for _ in range(wide)] for _ in range(rows)]
    starts = [e.at(given.x, e.mul(given.stride, number(row))) for row in range(rows)]
    results = [e.at(given.out, e.mul(given.width, number(row))) for row in range(rows)]
    nothing = ir.Constant(kind, None)
    for result, places in zip(results, sums, strict=True):
        for i, place in enumerate(places):
            e.store(e.read_vector(result, lanes * i, lanes) if adds else nothing, place)

    def column(k: ir.Value) -> None:
        base = e.mul(k, number(columns))
        places = [e.add(base, number(lanes * i)) for i in range(wide)]
        weights = [e.read_vector(given.matrix, place, lanes, dtype) for place in places]
        for start, row in zip(starts, sums, strict=True):
            entry = e.splat(e.read(start, k, number_kind), lanes)
            for weight, place in zip(weights, row, strict=True):
                e.store(add(e.load(place, typ=kind), weight, entry), place)

    whole = e.sub(given.depth, e.srem(given.depth, number(UNROLLED)))
    with e.each(number(0), whole, UNROLLED) as k:
        if fetches:
            fetch_lines(e, given.ahead, e.sdiv(k, number(UNROLLED)), given.lines)
        for i in range(UNROLLED):
            column(e.add(k, number(i)))
    with e.each(whole, given.depth) as k:
        column(k)
    for result, places in zip(results, sums, strict=True):
        for i, place in enumerate(places):
            e.write_vector(e.load(place, typ=kind), result, lanes * i)
    e.ret_void()
    return e.emitted


def fetch_lines(e: Emitter, ahead: ir.Value, turn: ir.Value, lines: ir.Value) -> None:
    """Ask for the lines of a turn: so many, behind those of all turns before."""
    first = e.mul(turn, lines)
    with e.each(number(0), lines) as i:
        e.fetch(e.at(ahead, e.mul(e.add(first, i), number(LINE)), BYTE))
