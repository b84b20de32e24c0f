"""Mosaic's interpreter made to see what wgmma reads.

As it is, `InterpretGPUParams(detect_races=True)` carries copies out at once and checks what threads
and copies read and write, but nothing that wgmma reads: a product of what is still on its way, or
of what was written without a fence, is right and unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@contextmanager
def wgmma_reads_checked() -> Iterator[None]:
    """While kernels are traced and run: wgmma reads shared memory as copies do, by the async proxy
    and in a thread of its own, which reading its accumulator waits for. What fails is forgotten."""
    multiply, wait = gpu_callbacks.wgmma, gpu_callbacks.wgmma_accumulator_deref
    pending: dict[Any, Any] = {}

    def checked(*, thread: Any, **given: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        for side in "ab":
            key = gpu_callbacks.HostAllocationKey.from_array(
                given[f"{side}_allocation_key_as_array"]
            )
            transforms = gpu_callbacks._remove_noop_transforms(given[f"{side}_transforms"])
            where = memory.access(key, jax.tree.map(int, transforms))
            frame = given.get("source_info")
            gpu_callbacks.get_races().check_read(
                thread, clock.async_smem_clock, key, where, source_info=frame
            )
        pending[thread] = clock
        return multiply(thread=thread, **given)

    def waited(*, thread: Any, **given: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        with memory.lock:
            memory.clocks[thread].update(pending.pop(thread))
        return wait(thread=thread, **given)

    with mock.patch.multiple(
        gpu_callbacks,
        wgmma=gpu_callbacks.fail_on_exception(checked),
        wgmma_accumulator_deref=gpu_callbacks.fail_on_exception(waited),
    ):
        try:
            yield
        except Exception:
            gpu_callbacks.reset_gpu_interpret_mode_state()  # which keeps what failed
            raise
