"""What the Triton kernels of paged attention share: sizes of blocks, and one turn over keys.

Kernels read pages through the page table as gathers of rows, so any page size will do. Triton's
blocks have powers of two: a head of another size is taken in several parts, largest first, whose
scores are added. Nothing is read that no query may see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.quantised import in_units

MASKED = -1e30  # finite: exp(MASKED - MASKED) must not be NaN
FEWEST = 16  # rows or dimensions that a tensor core takes

Part = tuple[int, int]  # first dimension, dimensions
State = tuple[Float[Array, " R"], Float[Array, " R"], tuple[Float[Array, "R _"], ...]]


class Options(NamedTuple):
    """What a kernel is specialised for: see the package for `scale`, `window` and `soft_cap`.

    Attributes:
        head_dim / value_dim / page_size / group: as in the pool and the queries.
        rows / keys: query rows and keys of one block.
    """

    head_dim: int
    value_dim: int
    page_size: int
    group: int
    rows: int
    keys: int
    scale: float
    window: int | None
    soft_cap: float | None


class Pool(NamedTuple):
    """References to a layer's pages [P, KV, ps, hd] and, of quantised ones, scales [P, KV, ps].

    Without `v` a key begins with its value.
    """

    k: Any
    v: Any = None
    k_scale: Any = None
    v_scale: Any = None


def shape_name(pool: Pool, group: int, value_dim: int, window: int | None) -> str:
    """What the best sizes of blocks depend on, in the table of measured ones."""
    values = "" if pool.v is not None else f" latents of {value_dim}"
    seen = "" if window is None else ", window"
    head_dim, page_size = pool.k.shape[3], pool.k.shape[2]
    return f"{group} of {head_dim}{values}, pages of {page_size}, {pool.k.dtype.name}{seen}"


def parts(size: int) -> tuple[Part, ...]:
    """Powers of two that add up to a multiple of 16, the largest first."""
    found, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size & (1 << bit):
            found.append((first, 1 << bit))
            first += 1 << bit
    return tuple(found)


def key_parts(o: Options, pool: Pool) -> tuple[Part, ...]:
    """A key in powers of two: of one that begins with its value, the value's parts first."""
    if pool.v is not None:
        return parts(o.head_dim)
    rest = parts(o.head_dim - o.value_dim)
    return (*parts(o.value_dim), *((o.value_dim + first, size) for first, size in rest))


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()


def start_state(o: Options) -> State:
    """(maximum, sum, weighted values) before any key was seen."""
    zero = jnp.zeros((o.rows,), jnp.float32)
    values = tuple(jnp.zeros((o.rows, size), jnp.float32) for _, size in parts(o.value_dim))
    return jnp.full((o.rows,), MASKED, jnp.float32), zero, values


def load_queries(
    o: Options, pool: Pool, at: Any, real: Bool[Array, " R"]
) -> tuple[Float[Array, "R _"], ...]:
    """The parts of queries times the scale, as the tensor cores take them beside the keys.

    `at(dims)` refers to the queries' dimensions [1, d]; rows that are not `real` are zero.
    """

    def load(part: Part) -> Float[Array, "R _"]:
        q = plgpu.load(at(dims_of(part)), mask=real[:, None], other=0)
        dtype = q.dtype if pool.k_scale is not None else pool.k.dtype
        return (q.astype(jnp.float32) * o.scale).astype(dtype)

    return tuple(load(part) for part in key_parts(o, pool))


def dims_of(part: Part) -> Int[Array, "1 d"]:
    return part[0] + jnp.arange(part[1])[None, :]


def attend_block(
    o: Options,
    pool: Pool,
    table: Any,
    row: Any,
    head: Any,
    q: tuple[Float[Array, "R _"], ...],
    block: Any,
    seen: Any,
    state: State,
) -> State:
    """One turn of the online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).

    `row` is that of the page table; `block` counts blocks of keys; `seen(keys)` says which keys
    exist [T], and which of them each row sees [R, T].
    """
    top, total, values = state
    keys = block * o.keys + jnp.arange(o.keys)
    exist, visible = seen(keys)
    pages = plgpu.load(table.at[row, keys // o.page_size], mask=exist, other=0)
    offsets, dtype = keys % o.page_size, q[0].dtype

    def load(array: Any, part: Part) -> Float[Array, "T d"]:
        where = array.at[pages[:, None], head, offsets[:, None], dims_of(part)]
        other = jnp.zeros((), array.dtype)
        return plgpu.load(where, mask=exist[:, None], other=other).astype(dtype)

    def scales(array: Any) -> Float[Array, "1 T"]:
        return plgpu.load(array.at[pages, head, offsets], mask=exist, other=0)[None, :]

    k = [load(pool.k, part) for part in key_parts(o, pool)]
    scores = sum(plgpu.dot(mine, theirs, trans_b=True) for mine, theirs in zip(q, k))
    if pool.k_scale is not None:
        scores = scores * scales(pool.k_scale)
    if o.soft_cap is not None:
        scores = jnp.tanh(scores / o.soft_cap) * o.soft_cap
    scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    decay = jnp.exp(top - new_top)
    # A row that sees no key of a block must not gather junk: its maximum may still be MASKED.
    weights = jnp.where(visible, jnp.exp(scores - new_top[:, None]), 0.0)
    total = total * decay + jnp.sum(weights, axis=1)
    if pool.v_scale is not None:
        weights = weights * scales(pool.v_scale)
    wanted = parts(o.value_dim)
    v = [load(pool.v, part) for part in wanted] if pool.v is not None else k[: len(wanted)]
    unit = None
    if pool.v_scale is not None:  # after values were loaded: before, it takes more registers
        weights, unit = in_units(weights, dtype)
    else:
        weights = weights.astype(dtype)
    attended = [plgpu.dot(weights, part) for part in v]
    if unit is not None:
        attended = [part * unit for part in attended]
    values = tuple(old * decay[:, None] + new for old, new in zip(values, attended))
    return new_top, total, values
