"""Functions of vectors of floats, and of the entries of one."""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import F32, I32, Emitter

SMALLEST = -87.0  # below, an exponential is 0: it would be no normal float
TERMS = 7  # of Taylor's series: up to half of ln 2, what is left out is below a float's precision
# ln 2 as a sum, of which whole multiples of the first are exact.
LN2_HIGH = 0.693359375
LN2_LOW = math.log(2) - LN2_HIGH


def exponential(e: Emitter, x: ir.Value) -> ir.Value:
    """exp(x) of entries of at most 88, within two units in the last place; of NaN, NaN."""
    lanes = x.type.count

    def all_of(value: float) -> ir.Constant:
        return ir.Constant(x.type, [value] * lanes)

    bounded = e.maximum(x, all_of(SMALLEST))
    twos = e.intrinsic("llvm.rint", x.type, e.fmul(bounded, all_of(1 / math.log(2))))
    rest = e.multiply_add(twos, all_of(-LN2_HIGH), bounded)
    rest = e.multiply_add(twos, all_of(-LN2_LOW), rest)
    value = all_of(1 / math.factorial(TERMS))
    for power in range(TERMS - 1, -1, -1):
        value = e.multiply_add(value, rest, all_of(1 / math.factorial(power)))
    whole = ir.VectorType(I32, lanes)
    exponent = e.add(e.fptosi(twos, whole), ir.Constant(whole, [127] * lanes))
    power = e.bitcast(e.shl(exponent, ir.Constant(whole, [23] * lanes)), x.type)
    tiny = e.fcmp_ordered("<", x, all_of(SMALLEST))
    found = e.select(tiny, all_of(0.0), e.fmul(value, power))
    return e.select(e.fcmp_unordered("uno", x, x), x, found)  # whose exponent is anything


def hyperbolic_tangent(e: Emitter, x: ir.Value) -> ir.Value:
    """tanh(x): 1 - 2 / (exp(2x) + 1), of entries whose exponential is finite."""
    lanes = x.type.count
    one, two, most = (ir.Constant(x.type, [v] * lanes) for v in (1.0, 2.0, 40.0))
    doubled = e.minimum(e.fmul(x, two), most)
    return e.fsub(one, e.fdiv(two, e.fadd(exponential(e, doubled), one)))


def total(e: Emitter, x: ir.Value) -> ir.Value:
    """The sum of a vector's entries, halves added to halves."""
    return _folded(e, x, e.fadd)


def totals(e: Emitter, vector: Callable[[int], ir.Value], lanes: int) -> ir.Value:
    """The sums of `lanes` vectors, each in its own lane and added up as by `total`.

    Two vectors are halved into one, as they come, so that few are in registers.
    """

    def halved(first: int, span: int) -> ir.Value:
        if span == lanes:
            return vector(first)
        pair = halved(first, 2 * span), halved(first + span, 2 * span)
        low, high = exchanged(e, pair, span)
        return e.fadd(low, high)

    return halved(0, 1)


def exchanged(e: Emitter, pair: tuple[ir.Value, ir.Value], span: int) -> tuple[ir.Value, ir.Value]:
    """Two vectors seen as blocks of `span` entries: those at even places of both, and at odd."""
    lanes = pair[0].type.count
    even = [i if not i & span else i - span + lanes for i in range(lanes)]
    masks = (
        ir.Constant(ir.VectorType(I32, lanes), [place + odd for place in even]) for odd in (0, span)
    )
    low, high = (e.shuffle_vector(*pair, mask) for mask in masks)
    return low, high


def largest(e: Emitter, x: ir.Value) -> ir.Value:
    """The largest entry of a vector."""
    return _folded(e, x, e.maximum)


def _folded(e: Emitter, x: ir.Value, combine: object) -> ir.Value:
    assert callable(combine)
    count = x.type.count
    while count > 1:
        count //= 2
        halves = (
            e.shuffle_vector(
                x, x, ir.Constant(ir.VectorType(I32, count), list(range(i, i + count)))
            )
            for i in (0, count)
        )
        x = combine(*halves)
    return e.extract_element(x, ir.Constant(I32, 0)) if x.type != F32 else x
