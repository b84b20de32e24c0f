"""Compiles the kernels by themselves, for each kind of GPU, and reads what came out.

Run as a process with `environment_for_dump`: XLA writes the kernels' PTX where it is told to, and
ptxas says how many registers they take and what they spill.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxinfer.gpu_check.attention_kernels import attention_cases
from jaxinfer.gpu_check.kernel_case import KernelCase
from jaxinfer.gpu_check.latent_kernels import latent_cases
from jaxinfer.gpu_check.matmul_kernels import matmul_cases
from jaxinfer.gpu_check.other_kernels import other_cases
from jaxinfer.gpu_check.target import TARGETS, GpuTarget, devices, environment
from jaxinfer.sharding import make_mesh

_TENSOR_CORES = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel became: its registers a thread, bytes spilled, and products on tensor cores
    in its text; or the `error` instead."""

    kernel: str
    case: str
    registers: int = 0
    spilled: int = 0
    tensor_core_products: int = 0
    seconds: float = 0.0
    tensor_cores: bool = True  # whether it must have such products
    missing: str = ""  # an instruction that it must have and has not
    error: str = ""

    @property
    def passed(self) -> bool:
        idle = self.tensor_cores and not self.tensor_core_products
        return not (self.error or self.spilled or self.missing or idle)


def compile_all(target: str, timeout: float = 900) -> list[Kernel]:
    """Every kernel that the target can run, compiled in another process.

    Raises RuntimeError with the compiler's last words if it dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "jaxinfer.gpu_check.kernels", "--target", target, folder],
            env=_dumping(folder),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"compiling kernels for {target}: {last}")
    return [Kernel(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _dumping(folder: str) -> dict[str, str]:
    """Triton's kernels are XLA's to write down, Mosaic's write themselves."""
    flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=.*"
    return environment() | {"XLA_FLAGS": flags, "MOSAIC_GPU_DUMP_TO": folder}


def cases() -> list[KernelCase]:
    """All kernels with all shapes that are compiled."""
    return [*attention_cases(), *latent_cases(), *matmul_cases(), *other_cases()]


def _kernels(target: GpuTarget, folder: Path) -> Iterator[Kernel]:
    mesh = make_mesh(devices(target, 1))
    for case in cases():
        if case.runs_on(target.compute_capability):
            yield _compile(case, mesh, folder)


def _compile(case: KernelCase, mesh: Mesh, folder: Path) -> Kernel:
    for file in folder.iterdir():
        file.unlink()
    found = Kernel(case.kernel, case.case, tensor_cores=case.tensor_cores)
    started = time.process_time()
    try:
        with jax.set_mesh(mesh):  # kernels are compiled for the device they find there
            case.lower(mesh).compile()
        registers, spilled, text = _read(folder, case.entry)
    except Exception as error:
        return replace(found, error=f"{type(error).__name__}: {error}"[:300])
    seconds = time.process_time() - started
    return replace(
        found,
        registers=registers,
        spilled=spilled,
        tensor_core_products=len(_TENSOR_CORES.findall(text)),
        missing=next((wanted for wanted in case.instructions if wanted not in text), ""),
        seconds=seconds,
    )


def _read(folder: Path, entry: str) -> tuple[int, int, str]:
    """Registers, spilled bytes and the PTX of the kernel of that name in a dump."""
    for file in folder.glob("*.ptx"):
        text = file.read_text()
        if f".entry {entry}" not in text:
            continue
        arch = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        assert arch is not None
        command = [_ptxas(), "-v", f"-arch={arch[1]}", str(file), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        figures = [re.search(p, said) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores")]
        registers, spilled = (int(found[1]) if found else 0 for found in figures)
        return registers, spilled, text
    raise RuntimeError("the compiler wrote no kernel")


@functools.cache
def _ptxas() -> str:
    import nvidia  # a namespace of packages; the compiler is in one of them

    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    path = str(found[0]) if found else shutil.which("ptxas")
    if path is None:
        raise RuntimeError("ptxas is not installed; run: pip install '.[gpu-check]'")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("folder", type=Path, help="where XLA_FLAGS has the compiler write")
    args = parser.parse_args()
    print(json.dumps([asdict(kernel) for kernel in _kernels(TARGETS[args.target], args.folder)]))


if __name__ == "__main__":
    main()
