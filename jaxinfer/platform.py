"""Settings that JAX reads once, when it first looks for devices. Imports no JAX."""

from __future__ import annotations

import ctypes
import importlib.util
import os

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def prepare() -> None:
    """Choose defaults; variables that the user set win.

    JAX's allocator may take 95% of a GPU, so that `memory_utilization` can mean the card's memory
    (JAX's own default is 75%). Where a CUDA plugin is installed but no driver is (a machine that
    only compiles for GPUs), JAX runs on the CPU without printing what it failed to load.
    """
    os.environ.setdefault(_FRACTION, "0.95")
    plugged = any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)
    if plugged and "JAX_PLATFORMS" not in os.environ and not _has_driver():
        os.environ["JAX_PLATFORMS"] = "cpu"


def allocator_fraction() -> float:
    """The share of a GPU that JAX's allocator may take."""
    return float(os.environ.get(_FRACTION, "0.75"))


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
