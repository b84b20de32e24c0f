"""Attention on a device: the shapes of `attention_kernels.ATTENTION`, checked against a dense
reference, and timed beside others' attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.gpu_check.attention_kernels import ATTENTION, Attention
from jaxinfer.gpu_check.on_device import random_arrays
from jaxinfer.gpu_check.on_device.baselines import dense_baselines
from jaxinfer.gpu_check.on_device.registry import DeviceCase, Inputs, Purpose, Sizes
from jaxinfer.roofline import kernels
from jaxinfer.roofline.kernels import AttentionShape, Work
from pallas_kernels.paged_attention import (
    TILE_ROWS,
    mosaic_decode,
    mosaic_prefill,
    triton_decode,
    triton_prefill,
)
from pallas_kernels.paged_attention.dispatch import HOPPER, PAGES, hopper_takes
from pallas_kernels.paged_attention.triton_blocks import Pool, power_of_two, shape_name
from pallas_kernels.tuning import Tiling

# `uneven`: rows of many lengths, an empty one and one of a single token among them.
DECODE: dict[Purpose, Sizes] = {
    "tiny": {"slots": 4, "context": 70, "uneven": 1},
    "check": {"slots": 16, "context": 1500, "uneven": 1},
    "time": {"slots": 64, "context": 2048, "uneven": 0},
}
# A chunk in pieces of `pieces` prompts, whose last tokens it holds.
PREFILL: dict[Purpose, Sizes] = {
    "tiny": {"chunk": 80, "context": 100, "pieces": 2},
    "check": {"chunk": 512, "context": 1500, "pieces": 3},
    "time": {"chunk": 4096, "context": 4096, "pieces": 1},
}
TOLERANCE = 2e-2  # products of 8 bits of mantissa, summed in float32
DECODE_TARGET, PREFILL_TARGET = 0.8, 0.6
MASKED = -1e30


def attention_device_cases() -> Iterator[DeviceCase]:
    """Decode and prefill for each of `ATTENTION`, and by Hopper's own kernels what they take."""
    for case in ATTENTION:
        decode = _case(case, "decode", DECODE, decode_tilings(case), DECODE_TARGET)
        prefill = _case(case, "prefill", PREFILL, prefill_tilings(case), PREFILL_TARGET)
        yield from (decode, prefill)
        pages = (case.head_dim, _value_dim(case), case.page_size, case.pages)
        if hopper_takes(*pages):
            yield _by_mosaic(decode, "decode", _run_hopper_decode, case)
        if hopper_takes(*pages, prefill=True):
            yield _by_mosaic(prefill, "prefill", _run_hopper_prefill, case)


def _by_mosaic(
    by_triton: DeviceCase, phase: str, run: Callable[..., Array], case: Attention
) -> DeviceCase:
    return dataclasses.replace(
        by_triton,
        kernel=f"attention, {phase}, mosaic",
        run=functools.partial(run, case),
        tuned=None,
        tilings=(),
        baselines={},
        oldest=HOPPER,
        newest=HOPPER,
        interpretable=phase == "decode",  # of prefill it takes minutes
    )


def _value_dim(case: Attention) -> int:
    return case.value_dim or case.head_dim


def _case(
    case: Attention,
    phase: str,
    sizes: dict[Purpose, Sizes],
    tilings: tuple[Tiling, ...],
    target: float,
) -> DeviceCase:
    make, run, work = {
        "decode": (_make_decode, _run_decode, _decode_work),
        "prefill": (_make_prefill, _run_prefill, _prefill_work),
    }[phase]
    kernel = triton_decode.TUNED if phase == "decode" else triton_prefill.TUNED
    pool = _pool(case, 1)
    return DeviceCase(
        kernel=kernel,
        case=case.models,
        sizes=sizes,
        make=functools.partial(make, case),
        run=functools.partial(run, case),
        reference=functools.partial(_reference, case),
        work=functools.partial(work, case),
        tolerance=TOLERANCE,
        tuned=(kernel, shape_name(pool, case.group, _value_dim(case), case.window)),
        tilings=tilings,
        baselines=dense_baselines(case, phase),
        target=target,
        oldest=PAGES[case.pages],
    )


def decode_tilings(case: Attention) -> tuple[Tiling, ...]:
    """Sizes to try in decode, beside the rule's: as many rows, half to twice the keys."""
    rule = triton_decode.rule(case.group, _value_dim(case), case.pages != "bfloat16")
    return tuple(
        Tiling(rule.rows, keys, warps, stages)
        for keys in (rule.columns // 2, rule.columns, 2 * rule.columns)
        for warps, stages in ((4, 2), (4, 3), (8, 2))
    )


def prefill_tilings(case: Attention) -> tuple[Tiling, ...]:
    """Sizes to try in prefill, beside the rule's. Those that spill registers fail to compile."""
    whole = power_of_two(TILE_ROWS * case.group)
    return tuple(
        Tiling(min(rows, whole), keys, warps, stages)
        for rows, keys, warps in ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8))
        for stages in (2, 3)
    )


