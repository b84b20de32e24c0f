"""Whatever the files of a checkpoint hold: taken, or refused in a line that names the file."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from jaxinfer_service.cli.text_options import parse_override
from tiny_checkpoint import hf_folder, write_tokenizer

from jaxinfer.chat_template import ChatTemplate, ChatTemplateError
from jaxinfer.checkpoints import CheckpointError, convert
from jaxinfer.checkpoints.load import load_model, open_source
from jaxinfer.checkpoints.orbax_io import read_manifest
from jaxinfer.json_files import parse_object
from jaxinfer.tokenizer import Tokenizer

PIECES = Path(__file__).parent / "fixtures" / "oracles" / "text" / "bpe.model"
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 2**70, math.nan, "", "x", [], [1], ["x"], [None], [[1]], {}, {"a": 1},
    {"content": 5}, {"content": None}, {"5": "x"}, {"5": {"content": "x", "special": "no"}},
    {"-1": {"content": "x"}}, {"x": {"content": "x"}},
]  # fmt: skip
NESTED = {"lists": "[" * 100_000, "objects": '{"a":' * 100_000}
JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "model.safetensors.index.json",
)  # fmt: skip
TOKENIZER_FIELDS = (
    "bos_token", "eos_token", "pad_token", "add_bos_token", "add_eos_token", "added_tokens_decoder",
    "additional_special_tokens", "extra_special_tokens", "tokenizer_class", "legacy",
    "add_prefix_space", "chat_template",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    return str(caught.value)


# -- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NESTED["lists"].encode(), "nested too deeply"),
        (NESTED["objects"].encode(), "nested too deeply"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b'{"eos_token": "\\ud800"}', "half of a character"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=["lists", "objects", "bytes", "surrogate", "digits"],
)
def test_json_that_cannot_be_read(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    assert f"{folder / name}: " in refusal(folder)
    assert message in refusal(folder)


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_an_override_that_is_nested_too_deeply(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no JSON: maximum recursion depth"):
        parse_override(text)


def test_characters_outside_the_basic_plane_are_whole() -> None:
    assert parse_object('{"eos_token": "\\ud83d\\ude00"}') == {"eos_token": "\U0001f600"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", {}, [None], [[1]], 1.5, True])
def test_ids_that_are_none_are_refused_by_file(folder: Path, name: str, value: Any) -> None:
    data = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(data | {"eos_token_id": value}))
    assert f"{folder / name}: eos_token_id = " in refusal(folder)


@pytest.mark.parametrize("file", ["\0.safetensors", "..", "a/b", "x" * 300, 5, None, ["x"]])
def test_names_of_shards_that_are_none(folder: Path, file: Any) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert str(folder) in refusal(folder)


# -- tokenizers --------------------------------------------------------------------------------


def byte_level(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "x": 3}))
    (folder / "merges.txt").write_text("a b\n")


@pytest.mark.parametrize(
    "write",
    [write_tokenizer, byte_level, lambda folder: shutil.copy(PIECES, folder / "tokenizer.model")],
    ids=["json", "byte level", "SentencePiece"],
)
@pytest.mark.parametrize("field", TOKENIZER_FIELDS)
def test_fields_of_a_tokenizers_config(
    tmp_path: Path, write: Callable[[Path], Any], field: str
) -> None:
    write(tmp_path)
    refused = 0
    for value in ODD:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({field: value}))
        try:
            tokenizer = Tokenizer.from_folder(tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error), value
            assert any(name in str(error) for name in (field, "chat template")), (value, error)
            refused += 1
        else:
            tokenizer.encode("ab")
    assert refused > len(ODD) // 3


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json"])
@pytest.mark.parametrize("value", [None, -1, 1.5, "1", [1], 2**31, True])
def test_tokens_whose_ids_are_none(tmp_path: Path, name: str, value: Any) -> None:
    byte_level(tmp_path)
    file = tmp_path / name
    data = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(data | {"b": value}))
    with pytest.raises(ValueError, match="the id of 'b' ") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_templates_that_are_not_utf8_are_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\xff")
    assert f"{folder / name}: " in refusal(folder)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 900 + "1" + ")" * 900 + " }}",
        "{{ 1" + "+1" * 900 + " }}",
        "{% if 1 %}" * 150 + "{% endif %}" * 150,
        "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
        "{% if 0 %}" + "{% elif 0 %}" * 5000 + "{% endif %}",
    ],
    ids=["brackets", "sums", "ifs", "loops", "alternatives"],
)
def test_templates_that_python_cannot_compile(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="nested too deeply, or too long"):
        ChatTemplate(source, {})


# -- GGUF and our own --------------------------------------------------------------------------


def test_gguf_arrays_of_arrays(tmp_path: Path) -> None:
    array, count, key = 9, 2000, b"general.tags"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    nested = struct.pack("<I", array) + struct.pack("<IQ", array, 1) * count
    path = tmp_path / "model.gguf"
    path.write_bytes(header + nested + struct.pack("<IQI", 4, 1, 5))
    assert "a metadata array of arrays" in refusal(path)


def test_fields_of_our_own_manifest(folder: Path, tmp_path: Path) -> None:
    ours = convert(folder, tmp_path / "ours")
    file = ours / "jaxinfer.json"
    manifest = json.loads(file.read_text())
    for field in manifest:
        for value in [value for value in ODD if value != manifest[field]]:
            if field == "source" and isinstance(value, str):
                continue
            file.write_text(json.dumps(manifest | {field: value}))
            with pytest.raises(CheckpointError) as caught:
                load_model(ours)
            assert str(ours) in str(caught.value), (field, value)
    for field in ("rope", "local_rope", "moe", "mla", "kinds"):
        config = manifest["config"] | {field: 5}
        file.write_text(json.dumps(manifest | {"config": config}))
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(ours)
    file.write_text(NESTED["lists"])
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_manifest(ours)
