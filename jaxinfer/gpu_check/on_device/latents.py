"""The kernels around latent attention on a device, against plain jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxinfer.gpu_check.latent_kernels import LATENTS, PAGE_SIZE, Latents
from jaxinfer.gpu_check.on_device import random_arrays
from jaxinfer.gpu_check.on_device.registry import DeviceCase, Inputs, Purpose, Sizes
from jaxinfer.models.layers import linear_by_head, rms_norm
from jaxinfer.roofline.kernels import Work
from pallas_kernels.latent_attention import absorbed_queries, norm_and_write
from pallas_kernels.paged_attention import Pairs, apply_rope, write_latent
from pallas_kernels.paged_attention.splits import Parts
from pallas_kernels.paged_attention.triton_combine import combine
from pallas_kernels.tuning import Tiling

EPS, TOLERANCE = 1e-6, 2e-2  # products of 8 bits of mantissa, summed in float32
PAIRS: Pairs = "neighbours"


def latent_device_cases() -> Iterator[DeviceCase]:
    """Norm and write, queries, and values of parts, for each of `LATENTS`."""
    for case in LATENTS:
        sizes: dict[Purpose, Sizes] = {
            "tiny": {"tokens": 3, "pages": 8},
            "check": {"tokens": case.tokens, "pages": 512},
            "time": {"tokens": case.tokens, "pages": 2048},
        }
        yield _case(case, "norm and write", sizes, _make_latents, _write, _written, _write_work)
        yield _case(case, "queries", sizes, _make_queries, _queries, _absorbed, _queries_work)
        yield _case(case, "values of parts", sizes, _make_parts, _values, _combined, _values_work)


def _case(
    case: Latents,
    what: str,
    sizes: dict[Purpose, Sizes],
    make: Callable[..., Inputs],
    run: Callable[..., object],
    reference: Callable[..., object],
    work: Callable[[Latents, int], float],
) -> DeviceCase:
    return DeviceCase(
        kernel=f"latents, {what}",
        case=case.models,
        sizes=sizes,
        make=functools.partial(make, case),
        run=run,
        reference=reference,
        work=lambda sizes: Work("latents", work(case, sizes["tokens"])),
        tolerance=TOLERANCE,
        feed=_next if run is _write else None,
    )


def _normal(key: Array, dtype: str, *shape: int) -> Array:
    return random_arrays.normal(key, shape).astype(dtype)


def _angles(case: Latents, key: Array, tokens: int) -> Inputs:
    angles = random_arrays.uniform(key, (tokens, case.rope_dim // 2), 0.0, 100.0)
    return {"cos": jnp.cos(angles), "sin": jnp.sin(angles)}


def _next(inputs: Inputs, result: tuple[Array, ...]) -> Inputs:
    """The pool is updated in place: the next launch takes what the last one wrote."""
    return inputs | {"pool": result[-1]}


def _rounded_sum(parts: Array) -> Array:
    return parts.sum(axis=0).astype(jnp.bfloat16)


# -- Norm and write --------------------------------------------------------------------------------


def _make_latents(case: Latents, sizes: Sizes, key: Array) -> Inputs:
    keys, tokens, pages = random_arrays.split(key, 5), sizes["tokens"], sizes["pages"]
    head_dim = case.kv_rank + case.rope_dim
    rng = np.random.default_rng(tokens)
    places = rng.permutation((pages - 1) * PAGE_SIZE)[:tokens]
    q_norm = _normal(keys[1], "bfloat16", case.q_rank) if case.q_rank else None
    return {
        "projected": _normal(keys[0], "float32", case.parts, tokens, case.q_rank + head_dim),
        "norms": (q_norm, _normal(keys[2], "bfloat16", case.kv_rank)),
        "pool": _normal(keys[3], "bfloat16", pages, 1, PAGE_SIZE, head_dim),
        "pages": jnp.asarray(1 + places // PAGE_SIZE, jnp.int32),
        "offsets": jnp.asarray(places % PAGE_SIZE, jnp.int32),
        **_angles(case, keys[4], tokens),
    }


def _write(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> tuple[Array, ...]:
    rotary = inputs["cos"], inputs["sin"]
    arrays = (inputs[name] for name in ("pool", "pages", "offsets"))
    low, pool = norm_and_write(
        *((inputs["projected"],), inputs["norms"], rotary, *arrays),
        pairs=PAIRS,
        eps=EPS,
        dtype=jnp.bfloat16,
        interpret=interpret,
    )
    return (pool,) if low is None else (low, pool)


def _written(inputs: Inputs) -> tuple[Array, ...]:
    whole, (q_norm, kv_norm) = _rounded_sum(inputs["projected"]), inputs["norms"]
    rank, q_rank = kv_norm.shape[0], 0 if q_norm is None else q_norm.shape[0]
    latent, key = whole[:, q_rank : q_rank + rank], whole[:, None, q_rank + rank :]
    key = apply_rope(key, inputs["cos"], inputs["sin"], PAIRS)
    keys = jnp.concatenate([rms_norm(latent, kv_norm, EPS)[:, None], key], axis=-1)
    pool = write_latent(inputs["pool"], inputs["pages"], inputs["offsets"], keys, rank)
    return (pool,) if q_norm is None else (rms_norm(whole[:, :q_rank], q_norm, EPS), pool)


def _write_work(case: Latents, tokens: int) -> float:
    width = case.q_rank + case.kv_rank + case.rope_dim
    return tokens * width * (4.0 * case.parts + 2)


# -- Queries ---------------------------------------------------------------------------------------


def _make_queries(case: Latents, sizes: Sizes, key: Array) -> Inputs:
    keys, width = random_arrays.split(key, 3), case.nope_dim + case.rope_dim
    weights = _normal(keys[1], "float32", case.heads, case.kv_rank, case.nope_dim)
    return {
        "q": _normal(keys[0], "float32", case.parts, sizes["tokens"], case.heads, width),
        "weights": (weights / case.nope_dim**0.5).astype(jnp.bfloat16),
        **_angles(case, keys[2], sizes["tokens"]),
    }


def _queries(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    rotary = inputs["cos"], inputs["sin"]
    return absorbed_queries(
        inputs["q"], inputs["weights"], rotary, pairs=PAIRS, interpret=interpret
    )


def _absorbed(inputs: Inputs) -> Array:
    q, weights = _rounded_sum(inputs["q"]), inputs["weights"]
    nope = weights.shape[2]
    turned = apply_rope(q[:, :, nope:], inputs["cos"], inputs["sin"], PAIRS)
    return jnp.concatenate([linear_by_head(q[:, :, :nope], weights), turned], axis=-1)


def _queries_work(case: Latents, tokens: int) -> float:
    given = tokens * (case.nope_dim + case.rope_dim) * 4.0 * case.parts
    taken = tokens * (case.kv_rank + case.rope_dim) * 2.0
    return case.heads * (given + taken + case.kv_rank * case.nope_dim * 2.0)


# -- Values of parts -------------------------------------------------------------------------------


def _make_parts(case: Latents, sizes: Sizes, key: Array) -> Inputs:
    keys, tokens = random_arrays.split(key, 4), sizes["tokens"]
    shape = (tokens, 1, case.splits, case.heads)
    weights = _normal(keys[3], "float32", case.heads, case.v_dim, case.kv_rank)
    return {
        "top": _normal(keys[0], "float32", *shape),
        "total": random_arrays.uniform(keys[1], shape, 1.0, 9.0),
        "values": _normal(keys[2], "float32", *shape, case.kv_rank),
        "lens": jnp.ones(tokens, jnp.int32).at[0].set(0),
        "weights": (weights / case.kv_rank**0.5).astype(jnp.bfloat16),
    }


def _values(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    parts = Parts(inputs["top"], inputs["total"], inputs["values"])
    how = {"group": inputs["top"].shape[3], "dtype": jnp.bfloat16, "interpret": interpret}
    return combine(parts, inputs["lens"], None, inputs["weights"], **how)[:, 0]


def _combined(inputs: Inputs) -> Array:
    shares = jnp.exp(inputs["top"] - inputs["top"].max(axis=2, keepdims=True))
    whole = (shares * inputs["total"]).sum(axis=2)[..., None]
    attended = (shares[..., None] * inputs["values"]).sum(axis=2) / whole
    attended = jnp.where(inputs["lens"][:, None, None, None] > 0, attended, 0)
    return linear_by_head(attended[:, 0].astype(jnp.bfloat16), inputs["weights"])


def _values_work(case: Latents, tokens: int) -> float:
    given = tokens * case.splits * (case.kv_rank + 2) * 4.0
    return case.heads * (given + tokens * case.v_dim * 2.0 + case.v_dim * case.kv_rank * 2.0)
