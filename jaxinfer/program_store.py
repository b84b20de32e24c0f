"""Compiled programs kept as files, so that a later start neither traces nor lowers them again.

JAX's own persistent cache is keyed by the lowered program: every start traces all of them first,
which takes as long as loading them. Here the key is everything the programs are made from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_SOURCES = ("jaxinfer", "pallas_kernels")
_FLAGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable")
KEPT_FOLDERS = 16  # every edit of the source and every setting makes another one


class ProgramStore:
    """A folder of executables made for one combination of code, versions, device and state.

    They run on the first device; programs over a mesh are not kept.

    The folder is a cache: a file that cannot be read is compiled again, and one that cannot be
    written costs only the next start. Of all folders the `KEPT_FOLDERS` used last are kept.
    """

    def __init__(self, root: Path, *ingredients: Any):
        """`ingredients`: whatever else the programs depend on; their repr must show all of it."""
        described = repr((_code_digest(), _environment(), ingredients))
        self.folder = root / hashlib.sha256(described.encode()).hexdigest()[:32]
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)
            by_use = sorted(root.iterdir(), key=lambda folder: -folder.stat().st_mtime_ns)
            for folder in by_use[KEPT_FOLDERS:]:
                shutil.rmtree(folder, ignore_errors=True)

    def has(self, name: str) -> bool:
        """Whether an executable of that name is stored."""
        return self._path(name).exists()

    def get_or_compile(self, name: str, compile_program: Callable[[], Any]) -> Any:
        """The stored executable of that name, or a compiled one, which is stored."""
        path = self._path(name)
        if path.exists():
            try:
                stored, inputs, outputs = pickle.loads(path.read_bytes())
                return serialize_executable.deserialize_and_load(
                    stored, inputs, outputs, execution_devices=jax.devices()[:1]
                )
            except Exception as error:
                logger.warning(f"compiling {name} again: {path} cannot be loaded ({error})")
        program = compile_program()
        # An executable that JAX's own cache loaded cannot be stored: what XLA for CPUs makes of it
        # lacks functions, and fails when it is run.
        if jax.config.jax_compilation_cache_dir is None:
            with contextlib.suppress(OSError, ValueError):
                self._write(path, pickle.dumps(serialize_executable.serialize(program)))
        return program

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.bin"

    def _write(self, path: Path, data: bytes) -> None:
        """Whole or not at all, also when two processes start together."""
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)


def describe_arrays(tree: Any) -> str:
    """Shape, dtype and sharding of every leaf, as an ingredient of a store."""
    leaves, structure = jax.tree.flatten(tree)
    return repr((str(structure), [(x.shape, str(x.dtype), str(x.sharding)) for x in leaves]))


@functools.cache
def _code_digest() -> str:
    """A hash of what programs are traced from: the source, and the kernels' table of sizes."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        root = Path(__file__).parent.parent / package
        for file in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _environment() -> tuple[str, ...]:
    """Versions, flags and hardware an executable is good for."""
    device = jax.devices()[0]
    return (
        jax.__version__,
        jaxlib.__version__,
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", ""),
        *(f"{flag}={getattr(jax.config, flag)}" for flag in _FLAGS),
        f"{device.platform} {device.device_kind} {device.client.platform_version}",
        str(jax.device_count()),
        str(cpus()),
        platform.machine() + _cpu_features(),
    )


def cpus() -> int:
    """CPUs of this process: XLA has a thread for each, and splits loops for as many when it
    compiles."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_features() -> str:
    """Instruction sets of the host: code made for one CPU may not run on another."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
