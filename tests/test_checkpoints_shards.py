"""Folders of several safetensors files, in several dtypes, and the defects only they can have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import dense_logits, expected, hf_folder
from tiny_gguf import write_family_gguf

from jaxinfer.checkpoints import CheckpointError, load_model

INDEX = "model.safetensors.index.json"
DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    return str(caught.value)


def name(part: int) -> str:
    return f"model-{part + 1:05d}-of-00003.safetensors"


def shards(folder: Path, dtypes: tuple[Any, ...] = (jnp.bfloat16,) * 3) -> dict[str, str]:
    """The oracle in three files, the tensors of each in a dtype; returns the index's map."""
    hf_folder(folder)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {tensor: name(i % 3) for i, tensor in enumerate(sorted(held))}
    for part, dtype in enumerate(dtypes):
        tensors = {n: t.astype(dtype) for n, t in held.items() if weight_map[n] == name(part)}
        save_file(tensors, folder / name(part))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "dtypes",
    [
        (jnp.bfloat16, np.float16, np.float32),
        (np.float32, jnp.bfloat16, np.float16),
        (np.float64, np.float32, jnp.bfloat16),
    ],
)
def test_dtypes_may_be_mixed(tmp_path: Path, dtypes: tuple[Any, ...]) -> None:
    """The oracle's weights are bfloat16, so wider types hold them exactly; float16 but for tiny
    ones. Fused parameters are made of parts in several types."""
    shards(tmp_path, dtypes)
    tokens, wanted = expected("default")
    model = load_model(tmp_path, dtype="float32")
    found = dense_logits(model.config, model.params, tokens)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert load_model(tmp_path).params["embed"].dtype == jnp.bfloat16 or model.dtype == "float32"


Change = Callable[[Path, dict[str, str]], Any]


def moved(folder: Path, weight_map: dict[str, str]) -> None:
    """The index says of a tensor that it is in another file than it is."""
    part = int(weight_map[DOWN][6:11])
    write_index(folder, weight_map | {DOWN: name(part % 3)})


def twice(folder: Path, weight_map: dict[str, str]) -> None:
    other = folder / name(int(weight_map[DOWN][6:11]) % 3)
    held = load_file(folder / weight_map[DOWN])
    save_file(load_file(other) | {DOWN: held[DOWN]}, other)


def unlisted(folder: Path, weight_map: dict[str, str]) -> None:
    write_index(folder, {n: file for n, file in weight_map.items() if n != DOWN})


def cut(folder: Path, weight_map: dict[str, str]) -> None:
    path = folder / name(1)
    path.write_bytes(path.read_bytes()[:-10])


def no_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).unlink()
    (folder / name(1)).unlink()


DEFECTS: dict[str, tuple[Change, list[str]]] = {
    "missing shard": (lambda f, _: (f / name(1)).unlink(), [INDEX, f"{name(1)} of 3 files"]),
    "cut shard": (cut, [name(1), "bytes)"]),
    "tensor in another file": (moved, [INDEX, DOWN, "which lacks it"]),
    "tensor in two files": (twice, [DOWN, "in both"]),
    "tensor the index lacks": (unlisted, [INDEX, DOWN, "not in weight_map"]),
    "missing shard and no index": (no_index, [name(1), "missing"]),
    "index of numbers": (lambda f, m: write_index(f, m | {DOWN: 7}), [INDEX, "not a file name"]),  # type: ignore[dict-item]
    "cut index": (lambda f, _: (f / INDEX).write_text('{"weight_map": {'), [INDEX, "not valid"]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_of_sharded_folders(tmp_path: Path, defect: str) -> None:
    change, words = DEFECTS[defect]
    weight_map = shards(tmp_path)
    assert load_model(tmp_path)
    change(tmp_path, weight_map)
    message = refusal(tmp_path)
    assert all(word in message for word in words), message


def test_shards_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).unlink()
    tokens, wanted = expected("default")
    model = load_model(tmp_path, dtype="float32")
    found = dense_logits(model.config, model.params, tokens)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen3_moe"])
def test_defects_of_gguf_files_name_both_names(tmp_path: Path, family: str) -> None:
    """Missing, extra, misshapen and NaN tensors of files that are not llama's."""
    path, norm = tmp_path / "x.gguf", "blk.1.attn_norm.weight"
    cases: dict[str, tuple[np.ndarray | None, str, list[str]]] = {
        "missing": (None, norm, ["layers.1.input_layernorm.weight: missing"]),
        "misshapen": (np.ones(31, np.float32), norm, [norm, "expected shape [32], found [31]"]),
        "extra": (np.ones(32, np.float32), "blk.7.attn_norm.weight", ["not a tensor of a"]),
        "NaN": (np.full(32, np.inf, np.float32), norm, [norm, "32 of 32 values are NaN or Inf"]),
    }
    for value, tensor, words in cases.values():
        message = refusal(write_family_gguf(path, family, tensors={tensor: value}))
        assert all(word in message for word in (*words, str(path))), message
