"""The kernel of decode attention: one query of each head."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import F32, I32, I64, STORED, Emitter, number
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.softmax import Rows, begin, finish, weigh
from jaxinfer.cpu_kernels.vector_math import total
from jaxinfer.cpu_kernels.xla_call import Buffer


def decode_row(heads: Heads, e: Emitter, buffers: Sequence[Buffer], item: ir.Value) -> None:
    """Attention of one sequence's group of heads, page by page.

    The buffers are queries times the scale [S, KV, G, hd], pages of keys and of values, the page
    table [S, W], the first key that each row sees, the end of its keys, sinks, and the result.
    """
    q, k, v, table, firsts, ends, sinks, out = buffers
    lanes, size, dim = heads.lanes, number(heads.page_size), heads.value_dim
    kv_heads, group = q.shape[1], number(heads.group)
    slot, head = e.sdiv(item, kv_heads), e.srem(item, kv_heads)
    first, end = (e.sext(e.read(bound.data, slot, I32), I64) for bound in (firsts, ends))
    query = e.at(q.data, e.mul(item, number(heads.group * heads.key_dim)))
    result = e.at(out.data, e.mul(item, number(heads.group * dim)))
    rows = Rows(*(e.variable(F32, heads.group * width) for width in (1, 1, dim)))
    scores = e.variable(F32, heads.page_size)
    with e.each(number(0), group) as row:
        sink = e.read(sinks.data, e.add(e.mul(head, group), row))
        begin(e, rows, row, sink, dim, lanes)
    pages = e.sdiv(e.add(end, e.sub(size, number(1))), size)
    with e.each(e.sdiv(first, size), pages) as turn:
        page = e.sext(e.read(table.data, e.add(e.mul(slot, table.shape[1]), turn), I32), I64)
        place, start = e.mul(e.add(e.mul(page, kv_heads), head), size), e.mul(turn, size)
        keys = e.at(k.data, e.mul(place, number(heads.key_dim)), STORED[heads.pages])
        values = e.at(v.data, e.mul(place, number(dim)), STORED[heads.pages])
        seen = e.sub(first, start), e.sub(end, start)
        with e.each(number(0), group) as row:
            own = e.at(query, e.mul(row, number(heads.key_dim)))
            _score(heads, e, own, keys, scores)
            decay = weigh(e, scores, heads.page_size, seen, heads.soft_cap, rows, row, lanes)
            _attend(heads, e, scores, values, e.at(rows.values, e.mul(row, number(dim))), decay)
    with e.each(number(0), group) as row:
        finish(e, rows, row, e.at(result, e.mul(row, number(dim))), dim, lanes)


def _score(heads: Heads, e: Emitter, query: ir.Value, keys: ir.Value, scores: ir.Value) -> None:
    """Products of a query with a page's keys."""
    own = [e.read_vector(query, i, heads.lanes) for i in range(0, heads.key_dim, heads.lanes)]
    with e.each(number(0), number(heads.page_size)) as key:
        base, products = e.mul(key, number(heads.key_dim)), None
        for i, part in enumerate(own):
            at = e.add(base, number(heads.lanes * i))
            entry = e.read_vector(keys, at, heads.lanes, heads.pages)
            products = (
                e.fmul(part, entry) if products is None else e.multiply_add(part, entry, products)
            )
        e.store(total(e, products), e.at(scores, key))


def _attend(
    heads: Heads,
    e: Emitter,
    weights: ir.Value,
    values: ir.Value,
    attended: ir.Value,
    decay: ir.Value,
) -> None:
    """Add a page's weighted values to those of a row, which decay."""
    lanes, kind = heads.lanes, ir.VectorType(F32, heads.lanes)
    parts = range(0, heads.value_dim, lanes)
    sums = [e.variable(kind) for _ in parts]
    for i, place in zip(parts, sums, strict=True):
        e.store(e.fmul(e.read_vector(attended, i, lanes), decay), place)
    with e.each(number(0), number(heads.page_size)) as key:
        weight, base = e.splat(e.read(weights, key), lanes), e.mul(key, number(heads.value_dim))
        for i, place in zip(parts, sums, strict=True):
            entry = e.read_vector(values, e.add(base, number(i)), lanes, heads.pages)
            e.store(e.multiply_add(weight, entry, e.load(place, typ=kind)), place)
    for i, place in zip(parts, sums, strict=True):
        e.write_vector(e.load(place, typ=kind), attended, i)
