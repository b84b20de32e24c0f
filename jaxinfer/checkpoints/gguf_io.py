"""GGUF files, seen as a Hugging Face config and Hugging Face tensors.

Tensors are memory-mapped and dequantised one at a time by the `gguf` package, whose own table
translates names. The llama architecture stores query and key rows in the order its rotary code
wants (pairs side by side); reading undoes that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer
from jaxinfer.checkpoints.source import Source
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config

_ROPE_DIVISORS = "rope_freqs.weight"  # llama3 scaling, one divisor for each frequency
_ROPE_UNREAD = {  # settings we do not compute, with the values that mean nothing
    "rope.scale_linear": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_SUFFIXES = (".weight", ".bias")
_LONGEST_ARRAY = 1 << 22  # vocabularies have a few hundred thousand entries
_DEQUANTISE_AT_ONCE = 1 << 22  # values; its temporaries are several times as large


class _CheckedReader(gguf.GGUFReader):
    """The package's reader, telling apart what it would read past the end of the file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if isinstance(self.data, np.memmap):  # its slices cost three times a plain array's
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"the header reaches to byte {end}, the file ends at {self.data.size}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            length = int(self._get(int(orig_offs) + 4, np.uint64)[0])
            if length > _LONGEST_ARRAY:
                raise ValueError(
                    f"a metadata array of {length} values at byte {orig_offs}; more than "
                    f"{_LONGEST_ARRAY} are not believed"
                )
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        spans: list[tuple[int, int, str]] = []
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            elements = int(np.prod([int(d) for d in dims], dtype=object))
            block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind[0]))]
            start = int(start_offs) + int(offset[0])
            end = start + elements // block * width
            label = bytes(name).decode("utf-8", "replace")
            if elements % block:
                raise ValueError(f"{label}: {elements} values do not fill blocks of {block}")
            if offset[0] % self.alignment:
                raise ValueError(f"{label}: offset {offset[0]} is not aligned to {self.alignment}")
            if end > self.data.size:
                raise ValueError(
                    f"{label}: expected bytes {start} to {end}, the file ends at {self.data.size}"
                )
            spans.append((int(offset[0]), end - start, label))
        self._check_layout(spans)
        super()._build_tensors(start_offs, fields)

    def _check_layout(self, spans: list[tuple[int, int, str]]) -> None:
        """Require tensors, given as (offset, bytes, name), to follow each other with nothing but
        alignment between them: a wrong offset within the file would load another one's bytes."""
        alignment = int(self.alignment)
        expected, before = 0, "the header"
        for offset, size, label in sorted(spans):
            if offset != expected:
                raise ValueError(
                    f"{label}: expected offset {expected}, right after {before}, found {offset}; "
                    f"tensors must not {'overlap' if offset < expected else 'leave gaps'}"
                )
            expected = -(-(offset + size) // alignment) * alignment
            before = label


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, path: Path, reader: gguf.GGUFReader, names: dict[str, str], heads: dict):
        """`names` maps Hugging Face names to the file's; `heads` those that are permuted to their
        head count."""
        self._path, self._names, self._heads = path, names, heads
        self._tensors = {t.name: t for t in reader.tensors if t.name != _ROPE_DIVISORS}
        known = {gguf_name: hf_name for hf_name, gguf_name in names.items()}
        self.shapes = {
            known.get(t.name, t.name): tuple(int(d) for d in reversed(t.shape))
            for t in self._tensors.values()
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[self._names.get(name, name)]
        values = np.empty(self.shapes[name], np.float32)
        rows = max(1, _DEQUANTISE_AT_ONCE // max(1, values[:1].size))
        try:
            for start in range(0, len(values), rows):
                part = slice(start, start + rows)
                values[part] = gguf.dequantize(tensor.data[part], tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.where(name)}: type {tensor.tensor_type.name} cannot be dequantised"
            ) from error
        if heads := self._heads.get(name):
            width = values.shape[1]
            values = values.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
        return values

    def storage(self, name: str) -> tuple[str, int]:
        tensor = self._tensors[self._names.get(name, name)]
        return tensor.tensor_type.name, tensor.n_bytes

    def where(self, name: str) -> str:
        return f"{self._path}: {self._names.get(name, name)}"


def open_gguf(path: Path) -> Source:
    """Headers, config and tokenizer of a GGUF file.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    try:
        if path.stat().st_size < 24:
            raise ValueError(f"too short to be a GGUF file ({path.stat().st_size} bytes)")
        reader = _CheckedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        config = model_config(_hf_config(metadata, reader))
        tokenizer = build_tokenizer(metadata)
        tensors = GgufTensors(path, reader, *_names(config, metadata["general.architecture"]))
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Source(f"GGUF file {path}", config, _natural_dtype(reader), tensors, tokenizer)


def _natural_dtype(reader: gguf.GGUFReader) -> str:
    """Stored half precision is kept; quantised and float32 files are served in float32."""
    kinds = {t.tensor_type.name for t in reader.tensors if len(t.shape) > 1}
    if kinds == {"BF16"}:
        return "bfloat16"
    return "float16" if kinds == {"F16"} else "float32"


def _names(config: ModelConfig, arch: str) -> tuple[dict[str, str], dict[str, int]]:
    """Hugging Face name -> GGUF name of every tensor the family wants, and permuted ones' heads."""
    table = gguf.get_tensor_name_map(_architecture(arch), config.num_layers)
    names, heads = {}, {}
    for source in family_of(config.family).hf_sources(config).values():
        for name in source.tensors:
            names[name] = table.get_name(name, try_suffixes=_SUFFIXES) or name
            if arch == "llama" and name.endswith("q_proj.weight"):
                heads[name] = config.num_heads
            if arch == "llama" and name.endswith("k_proj.weight"):
                heads[name] = config.num_kv_heads
    return names, heads


def _architecture(name: str) -> MODEL_ARCH:
    return next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)


