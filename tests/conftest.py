"""Strict defaults of the whole suite, set before anything imports jax or our packages.

Array annotations are checked at run time, dtypes and ranks never promote silently, several CPU
devices exist, and compiled programs are kept from one test run to the next.
"""

# ruff: noqa: E402

from __future__ import annotations

import gc
import logging
import os
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


# `scripts/test` runs two modules at a time, beginning with those that take longest: if one of them
# came last, the other process would wait for it.
LONGEST = [
    "test_determinism", "test_family_engine", "test_engine", "test_gpu_check", "test_gpu_kernels",
    "test_gpu_device", "test_convert", "test_scripts", "test_service_demo", "test_cli_generate",
    "test_families", "test_older_families", "test_bench_offline", "test_bench_peers",
    "test_bench_scheduling", "test_cli", "test_gguf_families", "test_quantised_matmul",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch):
    """Programs are optimised little: for what is compiled, run once and compared up to rounding."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # tells stored programs apart
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


@pytest.fixture(autouse=True)
def logging_as_before():
    """A command run in this process sets up logging for good: the next test must not see it."""
    loggers = [logging.getLogger(name) for name in (None, "jaxinfer", "jaxinfer_service")]
    before = [(log, log.level, log.handlers[:]) for log in loggers]
    yield
    for log, level, handlers in before:
        log.setLevel(level)
        log.handlers[:] = handlers
