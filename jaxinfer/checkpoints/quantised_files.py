"""Safetensors files whose modules are stored in few bits, seen as the tensors of plain ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.scaled_tensors import INPUT, STORED, ScaledMatrix, scaled_matrix
from jaxinfer.checkpoints.source import summarise
from jaxinfer.checkpoints.word_tensors import WORDS, Headers, WordMatrix, word_matrix
from jaxinfer.models.hf_quantization import HfStorage, Scheme
from jaxinfer.quantization.kinds import NONE, Layout
from jaxinfer.quantization.rounding import Rounded

if TYPE_CHECKING:
    from jaxinfer.checkpoints.safetensors_io import SafetensorsFiles

_PARTS = (  # what belongs to a module's matrix, by suffix
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_scale_ub",
    "input_zero_point", "output_scale",
)  # fmt: skip
_OF_PAGES = ("k_scale", "v_scale")


class QuantisedFiles:
    """The tensors of safetensors files under the names of a plain model's; see `packed.Packed`."""

    def __init__(
        self,
        files: SafetensorsFiles,
        storage: HfStorage,
        known: Collection[str],
        description: str,
    ):
        """`known` are the names of the plain model's tensors.

        Raises CheckpointError naming every module of which something is missing or contradicts
        the rest.
        """
        self._files, self._storage = files, storage
        self._starts: dict[str, dict[str, int]] = {}  # by file, where each tensor's bytes begin
        self._matrices: dict[str, WordMatrix | ScaledMatrix] = {}
        taken: set[str] = set()
        problems: list[str] = []
        for module, found in _modules(files).items():
            first = next(name for name in (f"{module}.{s}" for s in found) if name in files.shapes)
            try:
                self._matrices[f"{module}.weight"] = self._matrix(module, found)
                taken |= {f"{module}.{suffix}" for suffix in found}
            except ValueError as error:
                problems.append(f"{files.where(first)}: {module}.weight: {error}")
        if not self._matrices:
            problems.append(f"no tensor is stored as quantization_config says ({storage.method})")
        if problems:
            raise CheckpointError(summarise(description, problems))
        pages = {n for n in files.shapes if n.endswith(_OF_PAGES) and n not in known}
        empty = {n for n in files.shapes if n not in known and self._is_empty_bias(n)}
        self.shapes = {n: s for n, s in files.shapes.items() if n not in taken | pages | empty}
        self.shapes |= {name: matrix.shape for name, matrix in self._matrices.items()}
        self.kind = self._kind()
        own = ("scales of the KV cache in the checkpoint are not used",) if pages else ()
        self.notes = (*storage.unused, *own)

    def _matrix(self, module: str, found: Headers) -> WordMatrix | ScaledMatrix:
        scheme = self._storage.scheme(module)
        if scheme is None:
            raise ValueError("is stored in few bits, but quantization_config leaves it out")
        words = WORDS.get(self._storage.method)
        if words is not None and words.values in found:
            shape = self._files.raw(f"{module}.{words.shape}") if words.shape in found else None
            return word_matrix(words, scheme, found, shape)
        if "weight" not in found:
            raise ValueError(f"there are {', '.join(found)}, but no values")
        return scaled_matrix(scheme, found)

    def _is_empty_bias(self, name: str) -> bool:
        """GPTQ's tools write a bias of zeros where a model has none."""
        module = name.removesuffix(".bias")
        if module == name or f"{module}.weight" not in self._matrices:
            return False
        return not np.any(self._files.read(name))

    def _kind(self) -> str:
        """What most modules are served in."""
        kinds = Counter(_kind_of(matrix.scheme) for matrix in self._matrices.values())
        return kinds.most_common(1)[0][0] if kinds else NONE

    def layout(self, name: str) -> Layout | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.layout

    def packed(self, name: str) -> Rounded:
        matrix = self._matrices[name]
        self._check_input(name)
        with self._naming(name):
            if isinstance(matrix, WordMatrix):
                return matrix.read(self._part(name))
            return matrix.read(self._part(name), self._rows(name))

    def order(self, name: str) -> np.ndarray | None:
        matrix = self._matrices[name]
        with self._naming(name):
            return matrix.order(self._part(name)) if isinstance(matrix, WordMatrix) else None

    def read(self, name: str) -> np.ndarray:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._files.read(name)
        self._check_input(name)
        with self._naming(name):
            if isinstance(matrix, WordMatrix):
                return matrix.numbers(self._part(name))
            return matrix.numbers(self._part(name), self._rows(name))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Say of which tensor an error is."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(f"{self.where(name)}: {name}: {error}") from error

    def _check_input(self, name: str) -> None:
        """A static scale of activations, though it is not used: a broken one says that the file
        is."""
        own = f"{name.removesuffix('weight')}{INPUT}"
        if self._matrices[name].scheme.static:
            scale = self._files.raw(own).astype(np.float32)
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise CheckpointError(f"{self.where(name)}: {own}: expected numbers above 0")

    def _part(self, name: str) -> Callable[[str], np.ndarray]:
        module = name.removesuffix("weight")
        return lambda suffix: self._files.raw(module + suffix)

    def _rows(self, name: str) -> Callable[[int, int], np.ndarray]:
        """What reads the bytes of some rows: the library reads no float8 into NumPy."""
        path, columns = self._files.where(name), self._matrices[name].shape[1]
        if path not in self._starts:
            self._starts[path] = _starts(Path(path))
        start = self._starts[path][name]

        def rows(first: int, last: int) -> np.ndarray:
            count = (last - first) * columns
            return np.fromfile(path, np.uint8, count, offset=start + first * columns).reshape(
                -1, columns
            )

        return rows

    def storage(self, name: str) -> tuple[str, int]:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._files.storage(name)
        module = name.removesuffix("weight")
        parts = [f"{module}{suffix}" for suffix in ("weight", *_PARTS)]
        size = sum(self._files.storage(n)[1] for n in parts if n in self._files.shapes)
        if name in self._files.shapes:
            return self._files.storage(name)[0], size
        way = f"{matrix.scheme.values}, groups of {matrix.scheme.group or matrix.shape[1]}"
        return f"{self._storage.method} {way}", size

    def where(self, name: str) -> str:
        matrix = self._matrices.get(name)
        if isinstance(matrix, WordMatrix):
            name = f"{name.removesuffix('weight')}{matrix.words.values}"
        return self._files.where(name)


def _modules(files: SafetensorsFiles) -> dict[str, Headers]:
    """What belongs to the modules that are stored in few bits, by suffix."""
    modules: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
    for name, shape in files.shapes.items():
        module, _, suffix = name.rpartition(".")
        stored = files.dtypes[name]
        if suffix in _PARTS or (suffix == "weight" and stored in STORED):
            modules.setdefault(module, {})[suffix] = (shape, stored)
    for module, found in modules.items():
        if (weight := f"{module}.weight") in files.shapes and "weight" not in found:
            found["weight"] = (files.shapes[weight], files.dtypes[weight])
    return {m: found for m, found in modules.items() if _is_quantised(found)}


def _is_quantised(found: Headers) -> bool:
    """Whether a module's parts make a matrix; others are named as tensors that nobody reads."""
    return "weight" not in found or found["weight"][1] in STORED


def _kind_of(scheme: Scheme) -> str:
    """What a scheme's weights are served in."""
    if scheme.values == "int4":
        return "int4"
    if scheme.values == "int8":
        return "w8a8" if scheme.activations == "int8" else "int8"
    if scheme.block is not None:
        return "fp8-block"
    return "w8a8-fp8" if scheme.activations == "float8_e4m3fn" else "fp8"


def _starts(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
