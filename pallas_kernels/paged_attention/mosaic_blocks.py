"""What the Mosaic kernels of paged attention share: pages through TMA, and turns over keys.

A block of keys is copied page by page into shared memory, a ring of stages ahead of the turn that
multiplies it on the tensor cores (wgmma). Pages that no query of the block may see are not read:
the null page, whose values are finite, takes their place, so that a weight of 0 stays 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

MASKED = -1e30  # finite: exp(MASKED - MASKED) must not be NaN
ROWS = 64  # of one wgmma
TILE = 8  # rows of a tile in shared memory
ALIGNED = 128  # bytes: TMA begins at multiples of it in shared memory
# Dimensions of a head above which a warpgroup gathers half of its values: registers hold no more.
WIDE = 128
LOG2E = math.log2(math.e)
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
LAYOUT = plgpu.Layout.WGMMA

# (maximum in powers of two, sum, weighted values)
State = tuple[Float[Array, " R"], Float[Array, " R"], Float[Array, "R vd"]]


class Options(NamedTuple):
    """What a kernel is specialised for: see the package for `scale`, `window` and `soft_cap`.

    Attributes:
        head_dim / page_size: as in the pool.
        values: dimensions of values that one warpgroup gathers, all or half of a head's.
        keys: of one block.
        stages: blocks in shared memory.
    """

    head_dim: int
    values: int
    page_size: int
    keys: int
    stages: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def part(self) -> int:
        """Keys of one copy: a page, or what of it is in a block."""
        return min(self.page_size, self.keys)


def tiled(o: Options, dtype: Any, *shape: int) -> Any:
    """Shared memory as wgmma and TMA agree on it: tiles whose rows are swizzled, all alike."""
    item = jnp.dtype(dtype).itemsize
    swizzle = min(plgpu.find_swizzle(size * item * 8) for size in (o.values, o.keys))
    transforms = (
        plgpu.TilingTransform((TILE, swizzle // item)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(swizzle),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Ring(NamedTuple):
    """Stages of keys and values [stages, keys, hd] in shared memory, and their barriers."""

    k: Any
    v: Any
    loaded: Any


def ring_types(o: Options, dtype: Any, values: int) -> Ring:
    """Scratch for a ring with so many dimensions of values."""
    copies = 2 * (o.keys // o.part)
    return Ring(
        tiled(o, dtype, o.stages, o.keys, o.head_dim),
        tiled(o, dtype, o.stages, o.keys, values),
        plgpu.Barrier(num_arrivals=copies, num_barriers=o.stages),
    )


class Source(NamedTuple):
    """Where a program's keys are: a row of the table, a head, which dimensions of values, and the
    keys it may read."""

    k_pool: Any
    v_pool: Any
    table: Any
    row: Any
    head: Any
    dims: Any
    first: Int[Array, ""]
    end: Int[Array, ""]


def pages_of(o: Options, source: Source, block: Any) -> tuple[Int[Array, ""], ...]:
    """The pages of a block's parts, the null page for those without a key that matters."""

    def page(part: int) -> Int[Array, ""]:
        key = block * o.keys + part * o.part
        wanted = (key + o.part > source.first) & (key < source.end)
        index = jnp.where(wanted, lax.div(key, jnp.int32(o.page_size)), 0)
        return jnp.where(wanted, source.table[source.row, index], 0)

    return tuple(page(part) for part in range(o.keys // o.part))


def fetch(
    o: Options, source: Source, ring: Ring, block: Any, stage: Any, pages: Sequence[Any]
) -> None:
    """Begin to copy a block into a stage."""
    for part, page in enumerate(pages):
        first = lax.rem(block * o.keys + part * o.part, jnp.int32(o.page_size))
        offset = 0 if o.part == o.page_size else pl.multiple_of(first, o.part)
        places = (source.k_pool, ring.k, slice(None)), (source.v_pool, ring.v, source.dims)
        for pool, stages, dims in places:
            keys = pool.at[page, source.head, pl.ds(offset, o.part), dims]
            place = stages.at[stage, pl.ds(part * o.part, o.part)]
            plgpu.copy_gmem_to_smem(keys, place, ring.loaded.at[stage])


def start_state(o: Options) -> State:
    """Before any key was seen."""

    def per_row(value: float) -> Float[Array, " R"]:
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUT.reduce(1))

    values = plgpu.layout_cast(jnp.zeros((ROWS, o.values), jnp.float32), LAYOUT)
    return per_row(MASKED), per_row(0.0), values


def down(rows: Float[Array, " R"], width: int) -> Float[Array, "R d"]:
    """A number a row, along the row."""
    return lax.broadcast_in_dim(rows, (ROWS, width), [0])


def product(a: Any, b: Any, width: int) -> Float[Array, "R d"]:
    """Of two matrices in shared memory, on the tensor cores."""

    def multiply(total: Any) -> Any:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, width), jnp.float32))


