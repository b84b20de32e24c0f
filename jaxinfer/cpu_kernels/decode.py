"""The kernel of decode attention: one query of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import F32, I32, I64, SIZES, STORED, Emitter, number
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.softmax import Rows, begin, finish, weigh
from jaxinfer.cpu_kernels.tiles import LINE, fetch_lines
from jaxinfer.cpu_kernels.vector_math import totals
from jaxinfer.cpu_kernels.xla_call import Buffer

PIECES = 16  # of all work: a thread that has several rows in one fetches the next one's pages


def pieces(e: Emitter, buffers: Sequence[Buffer]) -> ir.Value:
    """How many there are."""
    count = _groups(e, buffers)
    return e.select(e.icmp_signed("<", count, number(PIECES)), count, number(PIECES))


def _groups(e: Emitter, buffers: Sequence[Buffer]) -> ir.Value:
    """Groups of heads that share keys, of all sequences."""
    return e.mul(buffers[0].shape[0], buffers[0].shape[1])


def decode_piece(heads: Heads, e: Emitter, buffers: Sequence[Buffer], item: ir.Value) -> None:
    """Attention of consecutive groups of heads.

    The buffers are queries times the scale [S, KV, G, hd], pages of keys and of values, the page
    table [S, W], the first key that each row sees, the end of its keys, sinks, and the result.
    """
    count, parts = _groups(e, buffers), pieces(e, buffers)
    start, stop = (e.sdiv(e.mul(e.add(item, number(i)), count), parts) for i in range(2))
    rows = Rows(*(e.variable(F32, heads.group * width) for width in (1, 1, heads.value_dim)))
    scores = e.variable(F32, heads.page_size)
    with e.each(start, stop) as group:
        further = e.add(group, number(1))
        further = e.select(e.icmp_signed("<", further, stop), further, group)
        _group(heads, e, buffers, group, further, rows, scores)


class Context(NamedTuple):
    """The keys that a group of heads attends to.

    Attributes:
        head: of the keys.
        first / end: of the keys that are seen.
        pages: how many hold them, those before `first` among them.
        table: its pages.
    """

    head: ir.Value
    first: ir.Value
    end: ir.Value
    pages: ir.Value
    table: ir.Value


def _context(heads: Heads, e: Emitter, buffers: Sequence[Buffer], group: ir.Value) -> Context:
    table, firsts, ends = buffers[3:6]
    kv_heads = buffers[0].shape[1]
    slot, head = e.sdiv(group, kv_heads), e.srem(group, kv_heads)
    first, end = (e.sext(e.read(bound.data, slot, I32), I64) for bound in (firsts, ends))
    pages = e.sdiv(e.add(end, number(heads.page_size - 1)), number(heads.page_size))
    own = e.at(table.data, e.mul(slot, table.shape[1]), I32)
    return Context(head, first, end, pages, own)


def _group(
    heads: Heads,
    e: Emitter,
    buffers: Sequence[Buffer],
    group: ir.Value,
    further: ir.Value,
    rows: Rows,
    scores: ir.Value,
) -> None:
    """Attention of a sequence's group of heads, page by page; `further` is the group after it."""
    q, k, v, *_, sinks, out = buffers
    lanes, size, dim = heads.lanes, number(heads.page_size), heads.value_dim
    own, other = (_context(heads, e, buffers, at) for at in (group, further))
    query = e.at(q.data, e.mul(group, number(heads.group * heads.key_dim)))
    result = e.at(out.data, e.mul(group, number(heads.group * dim)))
    with e.each(number(0), number(heads.group)) as row:
        sink = e.read(sinks.data, e.add(e.mul(own.head, number(heads.group)), row))
        begin(e, rows, row, sink, dim, lanes)

    def page(head: ir.Value, place: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Addresses of the keys and of the values of a head in the page that a table names."""
        index = e.sext(e.load(place, typ=I32), I64)
        at = e.mul(e.add(e.mul(index, q.shape[1]), head), size)
        keys, values = (
            e.at(pool.data, e.mul(at, number(width)), STORED[heads.pages])
            for pool, width in ((k, heads.key_dim), (v, dim))
        )
        return keys, values

    with e.each(e.sdiv(own.first, size), own.pages) as turn:
        later = e.add(turn, number(1))
        is_last = e.icmp_signed("==", later, own.pages)
        next_place = e.select(
            is_last,
            e.at(other.table, e.sdiv(other.first, size), I32),
            e.at(own.table, later, I32),
        )
        keys, values = page(own.head, e.at(own.table, turn, I32))
        ahead = page(e.select(is_last, other.head, own.head), next_place)
        start = e.mul(turn, size)
        seen = e.sub(own.first, start), e.sub(own.end, start)
        count = e.select(e.icmp_signed("<", seen[1], size), seen[1], size)
        with e.each(number(0), number(heads.group)) as row:
            turns = e.mul(row, size)
            asked, attended = (
                e.at(base, e.mul(row, number(width)))
                for base, width in ((query, heads.key_dim), (rows.values, dim))
            )
            fetched = Ahead(ahead[0], turns, heads.key_dim), Ahead(ahead[1], turns, dim)
            _score(heads, e, asked, keys, count, scores, fetched[0])
            decay = weigh(e, scores, heads.page_size, seen, heads.soft_cap, rows, row, lanes)
            _attend(heads, e, scores, values, count, attended, decay, fetched[1])
    with e.each(number(0), number(heads.group)) as row:
        finish(e, rows, row, e.at(result, e.mul(row, number(dim))), dim, lanes)


class Ahead(NamedTuple):
    """What is read next, of which a row fetches its part: turns from `first` on, a key each.

    Attributes:
        page: its address.
        dim: numbers of a key or of a value in it.
    """

    page: ir.Value
    first: ir.Value
    dim: int

    def fetch(self, heads: Heads, e: Emitter, key: ir.Value) -> None:
        lines = -(-self.dim * SIZES[heads.pages] // (LINE * heads.group))
        fetch_lines(e, self.page, e.add(self.first, key), number(lines))


def _score(
    heads: Heads,
    e: Emitter,
    query: ir.Value,
    keys: ir.Value,
    count: ir.Value,
    scores: ir.Value,
    ahead: Ahead,
) -> None:
    """Products of a query with a page's first keys, as many at once as a register holds."""
    lanes = heads.lanes
    own = [e.read_vector(query, i, lanes) for i in range(0, heads.key_dim, lanes)]
    with e.each(number(0), count, lanes) as first:

        def product(key: int) -> ir.Value:
            place, products = e.add(first, number(key)), None
            ahead.fetch(heads, e, place)
            base = e.mul(place, number(heads.key_dim))
            for i, part in enumerate(own):
                at = e.add(base, number(lanes * i))
                entry = e.read_vector(keys, at, lanes, heads.pages)
                products = (
                    e.fmul(part, entry)
                    if products is None
                    else e.multiply_add(part, entry, products)
                )
            return products

        e.write_vector(totals(e, product, lanes), scores, first)


def _attend(
    heads: Heads,
    e: Emitter,
    weights: ir.Value,
    values: ir.Value,
    count: ir.Value,
    attended: ir.Value,
    decay: ir.Value,
    ahead: Ahead,
) -> None:
    """Add a page's first weighted values to those of a row, which decay."""
    lanes, kind = heads.lanes, ir.VectorType(F32, heads.lanes)
    parts = range(0, heads.value_dim, lanes)
    sums = [e.variable(kind) for _ in parts]
    for i, place in zip(parts, sums, strict=True):
        e.store(e.fmul(e.read_vector(attended, i, lanes), decay), place)
    with e.each(number(0), count) as key:
        ahead.fetch(heads, e, key)
        weight, base = e.splat(e.read(weights, key), lanes), e.mul(key, number(heads.value_dim))
        for i, place in zip(parts, sums, strict=True):
            entry = e.read_vector(values, e.add(base, number(i)), lanes, heads.pages)
            e.store(e.multiply_add(weight, entry, e.load(place, typ=kind)), place)
    for i, place in zip(parts, sums, strict=True):
        e.write_vector(e.load(place, typ=kind), attended, i)
