"""Kernels as CPUs have them that lack what this one has."""

from __future__ import annotations

import subprocess
import sys

# What every x86 of 64 bits has, by LLVM's names.
BASE = ("64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2")
AVX2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c")
PRETEND = """
from llvmlite import binding
had = binding.get_host_cpu_features()
features = binding.FeatureMap((name, has and name in {kept}) for name, has in had.items())
binding.get_host_cpu_features, binding.get_host_cpu_name = lambda: features, lambda: "x86-64"
from jaxinfer.cpu_kernels import compiler
{before}
import pytest, sys
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "{file}", "-k", "{chosen}"]))
"""


def run_tests(file: str, chosen: str, features: tuple[str, ...] = (), before: str = "") -> str:
    """What pytest says of a file's chosen tests in a process of a CPU that has no more than
    `features`; it must pass. `before`: what is run there first."""
    script = PRETEND.format(kept=BASE + features, before=before, file=file, chosen=chosen)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout
