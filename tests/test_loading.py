"""Restoring our own checkpoints: each byte read once, whatever the parameters are sharded over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.bench.cli import app
from jaxinfer.bench.loading import compare_loading
from jaxinfer.checkpoints import CheckpointError, array_files, convert, load_model, orbax_io
from jaxinfer.checkpoints.array_files import read_arrays
from jaxinfer.params import named_leaves


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    return convert(hf_folder(folder / "hf"), folder / "orbax", dtype="float32")


def leaves(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in named_leaves(params)}


def test_what_is_read_is_what_orbax_reads(ours: Path) -> None:
    """The folder stays an Orbax checkpoint: its own reader finds the same arrays in it."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        theirs = leaves(checkpointer.restore((ours / "params").absolute()))
    found = leaves(load_model(ours).params)
    assert found.keys() == theirs.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, theirs[name])


def test_memory_becomes_the_parameter(ours: Path) -> None:
    """Nothing is copied on a CPU, as long as the dtype is the one that is stored."""
    manifest = orbax_io.read_manifest(ours)
    read: dict[str, int] = {}

    def place(name: str, array: np.ndarray) -> jax.Array:
        read[name] = array.ctypes.data
        return jax.device_put(array, jax.devices()[0])

    found = read_arrays(ours / "params", manifest.files, manifest.tensors, place)
    assert {name: array.unsafe_buffer_pointer() for name, array in found.items()} == read


@pytest.mark.parametrize("devices", [1, 2])
def test_every_byte_is_read_once(ours: Path, devices: int) -> None:
    """As the kernel counts what a process asks it for, over one device and sharded over two."""
    script = """
        import sys
        from pathlib import Path
        import jax
        from jaxinfer.bench.loading import _bytes_read
        from jaxinfer.checkpoints import orbax_io
        from jaxinfer.sharding import DEFAULT_RULES, make_mesh, sharding_of
        path, devices = Path(sys.argv[1]), int(sys.argv[2])
        mesh = make_mesh(jax.devices(), devices)
        rules = DEFAULT_RULES | {"mlp": None}  # the tiny model has one block of these
        manifest = orbax_io.read_manifest(path)
        def restore():
            place = lambda spec: sharding_of(spec, mesh, rules)
            return orbax_io.restore(path, manifest, "float32", place)
        restore()  # what is imported, compiled and mapped at the first time is read, too
        before = _bytes_read()
        none = _bytes_read() - before  # what asking costs
        before = _bytes_read()
        params = restore()
        print(_bytes_read() - before - none, sum(size for size, _ in manifest.files.values()))
        print(len(params["layers"][0]["qkv"].addressable_shards))
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(ours), str(devices)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | flags,
    )
    assert done.returncode == 0, done.stderr
    read, stored, shards = map(int, done.stdout.split())
    assert stored <= read <= stored + 64, (read, stored)
    assert shards == devices


def sharded(folder: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[Any, Any]:
    """An array in several files, as those that lie on several devices are saved, with manifest."""
    import tensorstore

    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    metadata = {"shape": shape, "chunks": chunks, "dtype": "<f4", "compressor": None, "order": "C"}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/w/"},
        "metadata": metadata,
    }
    tensorstore.open(spec, create=True).result().write(array).result()
    files = {name: tuple(entry) for name, entry in orbax_io._inventory(folder).items()}
    return array, files


@pytest.mark.parametrize("chunks", [(6, 10), (3, 5), (4, 10), (4, 4)])
def test_arrays_in_several_files(tmp_path: Path, chunks: tuple[int, int]) -> None:
    array, files = sharded(tmp_path, (6, 10), chunks)
    tensors: Any = {"w": ((6, 10), "float32")}
    found = read_arrays(tmp_path, files, tensors, lambda _, read: read)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found["w"], array)
    file = sorted(tmp_path.glob("w/[0-9]*"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"w/{file.name}: changed since it was written"):
        read_arrays(tmp_path, files, tensors, lambda _, read: read)  # type: ignore[arg-type]


def test_files_that_say_something_else(tmp_path: Path) -> None:
    """An array that is not plain memory, or not of its shape, is refused by name."""
    _, files = sharded(tmp_path, (6, 10), (6, 10))
    tensors: Any = {"w": ((6, 10), "float32")}
    for change, words in {
        ("compressor", "zlib"): "compressor = zlib, expected None",
        ("order", "F"): "order = F",
        ("shape", (10, 6)): r"shape = \[10, 6\], expected \[6, 10\]",
    }.items():
        written = (tmp_path / "w" / ".zarray").read_text()
        layout = json.loads(written) | dict([change])
        (tmp_path / "w" / ".zarray").write_text(json.dumps(layout))
        changed = {name: tuple(entry) for name, entry in orbax_io._inventory(tmp_path).items()}
        with pytest.raises(CheckpointError, match=rf"w/\.zarray: {words}"):
            read_arrays(tmp_path, changed, tensors, lambda _, read: read)  # type: ignore[arg-type]
        (tmp_path / "w" / ".zarray").write_text(written)
    for shape in ((6, 11), (60,)):
        other: Any = {"w": (shape, "float32")}
        with pytest.raises(CheckpointError, match=r"w/\.zarray: shape"):
            read_arrays(tmp_path, files, other, lambda _, read: read)  # type: ignore[arg-type]


def test_memory_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several small arrays at once, a large one alone."""
    budget, held, most = array_files._Budget(100), [0], [0]
    lock = threading.Lock()

    def hold(size: int) -> None:
        with budget.of(size):
            with lock:
                held[0] += size
                most[0] = max(most[0], held[0])
            time.sleep(0.002)
            with lock:
                held[0] -= size

    sizes = [100, 30, 30, 100, 50, 20, 20, 90] * 3
    threads = [threading.Thread(target=hold, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads) and most[0] == 100


def test_bench_load(ours: Path, tmp_path: Path) -> None:
    arguments = ["load", str(ours), "--rounds", "2", "--json", "-"]
    result = json.loads(CliRunner().invoke(app, arguments).stdout)
    files = orbax_io.read_manifest(ours).files
    assert result["bytes"] == sum(size for size, _ in files.values())
    # Other threads of this process read, too: what other modules left, and what distributes tests.
    assert result["bytes"] <= result["bytes_read"] <= result["bytes"] + 8192 < 1.5 * result["bytes"]
    for cache in ("cold", "warm"):
        assert 0 < result[cache]["to_plain"]["median"] < 1e4
        assert 0 < result[cache]["to_kept"]["median"] < 1e4
    with pytest.raises(
        ValueError, match="is no Orbax folder of ours: make one by jaxinfer convert"
    ):
        compare_loading(hf_folder(tmp_path / "hf"), 1, 1)
