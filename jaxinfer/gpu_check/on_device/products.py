"""Products with quantised weights and with experts' matrices on a device: some of the shapes and
kinds that `matmul_kernels` compiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.gpu_check.matmul_kernels import (
    AWQ,
    FLOAT8,
    FLOAT8_BLOCKS,
    GGUF,
    INT4,
    INT8,
    LLAMA,
    MIXTRAL,
    MXFP4,
    PLAIN,
    QWEN,
    SHAPES,
    V3,
    V3_UP,
    W8A8,
    W8A8_BLOCKS,
    W8A8_FLOAT8,
    Stored,
)
from jaxinfer.gpu_check.on_device.registry import DeviceCase, Inputs, Purpose, Sizes
from jaxinfer.roofline import kernels
from jaxinfer.roofline.kernels import Storage, Work
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantised_matmul import QuantisedWeight, dequantise, quantised_matmul
from pallas_kernels.quantised_matmul import reference as plain
from pallas_kernels.quantised_matmul.dispatch import HOPPER, STORED
from pallas_kernels.tuning import Tiling

TOLERANCE = 2e-2  # sums in float32, rounded to 8 bits of mantissa
# What is run: the tokens of a step, and of experts how many each token has.
DENSE = ((LLAMA, INT8, 16), (LLAMA, INT4, 64), (LLAMA, AWQ, 16), (LLAMA, GGUF, 64),
         (LLAMA, MXFP4, 64), (LLAMA, FLOAT8, 64),
         (LLAMA, W8A8, 512), (LLAMA, W8A8_FLOAT8, 512), (V3, FLOAT8_BLOCKS, 32),
         (V3, W8A8_BLOCKS, 512))  # fmt: skip
EXPERTS = ((MIXTRAL, PLAIN, 64, 2), (QWEN, AWQ, 64, 8), (V3_UP, FLOAT8_BLOCKS, 64, 8))


def product_cases() -> Iterator[DeviceCase]:
    """All of `DENSE`, by Hopper's own kernel too where it takes them, and of `EXPERTS`."""
    for models, stored, tokens in DENSE:
        case = _case("matmul", models, stored, tokens, 1)
        yield case
        if stored in (W8A8_FLOAT8, W8A8_BLOCKS):
            yield dataclasses.replace(
                case,
                kernel=f"{case.kernel}, mosaic",
                sizes={**case.sizes, "tiny": {**case.sizes["tiny"], "tokens": 66}},
                run=functools.partial(_run, body="mosaic"),
                oldest=HOPPER,
                newest=HOPPER,
            )
    for models, stored, tokens, top_k in EXPERTS:
        yield _case("experts' matmul", models, stored, tokens, top_k)


def _case(kernel: str, models: str, stored: Stored, tokens: int, top_k: int) -> DeviceCase:
    *experts, columns, outputs = SHAPES[models]
    full = {"tokens": tokens, "experts": experts[0] if experts else 0}
    sizes: dict[Purpose, Sizes] = {
        "tiny": {"tokens": min(tokens, 4), "experts": min(full["experts"], 3)}
        | {"columns": 256, "outputs": 128},
        "check": full | {"columns": min(columns, 1024), "outputs": min(outputs, 1024)},
        "time": full | {"columns": columns, "outputs": outputs},
    }
    return DeviceCase(
        kernel=f"{kernel}, {stored.name}",
        case=f"{models}, {tokens} tokens",
        sizes=sizes,
        make=functools.partial(_make, stored, top_k),
        run=_run,
        reference=_reference,
        work=functools.partial(_work, stored, top_k),
        tolerance=TOLERANCE,
        oldest=STORED[stored.values],
    )