def _shape(case: Attention) -> AttentionShape:
    return AttentionShape(
        kv_heads=case.kv_heads,
        group=case.group,
        head_dim=case.head_dim,
        value_dim=case.value_dim or case.head_dim,
        page_dtype=case.pages,
        latent=case.value_dim is not None,
        window=case.window,
        page_size=case.page_size,
    )


def _decode_work(case: Attention, sizes: Sizes) -> Work:
    return kernels.decode_attention(_shape(case), [sizes["context"]] * sizes["slots"])


def _prefill_work(case: Attention, sizes: Sizes) -> Work:
    pieces = [
        (sizes["context"] - rows, rows) for rows in _piece_rows(sizes["chunk"], sizes["pieces"])
    ]
    return kernels.prefill_attention(_shape(case), pieces)


def _piece_rows(chunk: int, pieces: int) -> list[int]:
    """Tokens of each piece, nearly as many as of another: with several they end within tiles."""
    each = chunk // pieces - (pieces > 1)
    return [each] * (pieces - 1) + [chunk - each * (pieces - 1)]


def _make_decode(case: Attention, sizes: Sizes, key: Array) -> Inputs:
    slots, context = sizes["slots"], sizes["context"]
    q_key, page_key = random_arrays.split(key)
    lens = jnp.full(slots, context, jnp.int32)
    if sizes["uneven"]:
        ragged = np.random.default_rng(slots).integers(1, context, slots)
        ragged[:3] = 0, 1, context
        lens = jnp.asarray(ragged, jnp.int32)
    shape = (slots, case.kv_heads, case.group, case.head_dim)
    q = random_arrays.normal(q_key, shape).astype(jnp.bfloat16)
    return {"q": q, "lens": lens} | _make_pages(case, slots, context, lens, page_key)


def _make_prefill(case: Attention, sizes: Sizes, key: Array) -> Inputs:
    chunk, context = sizes["chunk"], sizes["context"]
    q_key, page_key = random_arrays.split(key)
    rows, first, tiles = _piece_rows(chunk, sizes["pieces"]), 0, []
    for piece, count in enumerate(rows):
        for done in range(0, count, TILE_ROWS):
            size = min(TILE_ROWS, count - done)
            tiles.append((first + done, size, piece, context - count + done))
        first += count
    tiles.append((0, 0, 0, 0))  # padding, as a step has it
    shape = (chunk, case.kv_heads, case.group, case.head_dim)
    q = random_arrays.normal(q_key, shape).astype(jnp.bfloat16)
    lens = jnp.full(len(rows), context, jnp.int32)
    pages = _make_pages(case, len(rows), context, lens, page_key)
    return {"q": q, "tiles": jnp.array(tiles, jnp.int32)} | pages


def _make_pages(
    case: Attention, rows: int, context: int, lens: Int[Array, " S"], key: Array
) -> Inputs:
    """A pool in which every row has pages of its own, anywhere, and other keys are not numbers."""
    width = math.ceil(context / case.page_size)
    count = rows * width + 2  # the null page, and one of nobody
    keys = random_arrays.split(key, 5)
    order = 1 + np.random.default_rng(count).permutation(count - 1)[: rows * width]
    table = jnp.asarray(order.reshape(rows, width), jnp.int32)
    needed = jnp.arange(width)[None, :] * case.page_size < lens[:, None]
    table = jnp.where(needed, table, 0)
    owned = jnp.zeros(count, bool).at[table].set(True)[:, None, None]
    pool = _pool(case, count)
    made: Inputs = {"table": table, "v": None, "k_scale": None, "v_scale": None, "sinks": None}
    quantised = case.pages != "bfloat16"
    for name, own, k in zip(("k", "v"), keys[:2], (pool.k, pool.v)):
        if k is None:
            continue
        values = random_arrays.normal(own, k.shape)
        # Values of pages are finite whosoever they are; so are integers, whose scales say NaN.
        unread = quantised or name == "v" or case.value_dim is not None
        values = jnp.where(owned[..., None] | unread, values * (30 if quantised else 1), jnp.nan)
        made[name] = (jnp.round(values) if quantised else values).astype(k.dtype)
    if quantised:
        for name, own in zip(("k_scale", "v_scale"), keys[2:4]):
            scales = random_arrays.uniform(own, pool.k.shape[:3], 0.02, 0.05)
            made[name] = jnp.where(owned, scales, jnp.nan)
    if case.sinks:
        made["sinks"] = random_arrays.normal(keys[4], (case.kv_heads, case.group))
    return made


