"""Offsets into arrays as Triton gets them from the installed jax: none is too narrow for its array.

Pallas chooses 32 or 64 bits by an array's bytes, while offsets count elements and have a sign.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.dispatch import MOST_BYTES, MOST_ELEMENTS, out_of_reach
from pallas_kernels.latent_attention import triton_write as latent_write
from pallas_kernels.paged_attention import triton_decode, triton_prefill, triton_write
from pallas_kernels.paged_attention.triton_blocks import Pool

HOPPER = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
)
GIB = 1 << 30
KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM = 8, 4, 16, 128
OF_PAGE = KV_HEADS * PAGE_SIZE * HEAD_DIM  # elements
TOKENS, ROTATED = 512, 32

Array = jax.ShapeDtypeStruct


def pages_of(size: int, dtype) -> int:
    return size // OF_PAGE // jnp.dtype(dtype).itemsize


def pool_of(size: int, dtype) -> Pool:
    """A layer's keys of so many bytes, as many values, and the scales of those in 8 bits."""
    shape = (pages_of(size, dtype), KV_HEADS, PAGE_SIZE)
    numbers, scales = Array((*shape, HEAD_DIM), dtype), None
    if jnp.dtype(dtype).itemsize == 1:
        scales = Array(shape, jnp.float32)
    return Pool(numbers, numbers, scales, scales)


def ints(*shape: int) -> Array:
    return Array(shape, jnp.int32)


def decode(size: int, dtype):
    q = Array((TOKENS, KV_HEADS, GROUP, HEAD_DIM), jnp.bfloat16)
    arrays = (q, pool_of(size, dtype), ints(TOKENS, 64), ints(TOKENS), None)
    how = {"scale": 1.0, "value_dim": HEAD_DIM, "window": 99, "soft_cap": None}
    return triton_decode.program.trace(*arrays, **how)


def prefill(size: int, dtype):
    q = Array((TOKENS, KV_HEADS, GROUP, HEAD_DIM), jnp.bfloat16)
    arrays = (q, pool_of(size, dtype), ints(16, 64), ints(16, 4), None)
    how = {"scale": 1.0, "value_dim": HEAD_DIM, "window": None, "soft_cap": None}
    return triton_prefill.program.trace(*arrays, **how)


def write(size: int, dtype):
    qkv = Array((TOKENS, KV_HEADS, GROUP + 2, HEAD_DIM), jnp.bfloat16)
    pools = tuple(array for array in pool_of(size, dtype) if array is not None)
    arrays = (qkv, (angles(),) * 2, pools, ints(TOKENS), ints(TOKENS), None)
    return triton_write.program.trace(*arrays, how=triton_write.Heads("halves"))


def write_latents(size: int, dtype):
    width = 512 + 2 * ROTATED
    projected = Array((1, TOKENS, width), jnp.float32)
    pool = Array((size // (64 * width * jnp.dtype(dtype).itemsize), 1, 64, width), dtype)
    norms = (None, Array((512,), jnp.bfloat16))
    arrays = ((projected,), norms, (angles(),) * 2, pool, ints(TOKENS), ints(TOKENS))
    how = {"pairs": "neighbours", "eps": 1e-6, "dtype": jnp.bfloat16}
    return latent_write.program.trace(*arrays, **how)


def angles() -> Array:
    return Array((TOKENS, ROTATED), jnp.float32)


def offsets(traced, monkeypatch, capsys) -> list[tuple[int, int]]:
    """Of every access of a kernel: elements of the array, and bits of the offset into it."""
    with monkeypatch.context() as patch, use_abstract_mesh(HOPPER):
        patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
        text = traced().lower(lowering_platforms=("cuda",)).as_text()
    module = capsys.readouterr().out.split("The Triton module")[1]
    (call,) = re.findall(r"custom_call @\S*triton.*\} : (.*)", text)
    sizes = [
        math.prod(map(int, re.findall(r"(\d+)x", array)))
        for array in re.findall(r"tensor<([^>]*)>", call)
    ]
    roots = {f"arg{i}": size for i, size in enumerate(sizes)}
    for name, arg in re.findall(r"%(\w+) = tt\.splat %(arg\d+) ", module):
        roots[name] = roots[arg]
    accesses = re.findall(r"tt\.addptr %(\w+), %\w+ : .*, (?:tensor<[x\d]*x)?i(\d+)", module)
    assert len(accesses) == module.count("tt.addptr") > 0
    return [(roots[name], int(bits)) for name, bits in accesses]


def reach(bits: int) -> int:
    """Elements that signed offsets of so many bits tell apart, from 0 on."""
    return 1 << (bits - 1)


@pytest.mark.parametrize(
    ("kernel", "size", "dtype"),
    [
        (decode, 5 * GIB, jnp.int8),
        (decode, 5 * GIB, jnp.bfloat16),
        (decode, MOST_BYTES, jnp.bfloat16),
        (decode, MOST_ELEMENTS, jnp.float8_e4m3fn),
        (prefill, 5 * GIB, jnp.int8),
        (write, 5 * GIB, jnp.int8),
        (write_latents, 5 * GIB, jnp.bfloat16),
    ],
    ids=lambda x: f"{x / GIB:g} GiB" if isinstance(x, int) else x.__name__,
)
def test_offsets_reach_all_of_every_array(kernel, size, dtype, monkeypatch, capsys):
    found = offsets(lambda: kernel(size, dtype), monkeypatch, capsys)
    assert max(elements for elements, _ in found) > 0.99 * size // jnp.dtype(dtype).itemsize
    for elements, bits in found:
        assert elements <= reach(bits), (elements, bits)


@pytest.mark.parametrize("size", [MOST_ELEMENTS + OF_PAGE, MOST_BYTES])
def test_pools_that_offsets_would_not_reach_are_those_that_are_refused(size, monkeypatch, capsys):
    assert out_of_reach(size, 1)
    found = offsets(lambda: decode(size, jnp.int8), monkeypatch, capsys)
    assert any(elements > reach(bits) for elements, bits in found)
