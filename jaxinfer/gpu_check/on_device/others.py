"""The sampler's threshold, and the kernel that norms, rotates and writes heads, on a device."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxinfer.gpu_check.on_device import random_arrays
from jaxinfer.gpu_check.on_device.registry import DeviceCase, Inputs, Sizes
from jaxinfer.gpu_check.other_kernels import VOCABULARIES, WRITES, Write
from jaxinfer.models.layers import rms_norm
from jaxinfer.roofline import kernels
from jaxinfer.roofline.kernels import AttentionShape, Work
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import rotate_and_write
from pallas_kernels.paged_attention.dispatch import PAGES
from pallas_kernels.sampling_threshold import sampling_threshold
from pallas_kernels.tuning import Tiling

EPS = 1e-6
TOP_K = 50
# Of so many tokens two, since rounding decides about those at the edge of min-p and top-p.
THRESHOLD_TOLERANCE = 2 / TOP_K
WRITE_TOLERANCE = 2e-2  # the last bit of bfloat16 after a norm and a rotation, or of what is stored


def other_device_cases() -> Iterator[DeviceCase]:
    """`VOCABULARIES`, and those of `WRITES` that are stored as they are computed."""
    for models, size in VOCABULARIES.items():
        yield DeviceCase(
            kernel="sampling threshold",
            case=models,
            sizes={
                "tiny": {"rows": 3, "vocabulary": 1000},
                "check": {"rows": 16, "vocabulary": size},
                "time": {"rows": 256, "vocabulary": size},
            },
            make=_make_logits,
            run=_run_threshold,
            reference=_threshold,
            compared=_kept,
            work=lambda sizes: kernels.sampler(sizes["rows"], sizes["vocabulary"]),
            tolerance=THRESHOLD_TOLERANCE,
        )
    for case in WRITES:
        if case.pages != "bfloat16":
            continue
        yield DeviceCase(
            kernel="rotation and write",
            case=case.models,
            sizes={
                "tiny": {"tokens": 4, "pages": 8},
                "check": {"tokens": 64, "pages": 128},
                "time": {"tokens": 64, "pages": 2048},
            },
            make=functools.partial(_make_heads, case),
            run=functools.partial(_run_write, case),
            reference=functools.partial(_written, case),
            work=functools.partial(_write_work, case),
            tolerance=WRITE_TOLERANCE,
            feed=lambda inputs, result: inputs | dict(zip(("k_pool", "v_pool"), result[1:])),
            oldest=PAGES[case.pages],
        )


def _make_logits(sizes: Sizes, key: Array) -> Inputs:
    rows, vocabulary = sizes["rows"], sizes["vocabulary"]
    return {
        "logits": 3 * random_arrays.normal(key, (rows, vocabulary)),
        "temperature": jnp.full(rows, 0.8, jnp.float32),
        "min_p": jnp.full(rows, 0.01, jnp.float32),
        "top_k": jnp.full(rows, TOP_K, jnp.int32),
        "top_p": jnp.full(rows, 0.9, jnp.float32),
    }


def _run_threshold(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    body: Implementation = "triton_interpreted" if interpret else "triton"
    return sampling_threshold(**inputs, implementation=body)


def _threshold(inputs: Inputs) -> Array:
    return sampling_threshold(**inputs, implementation="reference_static")


def _kept(inputs: Inputs, threshold: Array) -> Array:
    """How many tokens it leaves: any threshold between the same two tokens is as right."""
    logits = inputs["logits"]
    near = logits >= logits.max(axis=1, keepdims=True) - threshold[:, None]
    return near.sum(axis=1, dtype=jnp.float32)


def _write_work(case: Write, sizes: Sizes) -> Work:
    shape = AttentionShape(
        kv_heads=case.kv_heads, group=case.group, head_dim=case.head_dim, value_dim=case.head_dim
    )
    return kernels.kv_write(shape, sizes["tokens"])


def _make_heads(case: Write, sizes: Sizes, key: Array) -> Inputs:
    tokens, pages, keys = sizes["tokens"], sizes["pages"], random_arrays.split(key, 8)
    half = (case.rotary_dim or case.head_dim) // 2
    angles = random_arrays.uniform(keys[0], (tokens, half), 0.0, 100.0)
    pool = (pages, case.kv_heads, case.page_size, case.head_dim)
    rng = np.random.default_rng(tokens)

    def normal(own: Array, *shape: int) -> Array:
        return random_arrays.normal(own, shape).astype(jnp.bfloat16)

    made: Inputs = {
        "q": normal(keys[1], tokens, case.kv_heads, case.group, case.head_dim),
        "k": normal(keys[2], tokens, case.kv_heads, case.head_dim),
        "v": normal(keys[3], tokens, case.kv_heads, case.head_dim),
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "k_pool": normal(keys[4], *pool),
        "v_pool": normal(keys[5], *pool),
        "pages": jnp.asarray(1 + rng.permutation(pages - 1)[:tokens], jnp.int32),
        "offsets": jnp.asarray(rng.integers(0, case.page_size, tokens), jnp.int32),
        "norms": None,
    }
    if case.normed:
        made["norms"] = normal(keys[6], case.head_dim), normal(keys[7], case.head_dim)
    return made


def _run_write(
    case: Write, inputs: Inputs, interpret: bool, tiling: Tiling | None
) -> tuple[Array, ...]:
    body: Implementation = "triton_interpreted" if interpret else "triton"
    return _call(case, inputs, inputs["q"], inputs["k"], inputs["norms"], body)


def _written(case: Write, inputs: Inputs) -> tuple[Array, ...]:
    """By separate operations."""
    heads = [inputs["q"], inputs["k"]]
    for i, weight in enumerate(inputs["norms"] or ()):
        flat = rms_norm(heads[i].reshape(-1, case.head_dim), weight, EPS)
        heads[i] = flat.reshape(heads[i].shape)
    q, k = heads
    return _call(case, inputs, q, k, None, "reference")


def _call(
    case: Write,
    inputs: Inputs,
    q: Array,
    k: Array,
    norms: tuple[Array, Array] | None,
    body: Implementation,
) -> tuple[Array, ...]:
    q, pools = rotate_and_write(
        *(q, k, inputs["v"], (inputs["cos"], inputs["sin"])),
        *((inputs["k_pool"], inputs["v_pool"]), inputs["pages"], inputs["offsets"], norms),
        pairs=case.pairs,
        eps=EPS,
        implementation=body,
    )
    return q, *pools
