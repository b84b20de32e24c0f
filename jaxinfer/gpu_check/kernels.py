"""Compiles the attention kernels by themselves, for each kind of GPU, and reads what came out.

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.gpu_check.target import TARGETS, GpuTarget, devices, environment
from jaxinfer.sharding import make_mesh, replicated
from pallas_kernels.paged_attention import triton_decode, triton_prefill
from pallas_kernels.paged_attention.dispatch import PAGES
from pallas_kernels.paged_attention.triton_blocks import Pool

SLOTS, CHUNK, TILES, TABLE_WIDTH, NUM_PAGES = 64, 512, 16, 128, 512
_TENSOR_CORES = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")


@dataclass(frozen=True, slots=True)
class Case:
    """Attention as some models have it, on one device."""

    models: str
    head_dim: int
    group: int
    kv_heads: int = 8
    page_size: int = 64
    value_dim: int | None = None  # of keys that begin with their values
    pages: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


CASES = (
    Case("Llama 3 8B, Qwen3 32B", 128, 4),
    Case("Llama 3 70B over 8 GPUs", 128, 8, kv_heads=1),
    Case("pages of 16", 128, 4, page_size=16),
    Case("SmolLM2", 64, 3, kv_heads=3),
    Case("gpt-oss", 64, 8, window=128, sinks=True),
    Case("Phi-2, Phi 3 medium", 80, 1, kv_heads=32),
    Case("Phi 3 mini", 96, 1, kv_heads=32),
    Case("Gemma 3 27B, windows", 128, 2, kv_heads=16, window=1024),
    Case("keys of 192", 192, 4),
    Case("Gemma 2 9B", 256, 2, window=4096, soft_cap=50.0),
    Case("DeepSeek V3, latent", 576, 128, kv_heads=1, value_dim=512),
    Case("int8 pages", 128, 4, page_size=32, pages="int8"),
    Case("float8 pages", 128, 4, page_size=32, pages="float8_e4m3fn"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel became: its registers a thread, bytes spilled, and products on tensor cores
    in its text; or the `error` instead."""

    case: str
    kind: str  # "decode" or "prefill"
    registers: int = 0
    spilled: int = 0
    tensor_core_products: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and not self.spilled and self.tensor_core_products > 0


def compile_all(target: str, timeout: float = 900) -> list[Kernel]:
    """Every kernel that the target can run, compiled in another process.

    Raises RuntimeError with the compiler's last words if it dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "jaxinfer.gpu_check.kernels", "--device", target, folder],
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
    return environment() | {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=.*"}


def _kernels(target: GpuTarget, folder: Path) -> Iterator[Kernel]:
    mesh = make_mesh(devices(target, 1))
    for case in CASES:
        if target.compute_capability < PAGES[case.pages]:
            continue
        for kind, lower in (("decode", _decode), ("prefill", _prefill)):
            yield _compile(case, kind, functools.partial(lower, case, mesh), mesh, folder)


def _compile(case: Case, kind: str, lower: Callable[[], Any], mesh: Mesh, folder: Path) -> Kernel:
    for file in folder.iterdir():
        file.unlink()
    started = time.process_time()
    try:
        with jax.set_mesh(mesh):  # kernels are compiled for the device they find there
            lower().compile()
        registers, spilled, products = _read(folder)
    except Exception as error:
        return Kernel(case.models, kind, error=f"{type(error).__name__}: {error}"[:300])
    seconds = time.process_time() - started
    return Kernel(case.models, kind, registers, spilled, products, seconds)


def _read(folder: Path) -> tuple[int, int, int]:
    """Registers, spilled bytes and tensor core products of the one attention kernel in a dump."""
    for file in folder.glob("*.ptx"):
        text = file.read_text()
        if ".entry paged_" not in text:
            continue
        arch = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        assert arch is not None
        command = [_ptxas(), "-v", f"-arch={arch[1]}", str(file), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        figures = [re.search(p, said) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores")]
        registers, spilled = (int(found[1]) if found else 0 for found in figures)
        return registers, spilled, len(_TENSOR_CORES.findall(text))
    raise RuntimeError("the compiler wrote no kernel")


@functools.cache
def _ptxas() -> str:
    import nvidia  # a namespace of packages; the compiler is in one of them

    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/ptxas")]
    path = str(found[0]) if found else shutil.which("ptxas")
    if path is None:
        raise RuntimeError("ptxas is not installed; run: pip install '.[gpu-check]'")
    return path


def _decode(case: Case, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    shape = (SLOTS, case.kv_heads, case.group, case.head_dim)
    table, lens = _ints(mesh, SLOTS, TABLE_WIDTH), _ints(mesh, SLOTS)
    arrays = (_queries(mesh, shape), pool, table, lens, _sinks(case, mesh))
    return triton_decode.program.lower(*arrays, **how)


def _prefill(case: Case, mesh: Mesh) -> Any:
    pool, how = _pool(case, mesh)
    shape = (CHUNK, case.kv_heads, case.group, case.head_dim)
    table, tiles = _ints(mesh, SLOTS, TABLE_WIDTH), _ints(mesh, TILES, 4)
    arrays = (_queries(mesh, shape), pool, table, tiles, _sinks(case, mesh))
    return triton_prefill.program.lower(*arrays, **how)


def _pool(case: Case, mesh: Mesh) -> tuple[Pool, dict[str, Any]]:
    whole, places = replicated(mesh), (NUM_PAGES, case.kv_heads, case.page_size)
    pages = jax.ShapeDtypeStruct((*places, case.head_dim), jnp.dtype(case.pages), sharding=whole)
    pool = Pool(pages, pages if case.value_dim is None else None)
    if case.pages != "bfloat16":
        scales = jax.ShapeDtypeStruct(places, jnp.float32, sharding=whole)
        pool = pool._replace(k_scale=scales, v_scale=scales)
    how = {
        "scale": case.head_dim**-0.5,
        "value_dim": case.value_dim or case.head_dim,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }
    return pool, how


def _queries(mesh: Mesh, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated(mesh))


def _ints(mesh: Mesh, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(mesh))


def _sinks(case: Case, mesh: Mesh) -> Any:
    if not case.sinks:
        return None
    shape = (case.kv_heads, case.group)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=replicated(mesh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=TARGETS, required=True)
    parser.add_argument("folder", type=Path, help="where XLA_FLAGS has the compiler write")
    args = parser.parse_args()
    print(json.dumps([asdict(kernel) for kernel in _kernels(TARGETS[args.device], args.folder)]))


if __name__ == "__main__":
    main()
