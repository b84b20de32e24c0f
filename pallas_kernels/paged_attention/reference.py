"""Paged attention in plain jax: online softmax over blocks of pages (Milakov & Gimelshein 2018,
arXiv:1805.02867). The table is never gathered whole: its width and the pool's size cost nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.paged_attention.quantised import as_numbers, in_units

# Keys a loop turn attends to: fewer turns for few rows, whose turns cost overhead only, and less
# wasted at the end of a sequence for many. Measured on CPUs, see docs/performance.md.
MIN_BLOCK, MAX_BLOCK, ROWS_TIMES_BLOCK = 64, 256, 512
TILE_ROWS = 64  # query tokens of one prefill tile
# Two tiles of a piece are taken at once where loops are dynamic: fewer and longer operations.
JOINED_BLOCK = 128  # keys that they attend to in a turn
MASKED = -1e30  # finite: exp(MASKED - MASKED) must not be NaN


class Seen(NamedTuple):
    """Which keys a query sees, how their scores are capped, and beside which: see the package."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: Float[Array, "KV G"] | None = None

    def first(self, position: Int[Array, "*axes"]) -> Int[Array, "*axes"]:
        """The first key that a query at `position` sees."""
        if self.window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - self.window + 1, 0)

    def capped(self, scores: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
        return scores if self.soft_cap is None else jnp.tanh(scores / self.soft_cap) * self.soft_cap


class Block(NamedTuple):
    """Keys and values of some pages as they are stored, and the scales of quantised ones."""

    k: Num[Array, "S KV T hd"]
    v: Num[Array, "S KV T vd"]
    k_scale: Float[Array, "S KV 1 T"] | None
    v_scale: Float[Array, "S KV 1 T"] | None

    def as_numbers(self, dtype: jnp.dtype, rows: int) -> Block:
        """Keys and values in `dtype`, for so many rows of queries.

        Scales are left to multiply scores and weights, as 8-bit numbers are exact in any dtype; or
        they are multiplied in where nothing is rounded to few bits and that is less to multiply.
        """
        k, v = as_numbers(self.k, dtype), as_numbers(self.v, dtype)
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is None or v_scale is None or dtype != jnp.float32 or rows <= k.shape[3]:
            return Block(k, v, k_scale, v_scale)
        return Block(k * k_scale.swapaxes(2, 3), v * v_scale.swapaxes(2, 3), None, None)


class Pool(NamedTuple):
    """The pages of keys and of values `value_dim` wide; without `v` a key begins with its value."""

    k: Num[Array, "P KV ps hd"]
    v: Num[Array, "P KV ps vd"] | None
    value_dim: int
    k_scale: Float[Array, "P KV ps"] | None = None
    v_scale: Float[Array, "P KV ps"] | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    def queries(self, q: Float[Array, "*axes"], scale: float) -> Float[Array, "*axes"]:
        """Queries times the scale as keys meet them: in their dtype, unless they are quantised."""
        return (q * scale).astype(self.k.dtype if self.k_scale is None else q.dtype)

    def gather(self, pages: Int[Array, "S span"]) -> Block:
        """Keys and values of the pages."""
        k = _gather(self.k, pages)
        v = k[..., : self.value_dim] if self.v is None else _gather(self.v, pages)
        if self.k_scale is None or self.v_scale is None:
            return Block(k, v, None, None)
        scales = (self.k_scale, self.v_scale)
        return Block(k, v, *(_gather(s[..., None], pages).swapaxes(2, 3) for s in scales))


def paged_attention(
    q: Float[Array, "S KV G hd"],
    pool: Pool,
    page_table: Int[Array, "S W"],
    kv_lens: Int[Array, " S"],
    scale: float,
    seen: Seen,
    dynamic: bool,
    block: int | None,
) -> Float[Array, "S KV G vd"]:
    """See the package. `dynamic` stops at the longest live row instead of the table's end."""
    page_size = pool.page_size
    table, span = _whole_blocks(page_table, page_size, block or _block_for(q.shape[0]))
    trips = _trips(jnp.max(kv_lens), table, span, page_size, dynamic)
    scaled = pool.queries(q, scale)
    first = seen.first(kv_lens - 1)
    start: Int[Array, ""] | int = 0
    if dynamic and seen.window is not None:
        start = jnp.min(jnp.where(kv_lens > 0, first, jnp.max(first))) // (span * page_size)

    def turn(i: Int[Array, ""], state: tuple) -> tuple:
        pages = lax.dynamic_slice_in_dim(table, i * span, span, axis=1)
        keys = _positions(i, span, page_size)[None, :]
        valid = keys < kv_lens[:, None]
        if seen.window is not None:
            valid &= keys >= first[:, None]
        return _accumulate(state, scaled, pool.gather(pages), valid[:, None, None, :], seen)

    state = _start((*q.shape[:3], pool.value_dim), seen)
    out = _finish(lax.fori_loop(start, trips, turn, state), q.dtype)
    return jnp.where((kv_lens > 0)[:, None, None, None], out, 0)


def paged_prefill(
    q: Float[Array, "C KV G hd"],
    pool: Pool,
    page_table: Int[Array, "N W"],
    tiles: Int[Array, "T 4"],
    scale: float,
    seen: Seen,
    dynamic: bool,
    block: int | None,
) -> Float[Array, "C KV G vd"]:
    """See the package. Each tile attends block by block up to its own last position."""
    rows, kv_heads, group, head_dim = q.shape
    page_size, width = pool.page_size, pool.value_dim
    joined = dynamic and rows > TILE_ROWS
    height = 2 * TILE_ROWS if joined else TILE_ROWS
    default = JOINED_BLOCK if joined else _block_for(TILE_ROWS)
    # Heads that share their keys may be sharded: then they are the outer axis of a tile's rows.
    heads_first = pool.v is None
    order, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if heads_first else ((1, 0, 2, 3), (1, 0, 2, 3))
    table, span = _whole_blocks(page_table, page_size, block or default)
    tiles = jnp.pad(tiles, ((0, 1), (0, 0)))
    # Tiles may overrun their rows into the next tile's, which then overwrites them.
    scaled = lax.optimization_barrier(pool.queries(q, scale))
    padded = jnp.pad(scaled, ((0, height), (0, 0), (0, 0), (0, 0)))

    def tile(state: tuple) -> tuple:
        i, out = state
        first, count, slot, position = tiles[i]
        taken: Int[Array, ""] | int = 1
        if joined:
            count, taken = _join_next(tiles, i)
        first = jnp.where(count > 0, first, rows)  # padding tiles write past the chunk
        queries = lax.dynamic_slice_in_dim(padded, first, height, axis=0)
        by_head = queries.transpose(order).reshape(1, kv_heads, height * group, head_dim)
        last = position + jnp.arange(height)
        last = jnp.tile(last, group) if heads_first else jnp.repeat(last, group)
        pages_of_slot = lax.dynamic_slice_in_dim(table, slot, 1, axis=0)

        def turn(masked: bool, j: Int[Array, ""], state: tuple) -> tuple:
            pages = lax.dynamic_slice_in_dim(pages_of_slot, j * span, span, axis=1)
            keys = _positions(j, span, page_size)
            # Rows past the tile's count would see pages that are not theirs: mask by length.
            valid = (keys[None, :] <= last[:, None]) & (keys < position + count)[None, :]
            if seen.window is not None:
                valid &= keys[None, :] >= seen.first(last)[:, None]
            shown = valid[None, None] if masked else None
            return _accumulate(state, by_head, pool.gather(pages), shown, seen)

        state = _start((*by_head.shape[:3], width), seen, heads_first)
        trips = _trips(position + count, table, span, page_size, dynamic)
        start: Int[Array, ""] | int = 0  # of the blocks that some rows see in part
        if dynamic and seen.window is None:  # those before it, all rows see whole
            start = (position + 1) // (span * page_size)
            state = lax.fori_loop(0, start, functools.partial(turn, False), state)
        elif dynamic:
            start = seen.first(position) // (span * page_size)
        state = lax.fori_loop(start, trips, functools.partial(turn, True), state)
        sizes = [queries.shape[axis] for axis in order[:3]]
        attended = _finish(state, q.dtype).reshape(*sizes, width)
        attended = attended.transpose(back)
        return i + taken, lax.dynamic_update_slice_in_dim(out, attended, first, axis=0)

    out = jnp.zeros((*padded.shape[:3], width), q.dtype)
    if dynamic:
        used = jnp.sum(tiles[:, 1] > 0)
        out = lax.while_loop(lambda state: state[0] < used, tile, (0, out))[1]
    else:
        out = lax.fori_loop(0, tiles.shape[0] - 1, lambda i, out: tile((i, out))[1], out)
    return out[:rows]


def _join_next(
    tiles: Int[Array, "T 4"], i: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Rows of tile i and, if the next one continues its piece, of that one; and how many tiles."""
    first, count, slot, position = tiles[i]
    next_first, more, next_slot, next_position = tiles[i + 1]
    follows = (next_slot == slot) & (next_position == position + count)
    follows &= next_first == first + count
    return count + jnp.where(follows, more, 0), jnp.where(follows, 2, 1)


def _block_for(rows: int) -> int:
    return min(max(ROWS_TIMES_BLOCK // rows, MIN_BLOCK), MAX_BLOCK)


def _whole_blocks(
    table: Int[Array, "N W"], page_size: int, block: int
) -> tuple[Int[Array, "N W2"], int]:
    """The table padded with null pages to whole blocks, and the pages in a block."""
    span = max(1, block // page_size)
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % span))), span


def _trips(
    longest: Int[Array, ""], table: Int[Array, "N W"], span: int, page_size: int, dynamic: bool
) -> Int[Array, ""] | int:
    return -(-longest // (span * page_size)) if dynamic else table.shape[1] // span


def _positions(block: Int[Array, ""], span: int, page_size: int) -> Int[Array, " T"]:
    return block * (span * page_size) + jnp.arange(span * page_size)


def _gather(pool: Num[Array, "P KV ps hd"], pages: Int[Array, "S span"]) -> Num[Array, "S KV T hd"]:
    """Pages side by side. Gathering flat (page, head) rows keeps the copies long and contiguous."""
    num_pages, kv_heads, page_size, head_dim = pool.shape
    rows = lax.gather(
        pool.reshape(num_pages, kv_heads, page_size * head_dim),
        pages[..., None],
        lax.GatherDimensionNumbers(
            offset_dims=(1, 3), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        (1, kv_heads, page_size * head_dim),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return rows.reshape(pages.shape[0], kv_heads, -1, head_dim)


def _start(shape: tuple[int, ...], seen: Seen, heads_first: bool = False) -> tuple:
    """(maximum, sum, weighted values) before any key was seen, of queries [S, KV, rows * G, hd];
    `heads_first`: [S, KV, G * rows, hd].

    A sink is a key without a value that was seen already.
    """
    top = jnp.full(shape[:3], MASKED, jnp.float32)
    total = jnp.zeros(shape[:3], jnp.float32)
    if seen.sinks is not None:
        repeats = shape[2] // seen.sinks.shape[1]
        sinks = seen.sinks.astype(jnp.float32)
        sinks = jnp.repeat(sinks, repeats, 1) if heads_first else jnp.tile(sinks, (1, repeats))
        top, total = jnp.broadcast_to(sinks[None], top.shape), jnp.ones_like(total)
    return top, total, jnp.zeros(shape, jnp.float32)


def _accumulate(
    state: tuple,
    q: Float[Array, "S KV M hd"],
    block: Block,
    valid: Bool[Array, "#S 1 #M T"] | None,
    seen: Seen,
) -> tuple:
    """One block of the online softmax. `valid` None: every row sees every key.

    A row that sees no key of its first block gathers junk until it sees one, or a sink.
    """
    top, total, values = state
    dtype = q.dtype if block.k_scale is not None else block.k.dtype
    block = block.as_numbers(dtype, q.shape[2])
    scores = lax.dot_general(
        q, block.k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    if block.k_scale is not None:
        scores = scores * block.k_scale
    scores = seen.capped(scores)
    if valid is not None:
        scores = jnp.where(valid, scores, MASKED)
    if valid is not None or block.k_scale is not None or seen.soft_cap is not None:
        # Or a product would be rounded with the difference below in some programs, not in others.
        scores = lax.optimization_barrier(scores)
    new_top = jnp.maximum(top, scores.max(-1))
    decay = jnp.exp(top - new_top)
    weights = jnp.exp(scores - new_top[..., None])
    total = total * decay + weights.sum(-1)
    unit = None
    if block.v_scale is not None:
        weights, unit = in_units(weights * block.v_scale, block.v.dtype)
    attended = lax.dot_general(
        weights.astype(block.v.dtype),
        block.v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    attended = attended if unit is None else attended * unit
    return new_top, total, values * decay[..., None] + attended


def _finish(state: tuple, dtype: jnp.dtype) -> Float[Array, "S KV M vd"]:
    _, total, values = state
    return (values / total[..., None]).astype(dtype)
