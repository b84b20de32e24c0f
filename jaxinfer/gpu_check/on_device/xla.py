"""What XLA itself computes in a step, held against the same floors: products with weights and with
experts' weights, and writes into pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.gpu_check.on_device import random_arrays
from jaxinfer.gpu_check.on_device.registry import DeviceCase, Inputs, Purpose, Sizes
from jaxinfer.known_models import known_model
from jaxinfer.models.layers import linear
from jaxinfer.roofline import kernels
from jaxinfer.roofline.kernels import AttentionShape, Work
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_attention import write_kv
from pallas_kernels.tuning import Tiling

DTYPE = jnp.bfloat16
TOLERANCE = 1e-2  # sums in float32, rounded to 8 bits of mantissa
PAGES = AttentionShape(kv_heads=8, group=4, head_dim=128, value_dim=128)


def xla_cases() -> Iterator[DeviceCase]:
    """Products of Llama 3 8B for decode and a chunk, Mixtral's experts, writes of 64 rows."""
    llama, mixtral = known_model("llama-3-8b"), known_model("mixtral-8x7b")
    assert mixtral.moe is not None
    width, inner = llama.hidden_size, llama.intermediate_size
    for rows, what in ((64, "decode"), (2048, "a chunk")):
        for name, outputs, inputs in (("gate and up", 2 * inner, width), ("down", width, inner)):
            yield _product(f"Llama 3 8B, {name}, {what}", rows, outputs, inputs)
    yield _product("Llama 3 8B, head, decode", 64, llama.vocab_size, width)
    experts, top_k = mixtral.moe.num_experts, mixtral.moe.top_k
    yield _experts("Mixtral 8x7B, gate and up, decode", 64, experts, top_k, 2 * inner, width)
    yield DeviceCase(
        kernel="KV write, XLA",
        case="Llama 3 8B, decode",
        sizes={
            "tiny": {"tokens": 4, "pages": 8},
            "check": {"tokens": 64, "pages": 128},
            "time": {"tokens": 64, "pages": 2048},
        },
        make=_make_write,
        run=_run_write,
        reference=_write_one_by_one,
        work=lambda sizes: kernels.kv_write(PAGES, sizes["tokens"]),
        tolerance=0.0,
        feed=lambda inputs, written: inputs | dict(zip(("k_pool", "v_pool"), written)),
    )


def _product(case: str, rows: int, outputs: int, inputs: int) -> DeviceCase:
    full = {"rows": rows, "outputs": outputs, "inputs": inputs}
    return DeviceCase(
        kernel="product, XLA",
        case=case,
        sizes=_shrunk(full, "outputs", "inputs"),
        make=_make_product,
        run=_run_product,
        reference=_exact_product,
        work=lambda sizes: kernels.matmul("", sizes["rows"], sizes["outputs"], sizes["inputs"]),
        tolerance=TOLERANCE,
    )


def _experts(
    case: str, tokens: int, experts: int, top_k: int, outputs: int, inputs: int
) -> DeviceCase:
    full = {"tokens": tokens, "outputs": outputs, "inputs": inputs}

    def work(sizes: Sizes) -> Work:
        shape = (sizes["tokens"], experts, top_k, sizes["outputs"], sizes["inputs"])
        return kernels.grouped_matmul("", *shape)

    return DeviceCase(
        kernel="experts' product, XLA",
        case=case,
        sizes=_shrunk(full, "outputs", "inputs"),
        make=functools.partial(_make_experts, experts, top_k),
        run=_run_experts,
        reference=_each_expert,
        work=work,
        tolerance=TOLERANCE,
    )


def _shrunk(full: Sizes, *names: str) -> dict[Purpose, Sizes]:
    """The full sizes, and those for results and dry runs with these sizes smaller."""

    def at_most(most: int) -> Sizes:
        return {name: min(size, most) if name in names else size for name, size in full.items()}

    tiny = {name: min(size, 64) for name, size in full.items()}
    return {"tiny": tiny, "check": at_most(1024), "time": full}


def _normal(key: Array, *shape: int) -> Array:
    return random_arrays.normal(key, shape).astype(DTYPE)


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _make_product(sizes: Sizes, key: Array) -> Inputs:
    x, weight = random_arrays.split(key)
    return {
        "x": _normal(x, sizes["rows"], sizes["inputs"]),
        "weight": _normal(weight, sizes["outputs"], sizes["inputs"]),
    }


def _run_product(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    return linear(inputs["x"], inputs["weight"])


def _exact_product(inputs: Inputs) -> Float[Array, "R N"]:
    x, weight = _float32(inputs["x"]), _float32(inputs["weight"])
    return jnp.matmul(x, weight.T, precision="highest")


def _make_experts(experts: int, top_k: int, sizes: Sizes, key: Array) -> Inputs:
    x, weight = random_arrays.split(key)
    rows = sizes["tokens"] * top_k
    chosen = np.random.default_rng(rows).integers(0, experts, rows)  # as a fair router would
    return {
        "x": _normal(x, rows, sizes["inputs"]),
        "weight": _normal(weight, experts, sizes["outputs"], sizes["inputs"]),
        "group_sizes": jnp.asarray(np.bincount(chosen, minlength=experts), jnp.int32),
    }


def _run_experts(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> Array:
    given = (inputs["x"], inputs["weight"], inputs["group_sizes"])
    return grouped_matmul(*given, implementation="ragged")


def _each_expert(inputs: Inputs) -> Float[Array, "R N"]:
    """Every row times every expert's matrix, of which its own is taken."""
    x, ends = _float32(inputs["x"]), jnp.cumsum(inputs["group_sizes"])
    own = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")

    def one(out: Array, expert: Any) -> tuple[Array, None]:
        index, weight = expert
        product = jnp.matmul(x, _float32(weight).T, precision="highest")
        return jnp.where((own == index)[:, None], product, out), None

    weights = inputs["weight"]
    out = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32)
    return lax.scan(one, out, (jnp.arange(weights.shape[0]), weights))[0]


def _make_write(sizes: Sizes, key: Array) -> Inputs:
    tokens, pages, keys = sizes["tokens"], sizes["pages"], random_arrays.split(key, 4)
    pool = (pages, PAGES.kv_heads, PAGES.page_size, PAGES.head_dim)
    new = (tokens, PAGES.kv_heads, PAGES.head_dim)
    rng = np.random.default_rng(tokens)
    return {
        "k_pool": _normal(keys[0], *pool),
        "v_pool": _normal(keys[1], *pool),
        "k": _normal(keys[2], *new),
        "v": _normal(keys[3], *new),
        "pages": jnp.asarray(1 + rng.permutation(pages - 1)[:tokens], jnp.int32),
        "offsets": jnp.asarray(rng.integers(0, PAGES.page_size, tokens), jnp.int32),
    }


def _run_write(inputs: Inputs, interpret: bool, tiling: Tiling | None) -> tuple[Array, ...]:
    new = (inputs[name] for name in ("pages", "offsets", "k", "v"))
    return write_kv((inputs["k_pool"], inputs["v_pool"]), *new)


def _write_one_by_one(inputs: Inputs) -> tuple[Array, ...]:
    def write(pool: Array, new: Array) -> Array:
        def one(pool: Array, token: Any) -> tuple[Array, None]:
            page, offset, values = token
            return lax.dynamic_update_slice(pool, values[None, :, None], (page, 0, offset, 0)), None

        return lax.scan(one, pool, (inputs["pages"], inputs["offsets"], new))[0]

    return write(inputs["k_pool"], inputs["k"]), write(inputs["v_pool"], inputs["v"])
