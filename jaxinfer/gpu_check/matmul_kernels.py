"""Products with quantised weights and with experts' matrices as models have them, for the compiler
to judge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.kernel_case import KernelCase, abstract
from pallas_kernels.grouped_matmul import triton as grouped
from pallas_kernels.quantised_matmul import (
    Activations,
    Codes,
    QuantisedWeight,
    mosaic,
    triton_rounding,
)
from pallas_kernels.quantised_matmul import triton as quantised
from pallas_kernels.quantised_matmul.dispatch import HOPPER, STORED


@dataclass(frozen=True, slots=True)
class Stored:
    """How a weight is stored: see `QuantisedWeight`; a `block` without columns has all of them."""

    name: str
    values: str
    block: tuple[int, int] = (1, 0)
    bits: int = 8
    zeros: str = ""  # their dtype
    activations: Activations = "as_given"
    codes: Codes = "integers"


PLAIN = Stored("bfloat16", "bfloat16", bits=16)
INT8 = Stored("int8", "int8")
INT4 = Stored("int4 in groups of 128", "uint8", (1, 128), bits=4)
AWQ = Stored("int4 in groups of 128, zero points", "uint8", (1, 128), bits=4, zeros="uint8")
INT4_32 = Stored("int4 in groups of 32", "uint8", (1, 32), bits=4)
GGUF = Stored("int4 in groups of 32, float zero points", "uint8", (1, 32), bits=4, zeros="float32")
MXFP4 = Stored("e2m1 in groups of 32", "uint8", (1, 32), bits=4, codes="e2m1")
FLOAT8 = Stored("float8", "float8_e4m3fn")
FLOAT8_BLOCKS = Stored("float8 in blocks of 128 × 128", "float8_e4m3fn", (128, 128))
W8A8 = Stored("int8 by int8", "int8", activations="int8")
W8A8_FLOAT8 = Stored("float8 by float8", "float8_e4m3fn", activations="float8_e4m3fn")
W8A8_BLOCKS = Stored(
    "float8 by float8, blocks", "float8_e4m3fn", (128, 128), activations="float8_e4m3fn"
)

FLOAT8_PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"

LLAMA, V3 = "Llama 3 8B, gate and up", "DeepSeek V3 over 8 GPUs, o"
LLAMA_DOWN = "Llama 3 8B, down"  # whose columns several programs share
MIXTRAL, QWEN = "Mixtral 8x7B, gate and up", "Qwen3 30B A3B, gate and up"
V3_UP, V3_DOWN = "DeepSeek V3 over 8 GPUs, gate and up", "DeepSeek V3 over 8 GPUs, down"
# Columns and outputs, after the number of experts if there are any.
SHAPES: dict[str, tuple[int, ...]] = {
    LLAMA: (4096, 28672),
    LLAMA_DOWN: (14336, 4096),
    V3: (2048, 7168),
    MIXTRAL: (8, 4096, 28672),
    QWEN: (128, 2048, 1536),
    V3_UP: (256, 7168, 512),
    V3_DOWN: (256, 256, 7168),
    "gpt-oss 20B, down": (32, 2880, 2880),
}
# Every block size of the kernels, of every kind once or twice. Of experts: rows times top-k.
MATMUL: tuple[tuple[str, Stored, tuple[int, ...]], ...] = (
    (LLAMA, INT8, (16, 512)),
    (LLAMA, INT4, (16, 64, 512)),
    (LLAMA, AWQ, (16, 512)),
    (LLAMA, INT4_32, (16,)),
    (LLAMA, GGUF, (16, 64, 512)),
    (LLAMA, MXFP4, (16, 512)),
    (LLAMA, FLOAT8, (64,)),
    (LLAMA, W8A8, (16, 512)),
    (LLAMA, W8A8_FLOAT8, (512,)),
    (LLAMA_DOWN, INT8, (64,)),
    (LLAMA_DOWN, INT4, (64,)),
    (LLAMA_DOWN, FLOAT8, (16,)),
    (LLAMA_DOWN, W8A8, (64,)),
    (LLAMA_DOWN, W8A8_FLOAT8, (16, 64)),
    (V3, FLOAT8_BLOCKS, (32, 512)),
    (V3, W8A8_BLOCKS, (512,)),
    (MIXTRAL, PLAIN, (128, 1024)),
    (QWEN, PLAIN, (512, 4096)),
    (QWEN, AWQ, (512,)),
    (QWEN, W8A8, (4096,)),
    (V3_UP, FLOAT8_BLOCKS, (512, 16384)),
    (V3_DOWN, FLOAT8_BLOCKS, (512,)),
    (QWEN, GGUF, (512,)),
    ("gpt-oss 20B, down", PLAIN, (256,)),
    ("gpt-oss 20B, down", MXFP4, (256, 8192)),
)


ROUNDED: tuple[Activations, ...] = ("int8", "int8_pair", "float8_e4m3fn")


def matmul_cases() -> Iterator[KernelCase]:
    """All of `MATMUL`, by Hopper's own kernel too where it takes them, and what rounds rows."""
    for models, stored, counts in MATMUL:
        for rows in counts:
            *experts, columns, outputs = SHAPES[models]
            kernel = "experts' matmul" if experts else "matmul"
            of, shape = f"{models}, {rows} rows", " × ".join(map(str, (*experts, columns, outputs)))
            yield KernelCase(
                f"{kernel}, {stored.name}",
                of,
                shape,
                functools.partial(_lower, models, stored, rows),
                entry="grouped_matmul" if experts else "quantised_matmul",
                oldest=STORED[stored.values],
            )
            if stored in (W8A8_FLOAT8, W8A8_BLOCKS) and rows > mosaic.FEW_ROWS:
                yield KernelCase(
                    f"{kernel}, {stored.name}, Mosaic",
                    of,
                    shape,
                    functools.partial(_lower_hopper, models, stored, rows),
                    entry="quantised_matmul_mosaic",
                    oldest=HOPPER,
                    newest=HOPPER,  # compiling it for another architecture aborts the process
                    instructions=(FLOAT8_PRODUCT, "cp.async.bulk.tensor"),
                )
    for activations in ROUNDED:
        yield KernelCase(
            "rounded rows",
            activations,
            "64 × 14336",
            functools.partial(_lower_rounding, activations),
            entry="rounded_rows",
            oldest=STORED["float8_e4m3fn" if activations == "float8_e4m3fn" else "int8"],
            tensor_cores=False,
        )