def _work(stored: Stored, top_k: int, sizes: Sizes) -> Work:
    rows, group = stored.block
    shape = sizes["outputs"], sizes["columns"]
    storage = None
    if stored.bits < 16:
        scale_bits = 32 + (8 * jnp.dtype(stored.zeros).itemsize if stored.zeros else 0)
        rounded = {"as_given": None, "float8_e4m3fn": "float8"}
        unit = rounded.get(stored.activations, stored.activations)
        storage = Storage(stored.bits, group or None, rows, scale_bits, unit)
    if not sizes["experts"]:
        return kernels.matmul("", sizes["tokens"], *shape, storage=storage)
    routed = (sizes["tokens"], sizes["experts"], top_k)
    return kernels.grouped_matmul("", *routed, *shape, storage=storage)


def _make(stored: Stored, top_k: int, sizes: Sizes, key: Array) -> Inputs:
    x_key, *keys = jax.random.split(key, 4)
    experts, rows = sizes["experts"], sizes["tokens"] * top_k
    shape = ((experts,) if experts else ()) + (sizes["outputs"], sizes["columns"])
    x = jax.random.normal(x_key, (rows, sizes["columns"]), jnp.float32)
    made: Inputs = {"x": x.astype(jnp.bfloat16), "weight": _weight(stored, shape, keys)}
    if experts:  # as a fair router would choose
        chosen = np.random.default_rng(rows).integers(0, experts, rows)
        made["group_sizes"] = jnp.asarray(np.bincount(chosen, minlength=experts), jnp.int32)
    return made


def _weight(stored: Stored, shape: tuple[int, ...], keys: list[Array]) -> Array | QuantisedWeight:
    *experts, outputs, columns = shape
    dtype = jnp.dtype(stored.values)
    if stored.bits == 16:
        return jax.random.normal(keys[0], shape, jnp.float32).astype(dtype)
    rows, group = stored.block
    group = group or columns
    places = (*experts, columns // group, -(-outputs // rows))
    packed = (*experts, outputs, columns * stored.bits // 8)
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        values = jax.random.randint(keys[0], packed, low, high + 1).astype(dtype)
    else:
        values = jax.random.normal(keys[0], packed, jnp.float32).astype(dtype)
    scales = jax.random.uniform(keys[1], places, jnp.float32, 0.01, 0.02)
    zeros = None
    if stored.zeros:
        zeros = jax.random.uniform(keys[2], places, jnp.float32, 0, 16).astype(stored.zeros)
    return QuantisedWeight(
        values,
        scales,
        zeros,
        bits=stored.bits,
        block=(rows, group),
        activations=stored.activations,
        codes=stored.codes,
    )


def _run(inputs: Inputs, interpret: bool, tiling: Tiling | None, body: str = "triton") -> Array:
    how: Any = f"{body}_interpreted" if interpret else body
    if "group_sizes" not in inputs:
        return quantised_matmul(inputs["x"], inputs["weight"], implementation=how)
    given = (inputs["x"], inputs["weight"], inputs["group_sizes"])
    return grouped_matmul(*given, implementation=how)


def _reference(inputs: Inputs) -> Float[Array, "R N"]:
    """In float32; of experts every row times each one's matrix, of which its own is taken."""
    x, weight = inputs["x"].astype(jnp.float32), inputs["weight"]
    if "group_sizes" not in inputs:
        if weight.activations != "as_given":
            return plain.quantised_matmul(inputs["x"], weight, out_dtype=jnp.float32)
        return jnp.matmul(x, dequantise(weight).T, precision="highest")
    own = jnp.searchsorted(jnp.cumsum(inputs["group_sizes"]), jnp.arange(len(x)), side="right")

    def one(
        out: Float[Array, "R N"], expert: tuple[Array, Array | QuantisedWeight]
    ) -> tuple[Array, None]:
        index, matrix = expert
        exact = dequantise(matrix) if isinstance(matrix, QuantisedWeight) else matrix
        product = jnp.matmul(x, exact.astype(jnp.float32).T, precision="highest")
        return jnp.where((own == index)[:, None], product, out), None

    out = jnp.zeros((len(x), weight.shape[1]), jnp.float32)
    return lax.scan(one, out, (jnp.arange(weight.shape[0]), weight))[0]
