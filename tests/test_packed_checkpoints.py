"""Checkpoints that other projects stored in few bits: kept so, read as numbers, and refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_packed as packs
from safetensors.numpy import load_file, save_file
from test_families import oracle
from tiny_checkpoint import dense_logits, expected

from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model
from jaxinfer.params import named_leaves
from jaxinfer.quantization.weight import Quantised

pytestmark = pytest.mark.usefixtures("quick_compiler")
EACH = pytest.mark.parametrize("way", packs.EVERY)
# Of all logits' size: how far they may be from the oracle's.
BOUNDS = {"int4": 0.5, "int8": 0.04, "w8a8": 0.06, "fp8-block": 0.2, "w8a8-fp8": 0.3}


def folder_of(tmp_path: Path, way: str, family: str = "llama") -> Path:
    pack, config, _ = packs.EVERY[way]
    return packs.packed_folder(tmp_path, pack, config, family)


def logits(model: Any, family: str = "llama") -> np.ndarray:
    tokens = expected("default")[0] if family == "llama" else oracle(family)[0]
    return dense_logits(model.config, model.params, tokens)


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def mean_apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of the root of the mean square."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def quantised(params: Any) -> dict[str, Quantised]:
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, Quantised)
    )
    return {jax.tree_util.keystr(p): leaf for p, leaf in leaves if isinstance(leaf, Quantised)}


@EACH
def test_kept_as_stored_it_computes_what_it_stands_for(way, tmp_path):
    kind = packs.EVERY[way][2]
    folder = folder_of(tmp_path, way)
    model = load_model(folder, dtype="float32", quantization=kind)
    assert model.quantization == kind
    kept = quantised(model.params)
    assert len(kept) == 8, "all projections of both layers, and no more"
    bits = 4 if kind == "int4" else 8
    assert all(leaf.values.nbytes * 8 == bits * np.prod(leaf.shape) for leaf in kept.values())
    plain = logits(load_model(tmp_path / "plain", dtype="float32"))
    rounds = kind in ("w8a8", "w8a8-fp8")
    found = logits(model)
    assert mean_apart(found, plain) < (BOUNDS[kind] if rounds else 1e-5)
    assert 1e-3 < mean_apart(found, expected("default")[1]) < BOUNDS[kind]
    same = {"int4": "int4", "int8": "int8", "w8a8": "int8"}.get(kind, "fp8")
    assert apart(logits(load_model(folder, dtype="float32", quantization=same)), plain) < 1e-5


@EACH
def test_numbers_are_those_it_stands_for(way, tmp_path):
    folder = folder_of(tmp_path, way)
    found = load_model(folder, dtype="float32", quantization="none")
    assert found.quantization == "none"
    wanted = dict(named_leaves(load_model(tmp_path / "plain", dtype="float32").params))
    for name, array in named_leaves(found.params):
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("way", ["gptq act-order", "int4 asym", "fp8 static", "w8a8"])
def test_our_folder_restores_it_as_it_was_kept(way, tmp_path):
    folder, kind = folder_of(tmp_path, way), packs.EVERY[way][2]
    direct = load_model(folder, dtype="float32", quantization=kind)
    target = convert(folder, tmp_path / "orbax", "float32")
    restored = load_model(target, quantization=kind)
    assert restored.quantization == direct.quantization
    assert jax.tree.structure(restored.params) == jax.tree.structure(direct.params)
    for one, other in zip(jax.tree.leaves(restored.params), jax.tree.leaves(direct.params)):
        np.testing.assert_array_equal(one, other)
    info = inspect_checkpoint(target)
    assert info.layouts == direct.layouts and info.quantization == direct.quantization
    assert info.weight_bytes("float32") == info.stored_bytes


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3", "mistral"])
@pytest.mark.parametrize("way", ["awq", "fp8 blocks", "w8a16"])
def test_fused_projections_and_experts_keep_each_parts_scales(way, family, tmp_path):
    folder = folder_of(tmp_path, way, family)
    model = load_model(folder, dtype="float32", quantization=packs.EVERY[way][2])
    kept = quantised(model.params)
    assert any("gate_up" in name for name in kept) and any("qkv" in name for name in kept)
    plain = load_model(tmp_path / "plain", dtype="float32")
    assert apart(logits(model, family), logits(plain, family)) < 1e-5
    restored = load_model(convert(folder, tmp_path / "orbax", "float32"))
    assert not quantised(restored.params)
    for (name, one), other in zip(named_leaves(restored.params), jax.tree.leaves(plain.params)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("way", ["awq", "w8a8", "w8a16", "fp8 blocks"])
@pytest.mark.parametrize("ours", [False, True])
def test_on_a_cpu_numbers_are_made_once_where_every_step_would_make_them(
    ours, way, tmp_path, caplog
):
    """Integers that are multiplied stay as they are, whatever the file; the rest if there is no
    room for numbers, or if their kind is asked for."""
    folder, kind = folder_of(tmp_path, way), packs.EVERY[way][2]
    if ours:
        folder = convert(folder, tmp_path / "orbax", "float32")
    made = way != "w8a8"
    info = inspect_checkpoint(folder)
    assert info.quantization == kind and (info.on_cpus is not None) == made
    seen: list[int] = []

    def fits(model: Any, dtype: str, size: int) -> bool:
        seen.append(size)
        return not full

    for full in (False, True):
        with caplog.at_level(logging.INFO, logger="jaxinfer"):
            caplog.clear()
            model = load_model(folder, fits=fits)
        assert model.quantization == ("none" if made and not full else kind)
        assert len(quantised(model.params)) == (0 if made and not full else 8)
        assert (f"--quantization {kind}" in caplog.text) == (made and not full)
        assert ("not enough memory" in caplog.text) == (made and full)
    if made:
        assert info.on_cpus is not None and set(seen) == {info.on_cpus[0]}
    full = False
    auto = load_model(folder, fits=fits, quantization="auto")
    assert auto.quantization == ("w8a8-hl" if made else kind)


def test_columns_in_other_orders_are_made_numbers_of(tmp_path, caplog):
    """One product takes one order: queries, keys and values of different ones have none."""
    folder = folder_of(tmp_path, "gptq act-order")
    held = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    held[name] = held[name][::-1].copy()
    save_file(held, folder / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        model = load_model(folder, dtype="float32", quantization="int4")
    assert len(quantised(model.params)) == 7
    assert "weights as numbers: 3 matrices" in caplog.text  # with the embedding and the head
    assert "weights as stored: 7 matrices, int4, groups of 16" in caplog.text


def test_eight_bits_with_zero_points_are_made_numbers_of(tmp_path):
    pack = packs.gptq(8)
    folder = packs.packed_folder(tmp_path, pack, packs.gptq_config(8))
    assert load_model(folder, dtype="float32").quantization == "none"
    plain = load_model(tmp_path / "plain", dtype="float32")
    assert apart(logits(load_model(folder, dtype="float32")), logits(plain)) < 1e-5


def test_modules_that_are_left_out_stay_numbers(tmp_path):
    pack, config, _ = packs.EVERY["w8a16"]
    left = "re:.*layers.0.*down_proj"
    folder = packs.packed_folder(
        tmp_path, pack, config | {"ignore": ["lm_head", left]},
        chosen=lambda n: packs.is_projection(n) and "layers.0.mlp.down" not in n,
    )  # fmt: skip
    model = load_model(folder, dtype="float32", quantization="int8")
    assert len(quantised(model.params)) == 7
    assert model.params["layers"][0]["down"].dtype == np.float32


def test_inspection_says_what_each_tensor_is(tmp_path):
    info = inspect_checkpoint(folder_of(tmp_path, "awq"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert info.tensors[name] == ((64, 32), "awq int4, groups of 16", 64 * 16 + 2 * 32 + 2 * 128)
    assert info.quantization == "int4" and info.layouts is not None
    assert info.layouts["layers.0.qkv"].zeros == "uint8"


# -- what is broken or not read --------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj."


def without(suffix: str) -> Any:
    return lambda held: held.pop(Q + suffix)


def poisoned(suffix: str) -> Any:
    def change(held: dict[str, np.ndarray]) -> None:
        held[Q + suffix] = held[Q + suffix].copy()
        held[Q + suffix].reshape(-1)[0] = np.nan

    return change


def cut(suffix: str) -> Any:
    def change(held: dict[str, np.ndarray]) -> None:
        held[Q + suffix] = held[Q + suffix][1:].copy()

    return change


@pytest.mark.parametrize(
    ("way", "change", "words"),
    [
        ("awq", without("qzeros"), [Q, "zero points (qzeros) are missing"]),
        ("awq", without("scales"), [Q, "scales (scales) are missing"]),
        ("awq", cut("scales"), [Q, "scales has shape [1, 64], expected [2, 64] for groups of 16"]),
        ("awq", poisoned("scales"), [Q, "scales are NaN or Inf"]),
        ("gptq", cut("qzeros"), [Q, "qzeros has shape [1, 8], expected [2, 8]"]),
        ("gptq act-order", without("g_idx"), [Q, "the columns' groups (g_idx) are missing"]),
        ("int4 asym", without("weight_zero_point"), [Q, "zero points (weight_zero_point)"]),
        ("int4", cut("weight_scale"), [Q, "weight_scale has shape [63, 2], expected [64, 2]"]),
        ("w8a16", without("weight_scale"), [Q, "its scales weight_scale are missing"]),
        ("w8a16", cut("weight_scale"), [Q, "expected weight_scale of shape [64, 1]"]),
        ("w8a16", without("weight"), [Q, "there are weight_scale, but no values"]),
        ("fp8", poisoned("weight_scale"), [Q, "scales are NaN or Inf"]),
        ("fp8 static", without("input_scale"), [Q, "its static scale input_scale is missing"]),
        ("fp8 static", poisoned("input_scale"), [Q, "input_scale: expected numbers above 0"]),
    ],
)  # fmt: skip
def test_defects_are_named(way, change, words, tmp_path):
    pack, config, kind = packs.EVERY[way]
    folder = packs.packed_folder(tmp_path, pack, config, change=change)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, dtype="float32", quantization=kind)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(CheckpointError, match=re.escape(Q)):  # as numbers too
        load_model(folder, dtype="float32")


def config_with(folder: Path, **changes: Any) -> Path:
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


@pytest.mark.parametrize(
    ("way", "changes", "words"),
    [
        ("awq", {"group_size": 32}, "expected .1, 64. for groups of 32"),
        ("awq", {"group_size": 24}, "group_size = 24 does not divide its 32 columns"),
        ("awq", {"group_size": 0}, "group_size = 0, expected a number of columns"),
        ("awq", {"version": "gemv"}, "version = 'gemv' is not supported"),
        ("awq", {"bits": 3}, "bits = 3 is not supported"),
        ("gptq", {"bits": 2}, r"bits = 2 is not supported \(only 4 or 8\)"),
        ("gptq sym", {"checkpoint_format": "gptq_v2"}, "mean 7, but sym is true, so that they are"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic = .* is not supported"),
        ("fp8", {"weight_block_size": [128, 0]}, "weight_block_size = .128, 0., expected"),
        ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ("w8a8", {"config_groups": {}}, "config_groups = .*, expected groups of modules"),
        ("w8a8", {"ignore": ["re:.*q_proj"]}, "quantization_config leaves it out"),
        ("w8a8", {"quant_method": "bitsandbytes"}, "stored as 'bitsandbytes' cannot be read; awq"),
        ("w8a8", {"quant_method": "hqq"}, "stored as 'hqq' cannot be read; awq .4 bits., gptq"),
        ("w8a8", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: format"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(way, changes, words, tmp_path):
    folder = config_with(folder_of(tmp_path, way), **changes)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder)
