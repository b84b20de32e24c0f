"""The kernel of prefill attention: a tile of consecutive tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from jaxinfer.cpu_kernels.emit import F32, I32, I64, POINTER, STORED, VOID, Emitter, number
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.softmax import Rows, begin, finish, weigh
from jaxinfer.cpu_kernels.tiles import Tile, tile
from jaxinfer.cpu_kernels.vector_math import exchanged
from jaxinfer.cpu_kernels.xla_call import Buffer


class Tiles(NamedTuple):
    """Products of 1, 2, … rows: of queries with keys, and of weights with values, which add."""

    scores: list[ir.Function]
    values: list[ir.Function]


class Scratch(NamedTuple):
    """Memory of an item: its queries, what is known of them, and what is made of a page."""

    queries: ir.Value  # [rows, key_dim]
    rows: Rows
    keys: ir.Value  # transposed, [key_dim, page_size]
    scores: ir.Value  # of as many rows as a product takes, [rows, page_size]


def tiles_for(module: ir.Module, heads: Heads) -> Tiles:
    """The products that `prefill_tile` calls."""
    lanes, most = heads.lanes, range(1, heads.rows + 1)
    sizes = (heads.wide(heads.page_size), lanes, heads.page_size)
    values = (heads.wide(heads.value_dim), lanes, heads.value_dim, heads.pages)
    return Tiles(
        [tile(module, rows, *sizes) for rows in most],
        [tile(module, rows, *values, adds=True) for rows in most],
    )


def prefill_tile(
    heads: Heads, tiles: Tiles, e: Emitter, buffers: Sequence[Buffer], item: ir.Value
) -> None:
    """Attention of a tile's tokens in the heads that share keys, page by page.

    The buffers are queries times the scale [C, KV, G, hd], pages of keys and of values, the page
    table [N, W], the tiles [T, 4], how many tokens a query sees, sinks, and the result, which is
    zeros, twice.
    """
    q, k, v, table, places, window, sinks, _, out = buffers
    kv_heads, group = q.shape[1], number(heads.group)
    index, head = e.sdiv(item, kv_heads), e.srem(item, kv_heads)
    first, count, slot, position = (
        e.sext(e.read(places.data, e.add(e.mul(index, number(4)), number(i)), I32), I64)
        for i in range(4)
    )
    sees = e.sext(e.read(window.data, 0, I32), I64)
    with e.if_then(e.icmp_signed(">", count, number(0))):
        scratch = _scratch(heads, e, e.mul(count, group))
        with e.each(number(0), count) as token:
            place = e.mul(e.add(e.mul(e.add(first, token), kv_heads), head), group)
            source = e.at(q.data, e.mul(place, number(heads.key_dim)))
            row = e.mul(token, group)
            own = e.at(scratch.queries, e.mul(row, number(heads.key_dim)))
            with e.each(number(0), number(heads.group * heads.key_dim), heads.lanes) as i:
                e.write_vector(e.read_vector(source, i, heads.lanes), own, i)
            with e.each(number(0), group) as i:
                sink = e.read(sinks.data, e.add(e.mul(head, group), i))
                begin(e, scratch.rows, e.add(row, i), sink, heads.value_dim, heads.lanes)
        size, stored = number(heads.page_size), STORED[heads.pages]
        start = e.sub(e.add(position, number(1)), sees)
        start = e.select(e.icmp_signed(">", start, number(0)), start, number(0))
        pages = e.sdiv(e.add(e.add(position, count), e.sub(size, number(1))), size)
        with e.each(e.sdiv(start, size), pages) as turn:
            page = e.sext(e.read(table.data, e.add(e.mul(slot, table.shape[1]), turn), I32), I64)
            place = e.mul(e.add(e.mul(page, kv_heads), head), size)
            keys = e.at(k.data, e.mul(place, number(heads.key_dim)), stored)
            _transpose(heads, e, keys, scratch.keys)
            values = e.at(v.data, e.mul(place, number(heads.value_dim)), stored)
            offset = e.sub(position, e.mul(turn, size))
            _page(heads, tiles, e, scratch, values, e.mul(count, group), offset, sees)
        with e.each(number(0), count) as token:
            place = e.mul(e.add(e.mul(e.add(first, token), kv_heads), head), group)
            with e.each(number(0), group) as i:
                target = e.at(out.data, e.mul(e.add(place, i), number(heads.value_dim)))
                row = e.add(e.mul(token, group), i)
                finish(e, scratch.rows, row, target, heads.value_dim, heads.lanes)
        e.call(e.external("free", VOID, [POINTER]), [scratch.queries])


def _page(
    heads: Heads,
    tiles: Tiles,
    e: Emitter,
    scratch: Scratch,
    values: ir.Value,
    count: ir.Value,
    offset: ir.Value,
    sees: ir.Value,
) -> None:
    """Take a page into all rows, of which the first token stands `offset` after its beginning."""
    lanes, size, dim, most = heads.lanes, heads.page_size, heads.value_dim, number(heads.rows)
    nothing = number(0)  # is fetched
    with e.each(number(0), count, heads.rows) as row:
        left = e.sub(count, row)
        height = e.select(e.icmp_signed("<", left, most), left, most)
        which = e.sub(height, number(1))
        queries = e.at(scratch.queries, e.mul(row, number(heads.key_dim)))
        for i in range(0, size, lanes * heads.wide(size)):
            keys, scores = e.at(scratch.keys, i), e.at(scratch.scores, i)
            depth = number(heads.key_dim)
            e.call_one_of(
                tiles.scores,
                which,
                Tile(queries, keys, keys, scores, depth, depth, number(size), nothing),
            )
        with e.each(number(0), height) as i:
            own = e.add(row, i)
            last = e.add(offset, e.sdiv(own, number(heads.group)))
            seen = e.sub(e.add(last, number(1)), sees), e.add(last, number(1))
            scores = e.at(scratch.scores, e.mul(i, number(size)))
            decay = weigh(e, scores, size, seen, heads.soft_cap, scratch.rows, own, lanes)
            attended = e.at(scratch.rows.values, e.mul(own, number(dim)))
            for j in range(0, dim, lanes):
                e.write_vector(e.fmul(e.read_vector(attended, j, lanes), decay), attended, j)
        attended = e.at(scratch.rows.values, e.mul(row, number(dim)))
        for i in range(0, dim, lanes * heads.wide(dim)):
            part, target = e.at(values, i, STORED[heads.pages]), e.at(attended, i)
            depth = number(size)
            e.call_one_of(
                tiles.values,
                which,
                Tile(scratch.scores, part, part, target, depth, depth, number(dim), nothing),
            )


def _transpose(heads: Heads, e: Emitter, keys: ir.Value, turned: ir.Value) -> None:
    """A page's keys [page_size, key_dim] as [key_dim, page_size], a square of lanes a turn."""
    lanes, size, dim = heads.lanes, heads.page_size, heads.key_dim
    with e.each(number(0), number(size), lanes) as key:
        for i in range(0, dim, lanes):
            base = e.add(e.mul(key, number(dim)), number(i))
            square = [
                e.read_vector(keys, e.add(base, number(dim * row)), lanes, heads.pages)
                for row in range(lanes)
            ]
            for row, vector in enumerate(_turned(e, square)):
                e.write_vector(vector, turned, e.add(key, number((i + row) * size)))


def _turned(e: Emitter, square: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of vectors: halves of blocks are exchanged, ever smaller ones."""
    span = len(square) // 2
    while span:
        for row in range(len(square)):
            if not row & span:
                pair = square[row], square[row + span]
                square[row], square[row + span] = exchanged(e, pair, span)
        span //= 2
    return square


def _scratch(heads: Heads, e: Emitter, rows: ir.Value) -> Scratch:
    """Memory for so many rows, in one piece that begins with the queries."""
    floats = e.add(e.mul(rows, number(heads.floats_of_row)), number(heads.floats_of_page))
    memory = e.call(e.external("malloc", POINTER, [I64]), [e.mul(floats, number(4))])
    parts, place = [], memory
    for width in (heads.key_dim, heads.value_dim, 1, 1):
        parts.append(place)
        place = e.at(place, e.mul(rows, number(width)), F32)
    queries, values, top, total = parts
    scores = e.at(place, heads.page_size * heads.key_dim)
    return Scratch(queries, Rows(top, total, values), place, scores)
