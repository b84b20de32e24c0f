"""Online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867), a page of scores a turn."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import F32, I32, I64, Emitter, number
from jaxinfer.cpu_kernels.vector_math import exponential, hyperbolic_tangent, largest, total

MASKED = -1e30  # a score that no key has, and a sink that takes no share


class Rows(NamedTuple):
    """Addresses of what is known of rows of queries so far.

    Attributes:
        top: the largest score of each, or its sink.
        sum: of exp(score - top), the sink's own among them.
        values: those that were attended to, weighted so, `value_dim` floats a row.
    """

    top: ir.Value
    sum: ir.Value
    values: ir.Value


def begin(e: Emitter, rows: Rows, row: ir.Value, sink: ir.Value, dim: int, lanes: int) -> None:
    """A row that has seen nothing but its sink."""
    e.store(sink, e.at(rows.top, row))
    e.store(ir.Constant(F32, 1.0), e.at(rows.sum, row))
    nothing = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    for i in range(0, dim, lanes):
        e.write_vector(nothing, rows.values, e.add(e.mul(row, number(dim)), number(i)))


def weigh(
    e: Emitter,
    scores: ir.Value,
    size: int,
    seen: tuple[ir.Value, ir.Value],
    soft_cap: float,
    rows: Rows,
    row: ir.Value,
    lanes: int,
) -> ir.Value:
    """Make weights of a page's scores of a row; what the row's values decay by, in every lane.

    Of the `size` keys those from `seen[0]` to before `seen[1]` are seen. A row that sees none yet
    takes up junk, which decays to nothing when it sees one.
    """
    kind = ir.VectorType(F32, lanes)
    best = e.variable(kind)
    e.store(ir.Constant(kind, [MASKED] * lanes), best)
    places = ir.Constant(ir.VectorType(I64, lanes), list(range(lanes)))
    first, end = (e.splat(bound, lanes) for bound in seen)
    for i in range(0, size, lanes):
        score = e.read_vector(scores, i, lanes)
        if soft_cap:
            cap = ir.Constant(kind, [soft_cap] * lanes)
            score = e.fmul(hyperbolic_tangent(e, e.fdiv(score, cap)), cap)
        place = e.add(e.splat(number(i), lanes), places)
        visible = e.and_(e.icmp_signed(">=", place, first), e.icmp_signed("<", place, end))
        score = e.select(visible, score, ir.Constant(kind, [MASKED] * lanes))
        e.write_vector(score, scores, i)
        e.store(e.maximum(e.load(best, typ=kind), score), best)
    old = e.read(rows.top, row)
    top = e.maximum(old, largest(e, e.load(best, typ=kind)))
    decay = exponential(e, e.splat(e.fsub(old, top), lanes))
    e.store(top, e.at(rows.top, row))
    tops, sums = e.splat(top, lanes), ir.Constant(kind, [0.0] * lanes)
    for i in range(0, size, lanes):
        weight = exponential(e, e.fsub(e.read_vector(scores, i, lanes), tops))
        e.write_vector(weight, scores, i)
        sums = e.fadd(sums, weight)
    kept = e.fmul(e.read(rows.sum, row), e.extract_element(decay, ir.Constant(I32, 0)))
    e.store(e.fadd(kept, total(e, sums)), e.at(rows.sum, row))
    return decay


def finish(e: Emitter, rows: Rows, row: ir.Value, out: ir.Value, dim: int, lanes: int) -> None:
    """Write what a row attended to."""
    share = e.splat(e.fdiv(ir.Constant(F32, 1.0), e.read(rows.sum, row)), lanes)
    for i in range(0, dim, lanes):
        value = e.read_vector(rows.values, e.add(e.mul(row, number(dim)), number(i)), lanes)
        e.write_vector(e.fmul(value, share), out, i)
