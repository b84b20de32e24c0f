"""Quantised checkpoint folders: restored as saved, refused where they cannot be served."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxinfer_service.cli import app
from rich.console import Console
from test_families import family_folder
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.checkpoints import (
    CheckpointError,
    convert,
    describe,
    inspect_checkpoint,
    load_model,
    tensor_table,
)
from jaxinfer.params import named_leaves
from jaxinfer.quantization.kinds import KINDS


@pytest.fixture(autouse=True)
def logging_stays(monkeypatch):
    """Commands set up logging for the whole process."""
    monkeypatch.setattr("jaxinfer_service.cli.console.set_up_logging", lambda level, form: None)


def leaves(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in named_leaves(params)}


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    wanted = leaves(wanted)
    for name, array in leaves(found).items():
        assert array.dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def text_of(table: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_saved_is_what_loading_would_make(kind, dtype, tmp_path):
    source = hf_folder(tmp_path / "hf", "llama3")
    direct = load_model(source, dtype=dtype, quantization=kind)
    target = convert(source, tmp_path / "orbax", dtype, quantization=kind)
    restored = load_model(target, quantization=kind)
    assert (restored.quantization, restored.dtype) == (direct.quantization, dtype) == (kind, dtype)
    same(restored.params, direct.params)
    made = kind in ("int8", "int4", "mxfp4", "fp8", "fp8-block", "w8a8-fp8")  # on a CPU
    assert load_model(target).quantization == ("none" if made else kind)
    numbers = leaves(load_model(target, quantization="none").params)
    original = leaves(load_model(source, dtype=dtype).params)
    assert numbers.keys() == original.keys()
    bound = 0.3 if kind.startswith(("int4", "mxfp4")) else 0.07 if "fp8" in kind else 0.02
    for name, array in numbers.items():
        assert array.dtype == original[name].dtype == dtype, name
        wanted = np.asarray(original[name], np.float32)
        most = np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(array, np.float32), wanted, atol=bound * most)
    plain = load_model(convert(source, tmp_path / "plain", dtype), quantization=kind)
    same(plain.params, direct.params)


def test_experts_and_latents_travel_too(tmp_path):
    source = family_folder(tmp_path / "hf", "deepseek_v2")
    direct = load_model(source, dtype="float32", quantization="w16a16")
    restored = load_model(convert(source, tmp_path / "o", "float32", quantization="w16a16"))
    same(restored.params, direct.params)
    kept = {n.rpartition(".")[2] for n, a in leaves(restored.params).items() if a.ndim > 1
            and a.dtype == np.float32 and not n.endswith("scales")}  # fmt: skip
    assert kept == {"router", "k_b", "v_b"}


def test_what_is_stored_alike_can_be_served_and_nothing_else(tmp_path):
    target = convert(hf_folder(tmp_path / "hf"), tmp_path / "o", "float32", quantization="w8a8")
    other = load_model(target, quantization="w8a8-hl")
    same(other.params, load_model(tmp_path / "hf", dtype="float32", quantization="w8a8-hl").params)
    assert load_model(target, quantization="auto").quantization == "w8a8"
    with pytest.raises(CheckpointError, match="stored as w8a8, which can be served as int8"):
        load_model(target, quantization="w16a16")
    with pytest.raises(CheckpointError, match="quantization is 'awq'; choose none"):
        load_model(target, quantization="awq")


def test_damage_is_named(tmp_path):
    target = convert(hf_folder(tmp_path / "hf"), tmp_path / "o", "float32", quantization="w8a8")
    manifest = json.loads((target / "jaxinfer.json").read_text())
    scales = manifest["tensors"].pop("layers.0.qkv.scales")
    (target / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv\.scales: missing"):
        load_model(target)
    manifest["tensors"]["layers.0.qkv.scales"] = [[2, *scales[0][1:]], scales[1]]
    (target / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv\.scales: expected shape"):
        load_model(target)
    manifest["quantization"] = "int7"
    (target / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="quantization = 'int7'"):
        load_model(target)


def test_inspection_says_what_each_tensor_is_and_what_it_buys(tmp_path):
    source = hf_folder(tmp_path / "hf")
    target = convert(source, tmp_path / "o", "float32", quantization="w8a8")
    info, plain = inspect_checkpoint(target), inspect_checkpoint(source)
    assert info.quantization == "w8a8" and plain.quantization == "none"
    assert info.tensors["layers.0.o.values"][1] == "int8"
    assert info.tensors["layers.0.o.scales"] == ((1, 32), "float32", 128)
    assert info.weight_bytes("float32") == info.stored_bytes < 0.4 * plain.weight_bytes("float32")
    assert inspect_checkpoint(source, quantization="w8a8").weight_bytes("float32") == (
        info.weight_bytes("float32")
    )
    shown = text_of(describe(info, 1 << 30))
    for words in (
        "w8a8: int8 weights and activations",
        "5 as they are",
        "on 1 GiB, float32, w8a8",
        "saved",
        "without quantization",
    ):
        assert words in shown
    assert "layers.0.o.values" in text_of(tensor_table(info))
    result = CliRunner().invoke(
        app, ["inspect", str(target), "--json", "--tensors", "--device-memory", "1GiB"]
    )
    fields = json.loads(result.stdout)
    assert fields["tensors"]["embed.values"]["stored"] == "int8"
    before, after = fields["device"]["savings"]["kv_room_bytes"]
    saved = plain.weight_bytes("float32") - info.weight_bytes("float32")
    assert after - before == saved == -np.diff(fields["device"]["savings"]["weights_bytes"])[0]


def test_the_command_converts(tmp_path):
    source, target = hf_folder(tmp_path / "hf"), tmp_path / "o"
    result = CliRunner().invoke(
        app, ["convert", str(source), str(target), "--quantization", "int8"]
    )
    assert result.exit_code == 0, result.output
    assert inspect_checkpoint(target).quantization == "int8"
    result = CliRunner().invoke(
        app, ["convert", str(source), str(tmp_path / "p"), "--quantization", "int5"]
    )
    assert result.exit_code == 1 and "quantization is 'int5'" in result.output
    assert not Path(tmp_path / "p").exists()
