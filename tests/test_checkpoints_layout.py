"""GGUF offsets that stay within the file but name the wrong bytes; paths that are no model's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_checkpoint import hf_folder, write_gguf

from jaxinfer.checkpoints import CheckpointError, load_model, resolve_model
from jaxinfer.checkpoints.gguf_reader import _CheckedReader

ALIGNMENT = 32


def offsets(path: Path) -> dict[str, int]:
    reader = gguf.GGUFReader(path)
    return {t.name: int(t.field.parts[5][0]) for t in reader.tensors}


def with_offset(path: Path, name: str, offset: int) -> None:
    field = next(t.field for t in gguf.GGUFReader(path).tensors if t.name == name)
    before = sum(part.nbytes for part in field.parts[:5])
    data = bytearray(path.read_bytes())
    at = field.offset + before
    data[at : at + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("shift", ["neighbour", "back", "forward", "first"])
def test_every_tensor_with_another_ones_bytes_is_refused(tmp_path: Path, shift: str) -> None:
    whole = write_gguf(tmp_path / "whole.gguf")
    stated = offsets(whole)
    order = sorted(stated, key=stated.__getitem__)
    assert load_model(whole) and len(order) > 10
    for place, name in enumerate(order[1:-1], 1):
        wrong = {
            "neighbour": stated[order[place - 1]],
            "back": stated[name] - ALIGNMENT,
            "forward": stated[name] + ALIGNMENT,
            "first": 0,
        }[shift]
        path = tmp_path / "lying.gguf"
        path.write_bytes(whole.read_bytes())
        with_offset(path, name, wrong)
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        message = str(caught.value)
        assert str(path) in message and "expected offset" in message, message
        assert name in message, message


def test_a_gap_before_the_first_tensor_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "lying.gguf")
    stated = offsets(path)
    first = min(stated, key=stated.__getitem__)
    with_offset(path, first, ALIGNMENT)
    with pytest.raises(CheckpointError, match=f"expected offset 0.*found {ALIGNMENT}"):
        load_model(path)


@pytest.mark.parametrize("alignment", [64, 256])
def test_a_stated_alignment_is_what_the_gaps_are_measured_by(
    tmp_path: Path, alignment: int
) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name in "abc":
        writer.add_tensor(name, np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [t.name for t in _CheckedReader(path).tensors] == ["a", "b", "c"]
    with_offset(path, "b", 2 * alignment)
    with pytest.raises(ValueError, match=f"b: expected offset {alignment}, right after a, found"):
        _CheckedReader(path)


def test_wrong_paths_say_what_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "inside" / "x.gguf").write_bytes(b"")
    (tmp_path / "X.GGUF").write_bytes(b"")
    assert resolve_model(tmp_path / "X.GGUF")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "12ab"  # as the Hub's cache has it
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    for path, words in {
        tmp_path / "nowhere": "does not exist",
        tmp_path / ("n" * 300): "does not exist",
        Path("owner/name-1.5"): "hf download owner/name-1.5 --local-dir FOLDER",
        "https://huggingface.co/owner/name/": "hf download owner/name --local-dir FOLDER",
        tmp_path / "models--a--b": "did you mean .*snapshots/12ab",
        tmp_path / "notes.txt": "is a file but no .gguf file",
        tmp_path / "inside": "did you mean",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            resolve_model(path)
    with pytest.raises(CheckpointError, match="dtype 'int8' is not one of float32"):
        load_model(hf_folder(tmp_path / "hf"), dtype="int8")
