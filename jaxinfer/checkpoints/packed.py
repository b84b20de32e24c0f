"""Tensors that a checkpoint stores in few bits, kept so: which can be, and parameters made of them.

What a file stores of a tensor is one scale (and perhaps one zero point) a row and group, so a
parameter that is made of rows of several tensors is made of theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.finite import non_finite
from jaxinfer.models import family_of
from jaxinfer.models.base import HfSource
from jaxinfer.params import ParamSpec, named_leaves
from jaxinfer.quantization.kinds import Kind, Layout
from jaxinfer.quantization.quantise import assembled
from jaxinfer.quantization.rounding import Rounded
from jaxinfer.quantization.weight import Layouts, Quantised
from pallas_kernels.quantised_matmul.weight import TWICE_E2M1, ZERO_OF_INT4

if TYPE_CHECKING:
    from jaxinfer.checkpoints.source import Source


@runtime_checkable
class Packed(Protocol):
    """Tensors of which some are stored in few bits, by their Hugging Face names.

    Attributes:
        kind: that of `kinds.KINDS` that says what the checkpoint was made for.
        notes: what of the file is not used, in words.
    """

    kind: str
    notes: tuple[str, ...]

    def layout(self, name: str) -> Layout | None:
        """How a tensor is stored, from headers alone; None: not so that it could be kept."""
        ...

    def packed(self, name: str) -> Rounded:
        """The tensor as it is stored. Raises CheckpointError naming what does not fit in it."""
        ...

    def order(self, name: str) -> np.ndarray | None:
        """i32[K]: how the columns are sorted, of a layout that says so."""
        ...


def numbers(matrix: Rounded, layout: Layout) -> np.ndarray:
    """float32 [N, K] that a matrix stands for, some rows at a time."""
    rows, width = matrix.values.shape
    columns = width * 8 // layout.bits
    out = np.empty((rows, columns), np.float32)
    step = max(1, (1 << 20) // columns // layout.rows) * layout.rows
    group = layout.group or columns
    for start in range(0, rows, step):
        own = slice(start, start + step)
        values = matrix.values[own]
        if layout.bits == 4:
            halves = values.reshape(len(values), -1, 1, group // 2)
            values = np.concatenate([halves & 15, halves >> 4], axis=-2)
            if layout.values == "float4_e2m1fn":
                values = _E2M1[values]
        units = values.reshape(len(values), -1, group).astype(np.float32)
        if layout.values == "int4":
            units -= np.float32(ZERO_OF_INT4) if matrix.zeros is None else (
                matrix.zeros[own, :, None].astype(np.float32)
            )  # fmt: skip
        scales = matrix.scales[start // layout.rows :].astype(np.float32)
        scales = np.repeat(scales, layout.rows, axis=0)[: len(values)]
        out[own] = (units * scales[:, :, None]).reshape(len(values), columns)
    return out if matrix.order is None else out[:, np.argsort(matrix.order)]


_E2M1 = np.array([*TWICE_E2M1, *(-number for number in TWICE_E2M1)], np.float32) / 2


def kept_layouts(source: Source) -> dict[str, Layout]:
    """Of every parameter that can stay as it is stored: those whose tensors are stored alike, and
    give whole rows."""
    packed = source.packed
    if packed is None:
        return {}
    family = family_of(source.config.family)
    sources = family.hf_sources(source.config)
    layouts = {}
    for path, spec in named_leaves(family.param_specs(source.config)):
        hf = sources[path].found_in(source.tensors.shapes)
        layout = _common_layout(packed, hf, spec) if spec.inputs else None
        if layout is not None:
            layouts[path] = layout
    return layouts


def _common_layout(packed: Packed, hf: HfSource, spec: ParamSpec) -> Layout | None:
    found = {packed.layout(name) for name in hf.tensors}
    layout = found.pop()
    if found or layout is None:
        return None
    lead = spec.shape[:1] if spec.axes[0] == "experts" else ()
    columns = math.prod(spec.shape[-spec.inputs :])
    if any(shape[1:] != (columns,) for shape in hf.tensors.values()):
        return None
    if (lead and not hf.each) or (lead and layout.order):
        return None
    if layout.order and spec.axes[0] == "heads":  # kernels of latents know of none
        return None
    if (columns % (layout.group or columns)) or (layout.bits == 4 and spec.shape[-1] % 2):
        return None
    if hf.combine is None:
        return layout
    for names in itertools.batched(hf.tensors, hf.each or len(hf.tensors)):
        if not _keeps_rows(hf, [hf.tensors[name][0] for name in names]):
            return None
        if layout.order:
            orders = [packed.order(name) for name in names]
            if len({order.tobytes() for order in orders if order is not None}) > 1:
                return None
        if hf.each:
            break  # experts are all alike
    return dataclasses.replace(layout, rows=1)


def _keeps_rows(hf: HfSource, counts: list[int]) -> bool:
    """Whether `combine` only puts rows in another order: seen from what it does to their numbers,
    of which each row has two."""
    assert hf.combine is not None
    ends = list(itertools.accumulate(counts))
    ids = [np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
    try:
        made = hf.combine(*(np.stack([own, own], axis=1) for own in ids)).reshape(ends[-1], 2)
    except ValueError:
        return False
    return bool((made[:, 0] == made[:, 1]).all() and len(set(made[:, 0].tolist())) == ends[-1])


def read_kept(
    source: Source, path: str, hf: HfSource, spec: ParamSpec, layout: Layout, kind: Kind, dtype: str
) -> Quantised:
    """One parameter as its tensors are stored, checked: scales are finite."""
    assert source.packed is not None
    matrices = []
    for names in itertools.batched(hf.tensors, hf.each or len(hf.tensors)):
        parts = []
        for name in names:
            part = source.packed.packed(name)
            if problem := _problem(part):
                raise CheckpointError(f"{source.tensors.where(name)}: {name}: {problem}")
            parts.append(part)
        matrices.append(_combined(hf, parts, source.packed.layout(names[0])))
    return assembled(matrices, spec, layout, kind, dtype)


def _combined(hf: HfSource, parts: list[Rounded], stored: Layout | None) -> Rounded:
    assert stored is not None
    if hf.combine is None:
        return parts[0]
    combine, rows = hf.combine, sum(len(part.values) for part in parts)

    def of(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        if arrays[0] is None:
            return None
        if name == "scales" and stored.rows > 1:
            arrays = [
                np.repeat(array, stored.rows, axis=0)[: len(part.values)]
                for array, part in zip(arrays, parts, strict=True)
            ]
        made: np.ndarray = combine(*arrays)
        return made.reshape(rows, -1)

    values, scales = of("values"), of("scales")
    assert values is not None and scales is not None
    return Rounded(values, scales, of("low"), of("zeros"), parts[0].order)


def _problem(matrix: Rounded) -> str:
    """What is wrong with the numbers of a matrix; "" for nothing."""
    for what in ("scales", "values", "zeros"):
        array = getattr(matrix, what)
        if array is not None and (bad := non_finite(array)):
            return f"{bad} {'zero points' if what == 'zeros' else what} are NaN or Inf"
    return ""


def describe_kept(source: Source, layouts: Layouts) -> list[str]:
    """What is kept as it is stored and what is not, in words, for the start of a server."""
    assert source.packed is not None
    family = family_of(source.config.family)
    specs = [(path, s) for path, s in named_leaves(family.param_specs(source.config)) if s.inputs]
    kept = Counter(layouts[path].describe() for path, _ in specs if path in layouts)
    others = sum(path not in layouts for path, _ in specs)
    lines = [f"weights as stored: {count} matrices, {text}" for text, count in kept.items()]
    if others:
        lines.append(f"weights as numbers: {others} matrices, stored so or in a way without a kind")
    return [*lines, *source.packed.notes]
