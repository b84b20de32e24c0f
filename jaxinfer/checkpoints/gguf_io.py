"""GGUF files, seen as a Hugging Face config and Hugging Face tensors.

Tensors are memory-mapped and dequantised one at a time by the `gguf` package, whose own table
translates names. What an architecture's files store otherwise (`gguf_architectures.py`) is undone
as it is read; an expert is read out of the tensor that holds all of a layer's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_architectures import Architecture, hf_config
from jaxinfer.checkpoints.gguf_reader import HEADER_ERRORS, GgufFile, read_gguf
from jaxinfer.checkpoints.gguf_rope import ROPE_TENSORS
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer
from jaxinfer.checkpoints.source import Source
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.base import HfSource
from jaxinfer.models.hf_config import model_config

_SUFFIXES = (".weight", ".bias")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
_UNLISTED = {"lm_head.weight": "output.weight"}  # gemma2 models have none, but may
_SINKS = ".sinks"  # the one tensor whose Hugging Face name lacks a suffix
_DEQUANTISE_AT_ONCE = 1 << 22  # values; its temporaries are several times as large


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a Hugging Face tensor is, and what its shape should be.

    Attributes:
        expert: which part of a tensor that holds a whole layer's experts; None: all of it.
        heads: of how many heads its rows are stored pair by pair; 0: they are not.
        offset: what was added to its values.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, path: Path, file: GgufFile, stored: dict[str, _Stored], experts: int):
        """`experts` is how many a layer's tensors must hold."""
        self._path, self._file, self._stored = path, file, stored
        self.shapes: dict[str, tuple[int, ...]] = {}
        mapped = {place.name for place in stored.values()}
        for name in file.tensors.keys() - mapped - ROPE_TENSORS:
            self.shapes[name] = file.shape(name)
        for name, place in stored.items():
            if place.name in file.tensors:
                self.shapes[name] = _seen_shape(file.shape(place.name), place, experts)

    def read(self, name: str) -> np.ndarray:
        place = self._stored.get(name, _Stored(name, self.shapes[name]))
        tensor, shape = self._file.tensors[place.name], self.shapes[name]
        data = tensor.data if place.expert is None else tensor.data[place.expert]
        if len(shape) != data.ndim:  # the package keeps no sizes of one
            data = data.reshape(*shape[:-1], -1)
        values = np.empty(shape, np.float32)
        rows = max(1, _DEQUANTISE_AT_ONCE // max(1, values[:1].size))
        try:
            for start in range(0, len(values), rows):
                part = slice(start, start + rows)
                values[part] = gguf.dequantize(data[part], tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.where(name)}: type {tensor.tensor_type.name} cannot be dequantised"
            ) from error
        if place.heads:
            pairs = values.reshape(place.heads, -1, 2, *shape[1:])
            values = pairs.swapaxes(1, 2).reshape(shape)
        if place.offset:
            values -= np.float32(place.offset)
        return values

    def storage(self, name: str) -> tuple[str, int]:
        place = self._stored.get(name)
        tensor = self._file.tensors[place.name if place else name]
        parts = 1 if place is None or place.expert is None else int(tensor.shape[-1])
        return tensor.tensor_type.name, tensor.n_bytes // parts

    def where(self, name: str) -> str:
        own = self._stored[name].name if name in self._stored else name
        return f"{self._file.files.get(own, self._path)}: {own}"


def _seen_shape(shape: tuple[int, ...], place: _Stored, experts: int) -> tuple[int, ...]:
    """The shape a tensor has under its Hugging Face name, if it is what it should be."""
    if place.expert is not None:
        whole = len(shape) == len(place.shape) + 1 and shape[0] == experts
        return shape[1:] if whole else shape
    if [n for n in shape if n != 1] == [n for n in place.shape if n != 1]:
        return place.shape  # sizes of one are left out of files
    return shape


def open_gguf(path: Path) -> Source:
    """Headers, config and tokenizer of a GGUF file, or of all parts of which it is the first.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    file = read_gguf(path)
    try:
        hf, architecture = hf_config(file)
        config = model_config(hf)
        tokenizer = build_tokenizer(file.metadata)
        stored = _stored(config, architecture, file)
    except HEADER_ERRORS as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = GgufTensors(path, file, stored, config.moe.num_experts if config.moe else 0)
    return Source(f"GGUF file {path}", config, _natural_dtype(file), tensors, tokenizer)


def _natural_dtype(file: GgufFile) -> str:
    """Stored half precision is kept; quantised and float32 files are served in float32."""
    kinds = {t.tensor_type.name for t in file.tensors.values() if len(t.shape) > 1}
    if kinds == {"BF16"}:
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


def _stored(config: ModelConfig, architecture: Architecture, file: GgufFile) -> dict[str, _Stored]:
    """Where each Hugging Face tensor is that the family wants."""
    kind = next(k for k, n in MODEL_ARCH_NAMES.items() if n == file.metadata[_ARCHITECTURE])
    table = gguf.get_tensor_name_map(MODEL_ARCH(kind), config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def places(form: HfSource) -> dict[str, _Stored]:
        found: dict[str, _Stored] = {}
        for name, shape in form.tensors.items():
            own, expert = _own_name(table, name, file)
            rows = heads.get(name.split(".")[-2], 0) if architecture.rotates_neighbours else 0
            offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
            found[name] = _Stored(own, shape, expert, rows, offset)
        return found

    def in_file(form: dict[str, _Stored]) -> bool:
        return any(place.name in file.tensors for place in form.values())

    stored: dict[str, _Stored] = {}
    for source in family_of(config.family).hf_sources(config).values():
        forms = [places(form) for form in (source, *source.others)]
        stored |= next((form for form in forms if in_file(form)), forms[0])
    return stored


_ARCHITECTURE = "general.architecture"


def _own_name(table: gguf.TensorNameMap, name: str, file: GgufFile) -> tuple[str, int | None]:
    """A tensor's name in the file, and which of its experts it is."""
    expert = _EXPERT.fullmatch(name)
    merged = expert[1] + expert[3] if expert else name
    own = table.get_name(merged, try_suffixes=_SUFFIXES) or _UNLISTED.get(name, name)
    if expert is None:
        return own + (".weight" if name.endswith(_SINKS) else ""), None
    apart = own.replace("_exps.", f".{expert[2]}.")  # as the first files with experts had them
    return (apart, None) if apart in file.tensors else (own, int(expert[2]))
