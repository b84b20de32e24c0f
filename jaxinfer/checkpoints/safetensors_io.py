"""Hugging Face folders: config.json, safetensors files (with or without an index), tokenizer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.checkpoints.base_names import complete_names, text_tensors
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.quantised_files import QuantisedFiles
from jaxinfer.checkpoints.source import Source, Tensors
from jaxinfer.config import ModelConfig
from jaxinfer.json_files import read_object
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config
from jaxinfer.models.hf_quantization import hf_storage
from jaxinfer.models.text_part import text_settings
from jaxinfer.tokenizer import Tokenizer, eos_token_ids
from jaxinfer.tokenizer_files import MissingTokenizerError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F32", "BF16", "F16", "F64", "U8")


class SafetensorsFiles:
    """The tensors of one or more safetensors files. Headers are read at once, data when asked."""

    def __init__(self, files: list[Path]):
        """Raises CheckpointError naming a file that is broken, or a tensor that is in two."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for path in files:
            for name, shape, dtype in _header(path):
                if name in self._files:
                    raise CheckpointError(f"{name} is in both {self._files[name]} and {path}")
                self._files[name], self.shapes[name], self.dtypes[name] = path, shape, dtype

    def read(self, name: str) -> np.ndarray:
        if self.dtypes[name] not in _DTYPES:
            raise CheckpointError(
                f"{self.where(name)}: {name}: stored as {self.dtypes[name]}, expected one of "
                f"{', '.join(_DTYPES)}"
            )
        return self.raw(name)

    def raw(self, name: str) -> np.ndarray:
        """A tensor of integers or numbers, whatever it is for."""
        with safe_open(self._files[name], framework="numpy") as file:
            return file.get_tensor(name)

    def storage(self, name: str) -> tuple[str, int]:
        kind = self.dtypes[name]
        bits = int("".join(c for c in kind.split("_")[0] if c.isdigit()) or 8)
        return kind, math.prod(self.shapes[name]) * bits // 8

    def where(self, name: str) -> str:
        return str(self._files[name])


def _header(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor; the library checks offsets against the file's size."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [(n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} ({_size(path)}): {error}") from error


def _size(path: Path) -> str:
    """The size of a file, or why it has none, in words."""
    try:
        return f"{path.stat().st_size} bytes"
    except OSError as error:
        return str(error.strerror).lower()


def open_huggingface(folder: Path) -> Source:
    """Config, tokenizer (None if it has none) and headers of a Hugging Face folder.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    hf, config, eos_ids = read_hf_config(folder / "config.json")
    description, files = f"Hugging Face folder {folder}", SafetensorsFiles(_files(folder))
    _check_all_listed(folder / INDEX, files)
    storage, packed = hf_storage(hf), None
    tensors: Tensors = files
    if storage is not None and storage.schemes:
        wanted = family_of(config.family).hf_sources(config).values()
        known = {name for source in wanted for name in source.tensors}
        tensors = packed = QuantisedFiles(files, storage, known, description)
    tensors, config = text_tensors(complete_names(tensors, config), config)
    tokenizer, missing = None, ""
    try:
        tokenizer = Tokenizer.from_folder(folder, eos_ids)
    except MissingTokenizerError as error:
        missing = str(error)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    packed = packed if tensors is packed else None
    return Source(description, config, dtype, tensors, tokenizer, missing, packed)


def read_hf_config(file: Path) -> tuple[dict[str, Any], ModelConfig, tuple[int, ...]]:
    """A config.json (of a whole its text part), as ours, and the ids that it says end an output.

    Raises CheckpointError naming the file and the field.
    """
    hf = _read_json(file)
    try:
        config, hf = model_config(hf), text_settings(hf)
        return hf, config, eos_token_ids(hf)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, as the index says where there is one."""
    index = folder / INDEX
    if index.is_file():
        return _indexed_files(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if found := sorted(folder.glob("*.safetensors")):
        _check_parts(found)
        return found
    raise CheckpointError(f"{folder}: no *.safetensors file; other weight formats are not read")


def _check_parts(files: list[Path]) -> None:
    """Raise CheckpointError if files called NAME-00001-of-0000N are not all there."""
    for part in filter(None, (_PART.fullmatch(path.name) for path in files)):
        count = int(part[3])
        names = [f"{part[1]}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if missing := sorted(set(names) - {path.name for path in files}):
            raise CheckpointError(f"{files[0].parent}: {', '.join(missing)} of {count} missing")


def _check_all_listed(index: Path, tensors: SafetensorsFiles) -> None:
    """Raise CheckpointError if the index of a folder that has one lacks a tensor."""
    if not index.is_file():
        return
    weight_map = _read_json(index)["weight_map"]
    if unlisted := sorted(tensors.shapes.keys() - weight_map.keys()):
        raise CheckpointError(
            f"{index}: {unlisted[0]} is in {tensors.where(unlisted[0])}, but not in weight_map"
        )


def _indexed_files(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    if odd := [name for name in weight_map.values() if not _is_file_name(name)]:
        raise CheckpointError(f"{index}: {odd[0]!r} is not a file name")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    if missing := [path.name for path in files if not path.exists()]:
        raise CheckpointError(f"{index}: {', '.join(missing)} of {len(files)} files are missing")
    held = {path.name: {name for name, _, _ in _header(path)} for path in files}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise CheckpointError(f"{index}: {tensor} should be in {file}, which lacks it")
    return files


def _is_file_name(name: Any) -> bool:
    """Whether a value names a file in the folder, and no other."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