def _pool(case: Attention, pages: int) -> Pool:
    """The pool's arrays, as their structs."""
    places = (pages, case.kv_heads, case.page_size)
    k = jax.ShapeDtypeStruct((*places, case.head_dim), jnp.dtype(case.pages))
    return Pool(k, k if case.value_dim is None else None)


def _how(case: Attention) -> dict[str, Any]:
    return {
        "scale": case.head_dim**-0.5,
        "value_dim": _value_dim(case),
        "window": case.window,
        "soft_cap": case.soft_cap,
    }


def _given(inputs: Inputs) -> Pool:
    return Pool(*(inputs[name] for name in Pool._fields))


def _run_decode(case: Attention, inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    arrays = (inputs["q"], _given(inputs), inputs["table"], inputs["lens"], inputs["sinks"])
    return triton_decode.paged_attention(*arrays, **_how(case), interpret=interpret, tiling=tiling)


def _run_prefill(case: Attention, inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    arrays = (inputs["q"], _given(inputs), inputs["table"], inputs["tiles"], inputs["sinks"])
    return triton_prefill.paged_prefill(*arrays, **_how(case), interpret=interpret, tiling=tiling)


def _run_hopper_decode(
    case: Attention, inputs: Inputs, interpret: bool, tiling: Tiling | None
) -> Array:
    arrays = (inputs[name] for name in ("q", "k", "v", "table", "lens", "sinks"))
    return mosaic_decode.paged_attention(*arrays, **_hopper_how(case), interpret=interpret)


def _run_hopper_prefill(
    case: Attention, inputs: Inputs, interpret: bool, tiling: Tiling | None
) -> Array:
    arrays = (inputs[name] for name in ("q", "k", "v", "table", "tiles", "sinks"))
    return mosaic_prefill.paged_prefill(*arrays, **_hopper_how(case), interpret=interpret)


def _hopper_how(case: Attention) -> dict[str, Any]:
    return {name: value for name, value in _how(case).items() if name != "value_dim"}


def _reference(case: Attention, inputs: Inputs) -> Float[Array, "T KV G vd"]:
    """Dense attention in float32, one tile after another; a decode row is a tile of one token."""
    q = inputs["q"]
    tiles = inputs.get("tiles")
    if tiles is None:
        lens = inputs["lens"]
        rows = jnp.arange(q.shape[0])
        tiles = jnp.stack([rows, (lens > 0).astype(jnp.int32), rows, lens - 1], axis=1)
        size = 1
    else:
        size = TILE_ROWS
    out = jnp.zeros((q.shape[0] + size, *q.shape[1:3], _how(case)["value_dim"]), jnp.float32)
    padded = jnp.concatenate([q, jnp.zeros((size, *q.shape[1:]), q.dtype)]).astype(jnp.float32)

    def one(out: Array, tile: Int[Array, " 4"]) -> tuple[Array, None]:
        first, count, row, position = tile
        own = lax.dynamic_slice_in_dim(padded, first, size)
        found = _dense(case, inputs, own, row, position + jnp.arange(size))
        real = (jnp.arange(size) < count)[:, None, None, None]
        old = lax.dynamic_slice_in_dim(out, first, size)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(real, found, old), first, 0), None

    return lax.scan(one, out, tiles)[0][: q.shape[0]]


def _dense(
    case: Attention,
    inputs: Inputs,
    q: Float[Array, "R KV G hd"],
    row: Int[Array, ""],
    positions: Int[Array, " R"],
) -> Float[Array, "R KV G vd"]:
    """Queries of one row of the page table, at their positions, over all of its keys."""
    pages = inputs["table"][row]
    where = jnp.arange(pages.shape[0] * case.page_size)
    seen = where[None, :] <= positions[:, None]
    if case.window is not None:
        seen &= where[None, :] > positions[:, None] - case.window

    def gathered(name: str) -> Float[Array, "T KV d"]:
        array = inputs[name][pages].astype(jnp.float32)
        if inputs[f"{name}_scale"] is not None:
            array = array * inputs[f"{name}_scale"][pages][..., None]
        array = jnp.moveaxis(array, 2, 1).reshape(-1, case.kv_heads, array.shape[-1])
        return jnp.where(seen.any(0)[:, None, None], array, 0)  # what nobody sees may be NaN

    k = gathered("k")
    v = k[..., : case.value_dim] if inputs["v"] is None else gathered("v")
    scores = jnp.einsum("rkgd,tkd->rkgt", q, k, precision="highest") * case.head_dim**-0.5
    if case.soft_cap is not None:
        scores = jnp.tanh(scores / case.soft_cap) * case.soft_cap
    scores = jnp.where(seen[:, None, None, :], scores, MASKED)
    top = scores.max(-1, keepdims=True)
    sinks = None if inputs["sinks"] is None else inputs["sinks"][None, :, :, None]
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks - top))
    return jnp.einsum("rkgt,tkd->rkgd", weights / total, v, precision="highest")