def _lower(models: str, stored: Stored, rows: int, mesh: Mesh) -> Any:
    *experts, columns, outputs = SHAPES[models]
    x = abstract(mesh, jnp.bfloat16, rows, columns)
    weight = _weight(stored, mesh, *experts, outputs, columns)
    if not experts:
        return quantised.program.lower(x, weight, out_dtype=jnp.bfloat16)
    return grouped.program.lower(x, weight, abstract(mesh, jnp.int32, *experts))


def _lower_hopper(models: str, stored: Stored, rows: int, mesh: Mesh) -> Any:
    columns, outputs = SHAPES[models]
    x, weight = abstract(mesh, jnp.bfloat16, rows, columns), _weight(stored, mesh, outputs, columns)
    return mosaic.program.lower(x, weight, out_dtype=jnp.bfloat16)


def _lower_rounding(activations: Activations, mesh: Mesh) -> Any:
    return triton_rounding.program.lower(abstract(mesh, jnp.bfloat16, 64, 14336), activations)


def _weight(stored: Stored, mesh: Mesh, *shape: int) -> Any:
    *experts, outputs, columns = shape
    dtype = jnp.dtype(stored.values)
    if stored.bits == 16:
        return abstract(mesh, dtype, *shape)
    rows, group = stored.block
    group = group or columns
    scales = (*experts, columns // group, -(-outputs // rows))
    return QuantisedWeight(
        abstract(mesh, dtype, *experts, outputs, columns * stored.bits // 8),
        abstract(mesh, jnp.float32, *scales),
        abstract(mesh, jnp.dtype(stored.zeros), *scales) if stored.zeros else None,
        bits=stored.bits,
        block=(rows, group),
        activations=stored.activations,
        codes=stored.codes,
    )
