"""How the host's memory treats the buffers of a CPU step."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path

import jax

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEEP_BELOW = 1 << 30  # bytes: larger than any step's temporaries
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # Linux's mman.h, the latter since 6.1
_LARGEST = 32 << 20  # bytes of a large page: what lies between two arrays goes with them
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def give_back_freed_memory() -> None:
    """Let glibc give back to the system what was freed."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks instead of giving them back to the system at once.

    XLA:CPU allocates a program's temporaries and outputs at every call. By default blocks of that
    size are mapped and unmapped each time, and their pages are faulted in and zeroed anew in every
    step. What loading and compiling left behind is given back first. Returns whether anything was
    changed: other C libraries have no such knob.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    give_back_freed_memory()
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW)
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BELOW - 1) and kept)


def in_large_pages(arrays: Iterable[jax.Array], at_once: bool = True) -> int:
    """Let Linux put arrays of this process's memory in pages of 2 MiB; bytes that now lie so.

    Every page has to be found when it is read, and of 4 KiB each a model's weights are more than
    the processor remembers: reading them takes a fifth longer. `at_once`: not when the system gets
    round to it, which costs about a millisecond a MiB where memory is fresh. Where the system has
    none, or its administrator wants none, nothing is changed.
    """
    try:
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        wanted = "[never]" not in (_SETTINGS / "enabled").read_text()
    except (OSError, ValueError):
        return 0
    if not wanted or size > _LARGEST:
        return 0
    blocks = set[int]()
    for part in (shard.data for array in arrays for shard in array.addressable_shards):
        if part.nbytes >= size // 4:  # else it is mostly others' memory
            start = part.unsafe_buffer_pointer()
            blocks.update(range(start // size, -(-(start + part.nbytes) // size)))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for block in blocks:  # one by one: where one of them cannot be, the others can
        madvise(block * size, size, _MADV_HUGEPAGE)
        if at_once and not madvise(block * size, size, _MADV_COLLAPSE):
            moved += size
    return moved
