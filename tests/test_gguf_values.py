"""Whatever a key of a GGUF file holds: the model is as it says, or refused by the key's name."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import hf_folder, write_gguf
from tiny_gguf import ARCHITECTURES, write_family_gguf

from jaxinfer.checkpoints import CheckpointError, inspect_checkpoint, load_model
from jaxinfer.checkpoints.gguf_architectures import hf_config
from jaxinfer.checkpoints.gguf_metadata import KEYS
from jaxinfer.checkpoints.gguf_reader import GgufFile, read_gguf
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer, check_metadata
from jaxinfer.models.hf_config import model_config
from jaxinfer.models.hf_fields import FIELDS

ODD: list[Any] = [True, 0, -1, 1.5, 1e30, math.nan, 1 << 40, "x", "", [], [1], ["x"]]


def check(file: GgufFile, key: str, value: Any) -> None:
    """A config, or an error that names the key: in the file's words or in those of config.json."""
    changed = dataclasses.replace(file, metadata=file.metadata | {key: value})
    try:
        check_metadata(changed.metadata)
        model_config(hf_config(changed)[0])
    except ValueError as error:
        said = str(error)
        named = (key.rpartition(".")[2], "metadata key ", *FIELDS)
        assert any(name in said for name in named), f"{key} = {value!r}: {error}"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_value_of_any_kind_is_taken_or_refused_by_the_keys_name(tmp_path: Path, family: str):
    file = read_gguf(write_family_gguf(tmp_path / "x.gguf", family))
    arch = file.metadata["general.architecture"]
    for key in {*file.metadata, *(f"{arch}.{key}" for key in KEYS)}:
        if key.startswith(f"{arch}."):
            for value in ODD:
                check(file, key, value)
            without = {name: own for name, own in file.metadata.items() if name != key}
            with contextlib.suppress(ValueError):  # and no other error
                model_config(hf_config(dataclasses.replace(file, metadata=without))[0])


def test_a_value_of_any_kind_of_the_tokenizer(tmp_path: Path):
    metadata = read_gguf(write_gguf(tmp_path / "x.gguf")).metadata
    for key in [key for key in metadata if key.startswith("tokenizer.")]:
        for value in ODD:
            try:
                check_metadata(metadata | {key: value})
                build_tokenizer(metadata | {key: value})
            except ValueError as error:
                said, name = str(error), key.removeprefix("tokenizer.ggml.").removesuffix("_id")
                assert name in said or "EOS id" in said, f"{key} = {value!r}: {error}"


def test_a_scaling_of_an_unknown_kind(tmp_path: Path):
    file = read_gguf(write_gguf(tmp_path / "x.gguf"))
    for kind in ("ntk", "x"):
        changed = file.metadata | {"llama.rope.scaling.type": kind}
        with pytest.raises(ValueError, match=rf"rope.scaling.type = '{kind}' .*known: none, lin"):
            hf_config(dataclasses.replace(file, metadata=changed))


def test_two_tensors_of_one_name(tmp_path: Path):
    """Both are extra: neither is in the way of a tensor that is read."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("extra.weight", "extra_weight"):
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes().replace(b"extra_weight", b"extra.weight"))
    with pytest.raises(CheckpointError, match=r"extra.weight: there are two tensors .* download"):
        read_gguf(path)


def test_how_many_parts_there_are_is_a_number(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_string("split.count", "two")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"split.count = 'two', expected an integer"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (1e300, "float32", r"too large for float32 \(up to 1e\+300\); no dtype that we serve in"),
        (1e300, "float16", r"too large for float16 \(up to 1e\+300\); no dtype that we serve in"),
        (1e6, "float16", r"too large for float16 \(up to 1e\+06\); choose float32 or bfloat16"),
    ],
)
def test_values_too_large_for_the_dtype(tmp_path: Path, value: float, dtype: str, words: str):
    file = hf_folder(tmp_path) / "model.safetensors"
    tensors = {name: np.asarray(t, np.float64) for name, t in load_file(file).items()}
    tensors["model.norm.weight"][3] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path, dtype=dtype)
    assert inspect_checkpoint(tmp_path).stored.keys() == {"F64"}
