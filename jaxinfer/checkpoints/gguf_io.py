"""GGUF files, seen as a Hugging Face config and Hugging Face tensors.

Tensors are memory-mapped and dequantised one at a time by the `gguf` package, whose own table
translates names. What an architecture's files store otherwise (`gguf_architectures.py`) is undone
as it is read; an expert is read out of the tensor that holds all of a layer's.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_architectures import Architecture, hf_config
from jaxinfer.checkpoints.gguf_blocks import BLOCKS, packed_blocks, stored_kind
from jaxinfer.checkpoints.gguf_reader import HEADER_ERRORS, GgufFile, read_gguf
from jaxinfer.checkpoints.gguf_rope import ROPE_TENSORS
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer, check_metadata
from jaxinfer.checkpoints.source import Source
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.base import HfSource
from jaxinfer.models.hf_config import model_config
from jaxinfer.quantization.kinds import NONE, Layout
from jaxinfer.quantization.rounding import Rounded

_SUFFIXES = (".weight", ".bias")
# One of several alike: an expert, or the norm of a head.
_ONE_OF = re.compile(r"(.*\.experts|.*_layernorm(?=\.norms))(?:\.norms)?\.(\d+)(\..*)")
_UNLISTED = {"lm_head.weight": "output.weight"}  # gemma2 models have none, but may
_SINKS = ".sinks"  # the one tensor whose Hugging Face name lacks a suffix
_CORRECTION, _CORRECTION_HERE = "e_score_correction_bias", "e_score_correction.bias"
_DEQUANTISE_AT_ONCE = 1 << 22  # values; its temporaries are several times as large


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a Hugging Face tensor is, and what its shape should be.

    Attributes:
        part / parts: which part of a tensor that holds so many, a whole layer's experts say;
            None: all of it.
        halves: the file's tensors, and their shapes, that it is made of instead: how latents
            become keys (transposed), and how they become values.
        heads: of how many heads its rows are stored pair by pair; 0: they are not.
        offset: what was added to its values.
        transposed: it is stored the other way round.
        groups: its rows are those of all heads' queries, then keys, then values, while they should
            lie by so many key/value heads of `head_dim` rows; 0: they do as they are.
    """

    name: str
    shape: tuple[int, ...] = ()
    part: int | None = None
    parts: int = 0
    halves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    heads: int = 0
    offset: float = 0.0
    transposed: bool = False
    groups: int = 0
    head_dim: int = 0


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names.

    Attributes:
        kind / notes: see `packed.Packed`.
    """

    notes: tuple[str, ...]

    def __init__(self, path: Path, file: GgufFile, stored: dict[str, _Stored]):
        self._path, self._file, self._stored = path, file, stored
        self.kind, self.notes = stored_kind(file), ()
        self.shapes: dict[str, tuple[int, ...]] = {}
        mapped = {name for place in stored.values() for name in (place.name, *place.halves)}
        for name in file.tensors.keys() - mapped - ROPE_TENSORS:
            self.shapes[name] = file.shape(name)
        for name, place in stored.items():
            if place.halves:
                found = {half: file.shape(half) for half in place.halves}
                wrong = [half for half, shape in place.halves.items() if found[half] != shape]
                self.shapes |= {half: found[half] for half in wrong}
                self.shapes |= {} if wrong else {name: place.shape}
            elif place.name in file.tensors:
                self.shapes[name] = _seen_shape(file.shape(place.name), place)

    def read(self, name: str) -> np.ndarray:
        place = self._stored.get(name, _Stored(name, self.shapes[name]))
        shape = self.shapes[name]
        if place.halves:
            keys, values = (self._values(half, size) for half, size in place.halves.items())
            return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(shape)
        if place.transposed:
            return self._values(place.name, shape[::-1]).T
        values = _as_seen(self._values(place.name, shape, place.part), place)
        if place.offset:
            values -= np.float32(place.offset)
        return values

    def layout(self, name: str) -> Layout | None:
        """How a tensor is stored, if a kind has it so and in whole rows; see `packed.Packed`."""
        place = self._stored.get(name)
        if place is None or place.halves or place.transposed or place.offset:
            return None
        return BLOCKS.get(self._file.tensors[place.name].tensor_type.name)

    def packed(self, name: str) -> Rounded:
        place = self._stored[name]
        tensor = self._file.tensors[place.name]
        data = tensor.data if place.part is None else tensor.data[place.part]
        rows, columns = self.shapes[name]
        made = packed_blocks(tensor.tensor_type.name, data.reshape(rows, -1), columns)
        zeros = None if made.zeros is None else _as_seen(made.zeros, place)
        return Rounded(_as_seen(made.values, place), _as_seen(made.scales, place), zeros=zeros)

    def order(self, name: str) -> np.ndarray | None:
        return None

    def _values(self, own: str, shape: tuple[int, ...], part: int | None = None) -> np.ndarray:
        """Numbers of one of the file's tensors in the order they are stored in."""
        tensor = self._file.tensors[own]
        data = tensor.data if part is None else tensor.data[part]
        if len(shape) != data.ndim:  # the package keeps no sizes of one
            data = data.reshape(*shape[:-1], -1)
        values = np.empty(shape, np.float32)
        rows = max(1, _DEQUANTISE_AT_ONCE // max(1, values[:1].size))
        try:
            for start in range(0, len(values), rows):
                some = slice(start, start + rows)
                values[some] = gguf.dequantize(data[some], tensor.tensor_type)
        except NotImplementedError as error:
            where, kind = self._file.files.get(own, self._path), tensor.tensor_type.name
            raise CheckpointError(f"{where}: {own}: type {kind} cannot be dequantised") from error
        return values

    def storage(self, name: str) -> tuple[str, int]:
        place = self._stored.get(name)
        if place and place.halves:
            halves = [self._file.tensors[half] for half in place.halves]
            return halves[0].tensor_type.name, sum(half.n_bytes for half in halves)
        tensor = self._file.tensors[place.name if place else name]
        parts = 1 if place is None or place.part is None else int(tensor.shape[-1])
        return tensor.tensor_type.name, tensor.n_bytes // parts

    def where(self, name: str) -> str:
        own = self._stored[name].name if name in self._stored else name
        return f"{self._file.files.get(own, self._path)}: {own}"


def _as_seen(rows: np.ndarray, place: _Stored) -> np.ndarray:
    """Rows of a tensor, or of its scales, in the order that Hugging Face has."""
    if place.heads:
        pairs = rows.reshape(place.heads, -1, 2, *rows.shape[1:])
        rows = pairs.swapaxes(1, 2).reshape(rows.shape)
    return _by_group(rows, place.groups, place.head_dim) if place.groups else rows


def _seen_shape(shape: tuple[int, ...], place: _Stored) -> tuple[int, ...]:
    """The shape a tensor has under its Hugging Face name, if it is what it should be."""
    if place.part is not None:
        whole = len(shape) == len(place.shape) + 1 and shape[0] == place.parts
        return shape[1:] if whole else shape
    if place.transposed:
        return shape[::-1]
    if [n for n in shape if n != 1] == [n for n in place.shape if n != 1]:
        return place.shape  # sizes of one are left out of files
    return shape


def _by_group(rows: np.ndarray, groups: int, head_dim: int) -> np.ndarray:
    """All queries', keys' and values' rows, brought together by key/value head."""
    kv = groups * head_dim
    parts = (rows[: -2 * kv], rows[-2 * kv : -kv], rows[-kv:])
    shape = (groups, -1, *rows.shape[1:])
    return np.concatenate([part.reshape(shape) for part in parts], axis=1).reshape(rows.shape)


def open_gguf(path: Path) -> Source:
    """Headers, config and tokenizer of a GGUF file, or of all parts of which it is the first.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    file = read_gguf(path)
    try:
        check_metadata(file.metadata)
        hf, architecture = hf_config(file)
        config = model_config(hf)
        tokenizer = build_tokenizer(file.metadata)
        stored = _stored(config, architecture, file)
    except HEADER_ERRORS as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = GgufTensors(path, file, stored)
    dtype, packed = _natural_dtype(file), tensors if tensors.kind != NONE else None
    return Source(f"GGUF file {path}", config, dtype, tensors, tokenizer, packed=packed)


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
        own = {name: _own_name(table, name, file) for name in form.tensors}
        parts = Counter(stored for stored, part in own.values() if part is not None)
        return {
            name: replace(
                layout(name, own[name][0]),
                shape=shape,
                part=own[name][1],
                parts=parts[own[name][0]],
            )
            for name, shape in form.tensors.items()
        }

    def layout(name: str, own: str) -> _Stored:
        module, suffix = name.split(".")[-2:]
        return _Stored(
            own,
            halves=_halves(config, own, file),
            heads=heads.get(module, 0) if architecture.rotates_neighbours else 0,
            offset=architecture.norm_offset if name.endswith("norm.weight") else 0.0,
            transposed=module in architecture.transposed and suffix == "weight",
            groups=config.num_kv_heads if module == architecture.fused else 0,
            head_dim=config.head_dim,
        )

    def in_file(form: dict[str, _Stored]) -> bool:
        return any(place.name in file.tensors for place in form.values())

    stored: dict[str, _Stored] = {}
    for source in family_of(config.family).hf_sources(config).values():
        forms = [places(form) for form in (source, *source.others)]
        stored |= next((form for form in forms if in_file(form)), forms[0])
    return stored


_ARCHITECTURE = "general.architecture"


def _halves(config: ModelConfig, own: str, file: GgufFile) -> dict[str, tuple[int, ...]]:
    """What files that hold keys' and values' part of a latent's projection apart have for it."""
    keys, values = (own.replace("_kv_b.", f"_{x}_b.") for x in "kv")
    if config.mla is None or "_kv_b." not in own or not {keys, values} <= file.tensors.keys():
        return {}
    m = config.mla
    shapes = (config.num_heads, m.kv_rank, m.nope_dim), (config.num_heads, m.v_dim, m.kv_rank)
    return dict(zip((keys, values), shapes, strict=True))


def _own_name(table: gguf.TensorNameMap, name: str, file: GgufFile) -> tuple[str, int | None]:
    """A tensor's name in the file, and which of several alike in it."""
    found = _ONE_OF.fullmatch(name)
    merged = found[1] + found[3] if found else name.replace(_CORRECTION, _CORRECTION_HERE)
    own = table.get_name(merged, try_suffixes=_SUFFIXES) or _UNLISTED.get(name, name)
    if found is None:
        return own + (".weight" if name.endswith(_SINKS) else ""), None
    apart = own.replace("_exps.", f".{found[2]}.")  # as the first files with experts had them
    alone = apart != own and apart in file.tensors
    return (apart, None) if alone else (own, int(found[2]))