def turn(o: Options, q: Any, k: Any, v: Any, p: Any, visible: Any, state: State) -> State:
    """One turn of the online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).

    `q` [R, hd], `k` and `v` [keys, hd] are in shared memory, and so is `p` [R, keys], where the
    weights go to be multiplied.
    """
    top, total, values = state
    scores = product(q, k.transpose((1, 0)), o.keys)
    if o.soft_cap is None:
        scores = scores * (o.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (o.scale / o.soft_cap)) * (o.soft_cap * LOG2E)
    scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    decay = jnp.exp2(top - new_top)
    # A row that sees no key of its first blocks gathers junk, which the first that it sees decays
    # to nothing.
    weights = jnp.exp2(scores - down(new_top, o.keys))
    total = total * decay + jnp.sum(weights, axis=1)
    p[...] = weights.astype(p.dtype)
    plgpu.commit_smem()

    values = values * down(decay, o.values) + product(p, v, o.values)
    return new_top, total, values


def turns(
    o: Options,
    ring: Ring,
    q: Any,
    p: Any,
    dims: Any,
    blocks: tuple[Any, Any],
    visible: Callable[[Any], Any],
    before: Callable[[Any], Any],
    after: Callable[[Any, Any, Any], None],
) -> State:
    """All turns over blocks [first, end) as they arrive; of values, `dims`.

    What `before(block)` finds while a block is still awaited goes to `after(block, stage, found)`,
    when its stage is free again.
    """
    begin, end = blocks

    def step(block: Any, state: State) -> State:
        stage = lax.rem(block - begin, jnp.int32(o.stages))
        found = before(block)
        plgpu.barrier_wait(ring.loaded.at[stage])
        k, v = ring.k.at[stage], ring.v.at[stage, :, dims]
        state = turn(o, q, k, v, p, visible(block), state)
        after(block, stage, found)
        return state

    return lax.fori_loop(begin, end, step, start_state(o))


def attend(
    o: Options,
    source: Source,
    ring: Ring,
    q: Any,
    p: Any,
    blocks: tuple[Any, Any],
    visible: Callable[[Any], Any],
) -> State:
    """All turns over blocks [first, end), by one warpgroup that also fetches what comes."""
    begin, end = blocks
    for stage in range(o.stages):

        @pl.when(begin + stage < end)
        def _begin(block: Any = begin + stage, stage: int = stage) -> None:
            fetch(o, source, ring, block, stage, pages_of(o, source, block))

    def ask(block: Any) -> Any:  # early: page numbers come while we multiply
        return pages_of(o, source, block + o.stages)

    def go_on(block: Any, stage: Any, pages: Any) -> None:
        @pl.when(block + o.stages < end)
        def _() -> None:
            fetch(o, source, ring, block + o.stages, stage, pages)

    return turns(o, ring, q, p, slice(None), blocks, visible, ask, go_on)


def feed(o: Options, source: Source, ring: Ring, consumed: Any, blocks: tuple[Any, Any]) -> None:
    """Fetch blocks [first, end) for other warpgroups, which say when a stage is consumed."""
    begin, end = blocks

    def step(block: Any, _: None) -> None:
        stage = lax.rem(block - begin, jnp.int32(o.stages))
        pages = pages_of(o, source, block)

        @pl.when(block - begin >= o.stages)
        def _wait() -> None:
            plgpu.barrier_wait(consumed.at[stage])

        fetch(o, source, ring, block, stage, pages)

    lax.fori_loop(begin, end, step, None)


def attend_fed(
    o: Options,
    ring: Ring,
    consumed: Any,
    q: Any,
    p: Any,
    dims: Any,
    blocks: tuple[Any, Any],
    visible: Callable[[Any], Any],
) -> State:
    """All turns over blocks [first, end), which another warpgroup fetches; of values, `dims`."""

    def say(block: Any, stage: Any, found: None) -> None:
        plgpu.barrier_arrive(consumed.at[stage])

    return turns(o, ring, q, p, dims, blocks, visible, lambda block: None, say)


def finish(o: Options, state: State, sink: Any, out: Any) -> None:
    """What the rows attended to, into shared memory; `sink` is a score of a key without a value."""
    top, total, values = state
    decay = 1.0 / total
    if sink is not None:
        raised = jnp.maximum(top, sink * LOG2E)
        decay = jnp.exp2(top - raised)
        decay = decay / (total * decay + jnp.exp2(sink * LOG2E - raised))
    out[...] = (values * down(decay, o.values)).astype(out.dtype)
    plgpu.commit_smem()


def keys_of(o: Options, block: Any) -> Int[Array, "R T"]:
    """The keys of a block along every row."""
    keys = plgpu.broadcasted_iota(jnp.int32, (ROWS, o.keys), 1, layout=LAYOUT)
    return keys + block * o.keys


def kernel(body: Callable[..., None], interpret: bool, **how: Any) -> Callable[..., Any]:
    """`plgpu.kernel`, on the GPU or interpreted with a race detector."""
    return plgpu.kernel(body, interpret=INTERPRETED if interpret else None, **how)
