"""Experts as checkpoints hold them: one by one, fused, transposed and interleaved, or as MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from test_families import ORACLES, family_folder
from tiny_checkpoint import write_tokenizer

from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model
from jaxinfer.models.mxfp4 import dequantise
from jaxinfer.params import named_leaves

Weights = dict[str, np.ndarray]
PROJECTIONS = ("gate_up_proj", "down_proj")


def weights_of(family: str) -> Weights:
    with safe_open(ORACLES / family / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def folder_with(folder: Path, family: str, weights: Weights, **config: Any) -> Path:
    """A Hugging Face folder of a family with other tensors and settings."""
    folder.mkdir(parents=True)
    hf = json.loads((ORACLES / family / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def same_parameters(one: Any, other: Any) -> bool:
    pairs = zip(named_leaves(one.params), named_leaves(other.params), strict=True)
    return all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)


# -- fused -----------------------------------------------------------------------------------------


def fused(weights: Weights, names: tuple[str, str, str], experts: int) -> Weights:
    """One tensor for all gates and ups of a layer and one for all downs, as transformers 5 has."""
    made, stacks = {}, {}
    for name, value in weights.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if ".experts." not in name:
            made[name] = value
            continue
        layer, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        stacks[layer, names.index(projection), int(expert)] = value
    for layer in {layer for layer, _, _ in stacks}:
        gates, ups, downs = ([stacks[layer, i, e] for e in range(experts)] for i in range(3))
        both = [np.concatenate(pair) for pair in zip(gates, ups)]
        made[f"{layer}.experts.gate_up_proj"] = np.stack(both)
        made[f"{layer}.experts.down_proj"] = np.stack(downs)
    return made


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_fused_experts_are_the_same_as_one_by_one(family, tmp_path):
    apart = load_model(family_folder(tmp_path / "apart", family))
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    weights = fused(weights_of(family), names, apart.config.moe.num_experts)
    assert not any(name.endswith(".0.up_proj.weight") for name in weights)
    together = load_model(folder_with(tmp_path / "fused", family, weights))
    assert same_parameters(apart, together)


def test_half_of_a_fused_checkpoint_is_named_for_what_it_lacks(tmp_path):
    weights = fused(weights_of("olmoe"), ("gate_proj", "up_proj", "down_proj"), 4)
    del weights["model.layers.1.mlp.experts.down_proj"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.*down_proj.*missing"):
        load_model(folder_with(tmp_path / "model", "olmoe", weights))


# -- MXFP4 -----------------------------------------------------------------------------------------


def quantised(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, scales) of values [..., K] in the published layout, by the gguf package, which has
    the scale in front and keeps the block's first half in the low bits of its bytes."""
    packed = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.MXFP4)
    packed = packed.reshape(*values.shape[:-1], -1, 17)
    codes = np.concatenate([packed[..., 1:] & 15, packed[..., 1:] >> 4], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, packed[..., 0].copy()


def test_values_are_those_of_the_gguf_package():
    values = np.random.default_rng(0).normal(size=(3, 5, 96)) * 10.0 ** np.arange(-2, 3)[:, None]
    blocks, scales = quantised(values)
    assert blocks.shape == (3, 5, 3, 16) and scales.shape == (3, 5, 3)
    kind = gguf.GGMLQuantizationType.MXFP4
    wanted = gguf.dequantize(gguf.quantize(values.astype(np.float32), kind), kind)
    found = dequantise(blocks, scales)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), wanted.reshape(3, 5, 96))


def test_a_block_by_hand():
    """Every code once, in order, low bits first; then the same codes at other scales."""
    codes = np.arange(0, 16, 2, dtype=np.uint8) | np.arange(1, 16, 2, dtype=np.uint8) << 4
    blocks = np.concatenate([codes, codes])[None]
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = np.array([*magnitudes, *(-m for m in magnitudes)] * 2)
    for scale, factor in ((127, 1), (128, 2), (120, 2.0**-7), (1, 2.0**-126)):
        found = dequantise(blocks, np.array([scale], np.uint8))
        np.testing.assert_array_equal(found.astype(np.float64), wanted * factor)
    assert np.isnan(dequantise(blocks, np.array([255], np.uint8)).astype(np.float32)).all()


def mxfp4(weights: Weights) -> tuple[Weights, Weights]:
    """gpt-oss with its experts as MXFP4, and with the values that these stand for."""
    packed, plain = {}, {}
    for name, value in weights.items():
        if not name.endswith(PROJECTIONS):
            packed[name] = plain[name] = value
            continue
        blocks, scales = quantised(value.swapaxes(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        kind = gguf.GGMLQuantizationType.MXFP4
        rows = gguf.dequantize(gguf.quantize(value.swapaxes(1, 2).astype(np.float32), kind), kind)
        plain[name] = np.ascontiguousarray(rows.swapaxes(1, 2).astype(value.dtype))
    return packed, plain


QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed, _ = mxfp4(weights_of("gpt_oss"))
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return folder_with(folder, "gpt_oss", packed, quantization_config=QUANTISED)


def test_mxfp4_experts_are_what_they_stand_for(packed_folder, tmp_path):
    _, plain = mxfp4(weights_of("gpt_oss"))
    wanted = load_model(folder_with(tmp_path / "plain", "gpt_oss", plain))
    found = load_model(packed_folder)
    assert found.dtype == "bfloat16" and same_parameters(wanted, found)
    original = load_model(family_folder(tmp_path / "original", "gpt_oss"))
    assert not same_parameters(original, found), "four bits do lose something"
    converted = load_model(convert(packed_folder, tmp_path / "orbax"))
    assert converted.config == found.config and same_parameters(converted, found)
    in_float32 = load_model(packed_folder, dtype="float32")
    widened = jax.tree.map(lambda x: np.asarray(x, np.float32), found.params)
    for (name, one), (_, other) in zip(named_leaves(in_float32.params), named_leaves(widened)):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_inspect_says_how_they_are_stored(packed_folder):
    info = inspect_checkpoint(packed_folder)
    experts = 2 * 4 * (128 * 32 + 32 * 64)
    assert info.stored["U8"] == experts // 2 + experts // 32
    assert info.dtype == "bfloat16"


def broken(tmp_path: Path, packed_folder: Path, change: Any, **config: Any) -> Path:
    with safe_open(packed_folder / "model.safetensors", framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(weights)
    return folder_with(tmp_path / "broken", "gpt_oss", weights, **config)


SCALES = "model.layers.0.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(SCALES), "down_proj_scales: missing"),
        (lambda w: w.update({SCALES: w[SCALES][:, :, :1].copy()}), r"found \[4, 32, 1\]"),
        (lambda w: w.update({SCALES: w[SCALES].astype(np.float32)}), "float32, expected uint8"),
        (lambda w: w[SCALES].fill(255), "values are NaN or Inf"),
        (lambda w: w[SCALES].fill(254), "values are NaN or Inf"),
        (
            lambda w: w.update({"model.norm.weight": np.ones(32, np.uint8)}),
            "stored as U8, expected floating point",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(change, said, tmp_path, packed_folder):
    folder = broken(tmp_path, packed_folder, change, quantization_config=QUANTISED)
    with pytest.raises(CheckpointError, match=said):
        load_model(folder)


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "quark"), ("olmoe", "mxfp4")])
def test_storage_that_a_family_does_not_read_is_refused(family, method, tmp_path):
    folder = shutil.copytree(ORACLES / family, tmp_path / family)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": {
        "quant_method": method}}))  # fmt: skip
    with pytest.raises(CheckpointError, match=f"stored as '{method}' cannot be read"):
        load_model(folder)
