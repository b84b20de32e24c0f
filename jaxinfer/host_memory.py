"""How the host's allocator treats the buffers of a CPU step."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEEP_BELOW = 1 << 30  # bytes: larger than any step's temporaries


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks instead of giving them back to the system at once.

    XLA:CPU allocates a program's temporaries and outputs at every call. By default blocks of that
    size are mapped and unmapped each time, and their pages are faulted in and zeroed anew in every
    step. What loading and compiling left behind is given back first. Returns whether anything was
    changed: other C libraries have no such knob.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    kept = libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW)
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEEP_BELOW - 1) and kept)
