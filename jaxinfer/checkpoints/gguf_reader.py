"""GGUF files as they lie on disk: headers checked in full, split ones put together again.

A model may be split into NAME-00001-of-0000N.gguf and so on. The first part has the metadata, each
part says which one it is, and all have tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.field_rules import TEXT, integer

_LONGEST_ARRAY = 1 << 22  # vocabularies have a few hundred thousand entries
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_RULES = {
    "general.architecture": TEXT,
    "split.no": integer(0, 99_999),
    "split.count": integer(0, 99_999),
    "split.tensors.count": integer(0, 1 << 31),
}
# What reading a damaged header raises.
HEADER_ERRORS = (ValueError, KeyError, IndexError, TypeError, ArithmeticError, OSError)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's metadata, and its tensors with the file each is in."""

    metadata: dict[str, Any]
    tensors: dict[str, gguf.ReaderTensor]
    files: dict[str, Path]

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor, outermost first, as NumPy and Hugging Face have them."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def floats(self, name: str) -> list[float]:
        """Values of a small tensor."""
        tensor = self.tensors[name]
        return [float(v) for v in gguf.dequantize(tensor.data, tensor.tensor_type).ravel()]


def read_gguf(path: Path) -> GgufFile:
    """The headers of a GGUF file, and of the other parts when it is the first of several.

    Raises CheckpointError naming the file and what is wrong in it, or the part that is missing.
    """
    reader, metadata = _read(path)
    parts = [(path, reader)]
    count = metadata.get("split.count", 1)
    if count > 1:
        others = _other_parts(path, metadata, count)
        parts += [(other, _read_part(other, number, count)) for number, other in others]
    tensors: dict[str, gguf.ReaderTensor] = {}
    files: dict[str, Path] = {}
    for file, part in parts:
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise CheckpointError(f"{tensor.name} is in both {files[tensor.name]} and {file}")
            tensors[tensor.name], files[tensor.name] = tensor, file
    stated = metadata.get("split.tensors.count", len(tensors))
    if count > 1 and stated != len(tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count = {stated}, the {count} parts have {len(tensors)}"
        )
    return GgufFile(metadata, tensors, files)


def _read(path: Path) -> tuple[_CheckedReader, dict[str, Any]]:
    try:
        if path.stat().st_size < 24:
            raise ValueError(f"too short to be a GGUF file ({path.stat().st_size} bytes)")
        reader = _CheckedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        for key, rule in _RULES.items():
            if key in metadata:
                rule.check(f"metadata key {key}", metadata[key])
        return reader, metadata
    except HEADER_ERRORS as error:
        raise CheckpointError(f"{path}: {error}") from error


def _other_parts(path: Path, metadata: dict[str, Any], count: int) -> list[tuple[int, Path]]:
    """(number from 0, path) of the parts after the first, which must all exist."""
    name, number = _PART.fullmatch(path.name), metadata.get("split.no", 0)
    if name is None or int(name["count"]) != count or int(name["number"]) != number + 1:
        raise CheckpointError(
            f"{path}: it is part {number + 1} of {count}, and must be called "
            f"NAME-{number + 1:05d}-of-{count:05d}.gguf for the others to be found"
        )
    paths = [
        path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)
    ]
    if number != 0:
        raise CheckpointError(f"{path}: it is part {number + 1} of {count}; name {paths[0]}")
    if missing := [part.name for part in paths if not part.exists()]:
        raise CheckpointError(f"{path}: of its {count} parts {', '.join(missing)} are missing")
    return list(enumerate(paths))[1:]


def _read_part(path: Path, number: int, count: int) -> _CheckedReader:
    reader, metadata = _read(path)
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (number, count):
        raise CheckpointError(
            f"{path}: expected split.no, split.count = {number}, {count}, found {found}"
        )
    return reader


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
            if int(self._get(int(orig_offs), np.uint32)[0]) == gguf.GGUFValueType.ARRAY:
                raise ValueError(f"a metadata array of arrays at byte {orig_offs}; none is known")
            if length > _LONGEST_ARRAY:
                raise ValueError(
                    f"a metadata array of {length} values at byte {orig_offs}; more than "
                    f"{_LONGEST_ARRAY} are not believed"
                )
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        spans: list[tuple[int, int, str]] = []
        names: set[str] = set()
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
            if label in names:
                raise ValueError(
                    f"{label}: there are two tensors of this name; the file is damaged, or was put "
                    "together wrongly: download or convert it again"
                )
            names.add(label)
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