def _hf_config(metadata: dict[str, Any], reader: gguf.GGUFReader) -> dict[str, Any]:
    """The metadata in the words of a Hugging Face config.json."""
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise ValueError(f"general.architecture = {arch!r} is not supported; known: llama")
    if metadata.get("split.count", 1) > 1:
        raise ValueError("one part of a split file; merge the parts into one file first")
    get = partial(_value, metadata, arch)
    if get("expert_count", 0):
        raise ValueError(f"{arch}.expert_count = {get('expert_count')}: mixtures not supported")
    shapes = {t.name: [int(d) for d in reversed(t.shape)] for t in reader.tensors}
    heads = get("attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{arch}.attention.head_count = {heads}: expected one positive number")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{arch}.attention.value_length differs from the key length {head_dim}")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{arch}.rope.dimension_count differs from the head size {head_dim}")
    return {
        "model_type": arch,
        "vocab_size": get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _plain(get("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(get, reader),
    }


_MISSING = object()


def _value(metadata: dict[str, Any], arch: str, key: str, default: Any = _MISSING) -> Any:
    value = metadata.get(f"{arch}.{key}", default)
    if value is _MISSING:
        raise ValueError(f"metadata key {arch}.{key} is missing")
    return value


def _plain(value: float) -> float:
    """The decimal number a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(get: Any, reader: gguf.GGUFReader) -> dict[str, Any]:
    """rope_parameters as transformers 5 writes them."""
    for key, plain in _ROPE_UNREAD.items():
        if get(key, plain) != plain:
            raise ValueError(f"metadata key {key} = {get(key)} is not supported")
    kind = get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": _plain(get("rope.freq_base", 10000.0))}
    divisors = next((t for t in reader.tensors if t.name == _ROPE_DIVISORS), None)
    if divisors is not None:
        if kind != "none":
            raise ValueError(f"rope scaling {kind!r} together with {_ROPE_DIVISORS}")
        values = gguf.dequantize(divisors.data, divisors.tensor_type)
        return rope | {"rope_type": "divisors", "divisors": [float(v) for v in values.ravel()]}
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": _plain(get("rope.scaling.factor"))}
    if kind == "yarn":
        keys = {
            "original_max_position_embeddings": "rope.scaling.original_context_length",
            "beta_fast": "rope.scaling.yarn_beta_fast",
            "beta_slow": "rope.scaling.yarn_beta_slow",
        }
        rope |= {hf: get(key) for hf, key in keys.items() if get(key, None) is not None}
    return rope
