"""From kernels to machine code: for which CPUs, and what is kept of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxinfer.cpu_kernels import compiler
from jaxinfer.cpu_kernels.compiler import vectors
from jaxinfer.cpu_kernels.heads import Heads

if vectors() is None:
    pytest.skip("no kernels for this CPU", allow_module_level=True)

from llvmlite import binding

from jaxinfer.cpu_kernels import attention, heads, matmul, xla_call


def test_damaged_code_in_the_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    script = "from jaxinfer.cpu_kernels import matmul; print(matmul.register('float32'))"

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout

    name = run()
    (file,) = (tmp_path / "kernels").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert run() == name
    assert file.read_bytes() == whole


def test_code_that_was_not_used_lately_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "MOST_KEPT", 3 * (compiler.DIGEST + 100))
    files = [tmp_path / f"{i}.o" for i in range(5)]
    for age, file in enumerate(files[:3]):
        compiler._write(file, bytes(100))
        os.utime(file, (age, age))
    assert compiler._read(files[0]) == bytes(100)
    compiler._write(files[3], bytes(100))
    assert {*tmp_path.iterdir()} == {files[0], files[2], files[3]}
    with ThreadPoolExecutor(8) as threads:  # as processes do that start together
        list(threads.map(lambda _: compiler._write(files[4], bytes(100)), range(200)))
    left = [*tmp_path.iterdir()]
    assert len(left) <= 3 and all(compiler._read(file) == bytes(100) for file in left)


def test_a_cpu_that_lacks_what_they_need_has_no_kernels(monkeypatch):
    monkeypatch.setattr(compiler, "host_has", lambda feature: feature in ("avx2", "fma"))
    assert vectors.__wrapped__() is None


TRIPLES = {"avx512f": "x86_64-linux", "avx2": "x86_64-linux", "neon": "aarch64-linux"}


@pytest.mark.parametrize(("sets", "found"), compiler._INSTRUCTIONS, ids=str)
def test_kernels_call_nothing_that_a_process_may_lack(monkeypatch, sets, found):
    """Functions of compilers' own libraries stand in for instructions that a CPU has not."""
    modules = []
    for module in (heads, matmul):
        monkeypatch.setattr(module, "vectors", lambda: found)
    monkeypatch.setattr(xla_call, "machine_code", lambda module, _: modules.append(module) or 1)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    matmul._registered.__wrapped__("float16")()
    attention._registered.__wrapped__(Heads(1, 32, 32, 16, 9.0, "float16"), False)()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(TRIPLES[sets[0]])
    features = ",".join(f"+{name}" for name in sets)
    machine = target.create_target_machine(features=features, codemodel="small")
    for module in modules:
        module.triple = target.triple
        code = machine.emit_assembly(binding.parse_assembly(str(module)))
        called = re.findall(r"\b(?:callq|jmp|bl|b)\s+([A-Za-z_]\w+)", code)
        own = {function.name for function in module.functions}
        assert {"malloc", "free"} <= {*called} <= own | {"memset"}
