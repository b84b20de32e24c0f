"""GGUF offsets that stay within the file but name the wrong bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_checkpoint import write_gguf

from jaxinfer.checkpoints import CheckpointError, load_model
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
