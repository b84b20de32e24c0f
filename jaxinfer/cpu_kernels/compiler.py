"""From LLVM IR to machine code for the CPU that this process runs on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.paths import cache_dir

DIGEST = 32  # bytes of a file that say what the rest is
MOST_KEPT = 64 << 20  # bytes of code: a model's kernels take less than one of 1 << 20


@dataclass(frozen=True, slots=True)
class Vectors:
    """The host's registers of floats, and what of a product's sums they hold beside its operands.

    Attributes:
        lanes: floats of one register.
        wide: registers of consecutive columns.
        rows: rows of them.
    """

    lanes: int
    wide: int
    rows: int

    @property
    def panel(self) -> int:
        """Columns that a kernel computes at once."""
        return self.lanes * self.wide

    @property
    def sums(self) -> int:
        """Registers that hold sums."""
        return self.wide * self.rows


# By LLVM's names of instruction sets, all of them needed, widest first. Of 32 or 16 registers.
_INSTRUCTIONS = (
    (("avx512f",), Vectors(16, 3, 8)),
    (("avx2", "fma", "f16c"), Vectors(8, 2, 6)),  # a virtual machine may hide some
    (("neon",), Vectors(4, 3, 8)),
)


@functools.cache
def vectors() -> Vectors | None:
    """What the host computes with; None where kernels are not for it."""
    if sys.platform == "win32":  # which lacks functions that they call
        return None
    return next((found for sets, found in _INSTRUCTIONS if all(map(host_has, sets))), None)


def host_has(feature: str) -> bool:
    """Whether the CPU has an instruction set, by LLVM's name of it."""
    try:
        from llvmlite import binding
    except (ImportError, OSError):  # a platform without it, or where it cannot be loaded
        return False
    return bool(binding.get_host_cpu_features().get(feature))


def machine_code(module: Any, name: str) -> int:
    """The address of a function of an IR module, compiled, or loaded from the user's cache."""
    engine = _compiled(str(module))
    return engine.get_function_address(name)


@functools.cache
def _compiled(text: str) -> Any:
    """An execution engine, which must live as long as its code is used."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    if host_has("avx512f"):
        features += ",-prefer-256-bit"  # of registers that have 512
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )
    version = ".".join(map(str, binding.llvm_version_info))
    key = hashlib.sha256("\n".join((version, cpu, features, text)).encode()).hexdigest()
    file = cache_dir() / "kernels" / f"{key[:32]}.o"
    module = binding.parse_assembly(text)
    stored = _read(file)
    if stored is None:
        tuning = binding.create_pipeline_tuning_options(speed_level=3)
        builder = binding.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(module, builder)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, code: _write(file, code), lambda _: stored)
    engine.finalize_object()
    return engine


def _read(file: Path) -> bytes | None:
    """Code that was written whole: LLVM ends the process over anything else."""
    with contextlib.suppress(OSError):
        data = file.read_bytes()
        digest, code = data[:DIGEST], data[DIGEST:]
        if hashlib.sha256(code).digest() == digest:
            with contextlib.suppress(OSError):  # of another user's, who lets it be read
                os.utime(file)
            return code
    return None


def _write(file: Path, code: bytes) -> None:
    """With its digest in front. The file is a cache: what cannot be written is made again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(hashlib.sha256(code).digest() + code)
                part.flush()
                Path(part.name).replace(file)
            finally:
                Path(part.name).unlink(missing_ok=True)
        _forget_oldest(file.parent)


def _forget_oldest(folder: Path) -> None:
    """Remove what was used longest ago, beyond `MOST_KEPT`. Other processes may do so at once, and
    make again what they miss."""
    found = [(path.stat(), path) for path in folder.iterdir()]
    left = MOST_KEPT
    for stat, path in sorted(found, key=lambda one: -one[0].st_mtime_ns):
        left -= stat.st_size
        if left < 0:
            path.unlink(missing_ok=True)
