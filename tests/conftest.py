"""Strict defaults of the whole suite, set before anything imports jax or our packages.

Array annotations are checked at run time, dtypes and ranks never promote silently, several CPU
devices exist, and compiled programs are kept from one test run to the next.
"""

# ruff: noqa: E402

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # tests read what goes to stderr
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=4".strip()

# A shell that runs the suite in the background has it ignore what some tests send their processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from jaxinfer.paths import cache_dir


def _modules_with_arrays() -> list[str]:
    """Modules of the runtime that annotate arrays."""
    paths = (path for path in (ROOT / "jaxinfer").rglob("*.py") if "jaxtyping" in path.read_text())
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


install_import_hook(["pallas_kernels", *_modules_with_arrays()], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if jax.config.jax_compilation_cache_dir is None:
    # By the environment too: servers that tests start as processes share it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_dir() / "xla-tests")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples on every run; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


# Modules whose tests watch clocks, memory or processes, or use all cores themselves: `scripts/test`
# runs them one after the other, and all others two at a time.
ALONE = re.compile(
    "test_(access|bench|checkpoints_shards|cli|client|control|convert|determinism|device_fit|engine"
    "|expert_load|frontend|gpu|http|interruption|loading|metrics|scripts|service|template_text)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ALONE.match(item.path.stem):
            item.add_marker("alone")


MOST_MAPPINGS = 20_000  # of memory; Linux gives a process 65,530, and a compiler dies without


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Forget compiled programs after modules that left many: each is a hundred mappings."""
    yield
    forget_programs(MOST_MAPPINGS)


def forget_programs(most: int) -> None:
    """Forget compiled programs if there are more memory mappings than this."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most:
        jax.clear_caches()
        gc.collect()
