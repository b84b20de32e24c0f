"""Whatever orders copies, writes and products in Hopper's own kernels is needed: with any of these
calls left out, the interpreter's race detector objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from quantised_weights import KINDS, random_weight
from wgmma_races import wgmma_reads_checked

from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill
from pallas_kernels.quantised_matmul import mosaic as mosaic_matmul

ORDERING = ("barrier_wait", "commit_smem", "wait_smem_to_gmem")
# What the interpreter says of races, and of copies that are not awaited at the end.
WRONG = "RACE DETECTED|Not all copy_smem_to_gmem"
Site = tuple[str, str, int]  # which of these, and where it is called

PAGES = 6
LONG, SHORT = 140, 20  # keys of a row: more blocks of 64 than stages, or one


def pool() -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(PAGES, 1, 32, 64)), jnp.float16)


def attend(body: Callable[..., Any], rows: int, where: Any) -> Any:
    """`body` of so many rows of queries over one sequence's pages."""
    q, table = jnp.ones((rows, 1, 1, 64), jnp.float16), jnp.tile(jnp.arange(1, PAGES), (2, 1))
    how: dict[str, Any] = {"scale": 0.1, "window": None, "soft_cap": None, "interpret": True}
    return body(q, pool(), pool(), table, jnp.array(where), None, **how)


def decode() -> list[Any]:
    """A row, and one of no keys, whose result is written too: in one part and in two."""

    def attended(length: int, splits: int) -> Any:
        with mock.patch.object(mosaic_decode, "num_splits", lambda *_: splits):
            return attend(mosaic_decode.paged_attention, 2, [length, 0])

    return [attended(LONG, 1), attended(SHORT, 2)]


def prefill() -> Any:
    return attend(mosaic_prefill.paged_prefill, 64, [[0, 64, 0, LONG - 64]])


def matmul() -> Any:
    weight, _ = random_weight(KINDS["w8a8 float8"], 128, 640)
    x = jnp.ones((70, 640), jnp.bfloat16)
    return mosaic_matmul.quantised_matmul(x, weight, out_dtype=jnp.bfloat16, interpret=True)


@contextmanager
def ordering(wanted: Callable[[Site], bool]) -> Iterator[None]:
    """Of the calls that order memory, those are made that are `wanted`, while a kernel is traced;
    what then goes wrong is raised."""

    def replaced(name: str) -> Callable[..., Any]:
        original = getattr(plgpu, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if wanted((name, caller.f_code.co_filename, caller.f_lineno)):
                return original(*args, **kwargs)

        return call

    calls = {name: replaced(name) for name in ORDERING}
    with mock.patch.multiple(plgpu, **calls), wgmma_reads_checked():
        yield


@pytest.mark.parametrize(("kernel", "count"), [(decode, 7), (prefill, 6), (matmul, 4)])
def test_no_call_that_orders_memory_can_be_left_out(kernel, count):
    sites: set[Site] = set()
    with ordering(lambda site: not sites.add(site)):
        jax.block_until_ready(kernel())
    assert len(sites) == count
    for left_out in sites:
        with pytest.raises(Exception, match=WRONG), ordering(left_out.__ne__):
            jax.block_until_ready(kernel())
            pytest.fail(f"{left_out} is not missed")
