"""A checkpoint in someone else's format, seen as Hugging Face tensors; and how params come from it.

`Source` is what the safetensors and GGUF readers both present, so a family states its mapping once
(`hf_sources`). Headers are checked in full before any tensor is read; tensors are then read, fused
and placed one parameter at a time, so that only the largest ever exists twice.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.packed import Packed, read_kept
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.base import HfSource
from jaxinfer.params import ParamSpec, Tree, map_named_specs, named_leaves
from jaxinfer.quantization.kinds import KINDS, NONE
from jaxinfer.quantization.weight import Layouts
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total), for a progress bar
Place = Callable[[Any, ParamSpec], Any]  # host array, or Quantised -> where the parameter lives

_LAYER = re.compile(r"model\.layers\.(\d+)(?=\.)")
# Buffers that some exporters write and nothing reads: they follow from the config.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias")
# What files and trees call integers; quantised weights come apart.
_INTEGERS = re.compile(r"BOOL|[IU]\d+|bool|u?int\d+")
_HEADS = ("lm_head.weight", "embed_out.weight")


class Tensors(Protocol):
    """The tensors of a checkpoint under Hugging Face names."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """The tensor as an array of its own, dequantised, in the layout Hugging Face gives it."""
        ...

    def storage(self, name: str) -> tuple[str, int]:
        """The type it is stored as and its bytes."""
        ...

    def where(self, name: str) -> str:
        """File (and the tensor's own name there, if it differs), for error messages."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: nothing but headers, config and tokenizer have been read.

    Where it has no tokenizer, `no_tokenizer` says what was looked for. `packed` are the `tensors`
    of a checkpoint that stores some of them in few bits.
    """

    description: str
    config: ModelConfig
    dtype: str  # the dtype it would naturally be served in
    tensors: Tensors
    tokenizer: Tokenizer | None
    no_tokenizer: str = ""
    packed: Packed | None = None

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises CheckpointError when there is none."""
        if self.tokenizer is None:
            raise CheckpointError(self.no_tokenizer)
        return self.tokenizer


def check_vocabulary(description: str, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError if the tokenizer can make an id that has no embedding."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{description}: the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"{config.vocab_size} embeddings"
        )


def check_inventory(source: Source) -> None:
    """Raise CheckpointError listing tensors that are missing, extra, misshapen or of integers."""
    shapes, where = source.tensors.shapes, source.tensors.where
    found = family_of(source.config.family).hf_sources(source.config).values()
    sources = [hf.found_in(shapes) for hf in found]
    expected = {name: shape for hf in sources for name, shape in hf.tensors.items()}
    problems = [
        f"{name}: missing, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in shapes
    ]
    problems += [
        f"{where(name)}: {name}: expected shape {list(shape)}, found {list(shapes[name])}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems += [
        f"{where(name)}: {name}: stored as {kind}, expected floating point numbers"
        for name in (name for hf in sources if not hf.encoded for name in hf.tensors)
        if name in shapes and source.packed is None
        if _INTEGERS.fullmatch(kind := source.tensors.storage(name)[0])
    ]
    problems += [
        f"{where(name)}: {name}: {_why_extra(source, name)}"
        for name in sorted(shapes.keys() - expected.keys())
        if not _ignorable(source, name)
    ]
    if problems:
        raise CheckpointError(summarise(source.description, problems))
    if further := sorted({layer for name in shapes if (layer := _further_layer(source, name))}):
        logger.info(
            f"{source.description}: {', '.join(further)}: ignored: layers that predict further "
            "tokens are not used"
        )


def _why_extra(source: Source, name: str) -> str:
    """What is wrong with a tensor that nobody reads."""
    if name in _HEADS and source.config.tie_embeddings:
        return (
            "it differs from the embedding, which the config says is the head too; if the head is "
            "its own, set tie_word_embeddings to false, or else remove this tensor"
        )
    return f"not a tensor of a {source.config.family} model with this config"


def _further_layer(source: Source, name: str) -> str | None:
    """The layer after the model's last that a tensor belongs to, if it predicts further tokens
    (multi-token prediction, DeepSeek-V3): it has a projection of its own before it."""
    found = _LAYER.match(name)
    if not found or int(found[1]) < source.config.num_layers:
        return None
    return found[0] if f"{found[0]}.eh_proj.weight" in source.tensors.shapes else None


def _ignorable(source: Source, name: str) -> bool:
    """Whether an extra tensor says nothing new: a derived buffer, or a copy of the tied head; or
    is of a layer that is not used."""
    if _further_layer(source, name):
        return True
    if _HARMLESS.fullmatch(name):
        return True
    if name not in _HEADS or not source.config.tie_embeddings:
        return False
    (embed,) = family_of(source.config.family).hf_sources(source.config)["embed"].tensors
    if source.tensors.shapes[name] != source.tensors.shapes.get(embed):
        return False
    return np.array_equal(source.tensors.read(name), source.tensors.read(embed))


def summarise(description: str, problems: list[str], limit: int = 8) -> str:
    """One message of at most `limit` problems and how many more there are."""
    shown = "\n  ".join(problems[:limit])
    more = f"\n  and {len(problems) - limit} more" if len(problems) > limit else ""
    return f"{description} cannot be loaded:\n  {shown}{more}"


def load_params(
    source: Source,
    dtype: str,
    place: Place,
    progress: Progress | None = None,
    kept: tuple[str, Layouts] = (NONE, {}),
) -> Tree:
    """The parameter tree in `dtype`, each parameter passed through `place` as soon as it is made.

    `kept` is the kind to serve in and the layouts of those that stay as they are stored. Raises
    CheckpointError for defects of the inventory and for NaN or Inf values.
    """
    check_inventory(source)
    quantization, layouts = kept
    family = family_of(source.config.family)
    sources = family.hf_sources(source.config)
    specs = family.param_specs(source.config)
    total, done = sum(1 for _ in named_leaves(specs)), itertools.count(1)

    def make(path: str, spec: ParamSpec) -> Any:
        hf = sources[path].found_in(source.tensors.shapes)
        if path in layouts:
            kind = KINDS[quantization]
            made: Any = read_kept(source, path, hf, spec, layouts[path], kind, dtype)
        else:
            made = _assemble(source, path, hf, spec, dtype)
        if progress:
            progress("loading tensors", next(done), total)
        return place(made, spec)

    return map_named_specs(make, specs)


def read_param(source: Source, path: str, hf: HfSource, spec: ParamSpec, dtype: str) -> np.ndarray:
    """One parameter in `dtype`, of a source whose inventory was checked."""
    return _assemble(source, path, hf.found_in(source.tensors.shapes), spec, dtype)


def _assemble(source: Source, path: str, hf: HfSource, spec: ParamSpec, dtype: str) -> np.ndarray:
    """One parameter, checked to be finite; of one that is made in groups, group by group."""
    kind, names = spec.resolve_dtype(dtype), list(hf.tensors)
    if not hf.each:
        return _combined(source, path, hf, names, spec.shape, kind)
    whole = np.empty(spec.shape, kind)
    for i, entry in enumerate(whole):
        group = names[i * hf.each : (i + 1) * hf.each]
        entry[...] = _combined(source, path, hf, group, entry.shape, kind)
    return whole


def _combined(
    source: Source,
    path: str,
    hf: HfSource,
    names: list[str],
    shape: tuple[int, ...],
    kind: np.dtype,
) -> np.ndarray:
    """What tensors make together. Wide ones are narrowed one by one."""
    parts = []
    for name in names:
        part = source.tensors.read(name)
        if (part.dtype == np.uint8) != hf.encoded:
            wanted = "uint8" if hf.encoded else "floating point"
            raise CheckpointError(
                f"{source.tensors.where(name)}: {name}: stored as {part.dtype}, expected {wanted}"
            )
        if bad := non_finite(part):
            raise CheckpointError(
                f"{source.tensors.where(name)}: {name}: {bad} of {part.size} values are NaN or Inf"
            )
        if part.dtype != kind and part.dtype.itemsize >= kind.itemsize:
            part = _narrowed(part, kind, f"{source.description}: {path}")
        parts.append(part)
    if len({part.dtype for part in parts}) > 1:  # bfloat16 and float16 have no common type
        parts = [part.astype(np.float32) for part in parts]
    fused = hf.combine(*parts) if hf.combine else parts[0]
    if hf.encoded:
        if bad := non_finite(fused):
            raise CheckpointError(
                f"{source.description}: {', '.join(names)}: {bad} values are NaN or Inf"
            )
        fused = _narrowed(fused, kind, f"{source.description}: {path}")
    return fused.reshape(shape).astype(kind, copy=False, order="C")


def _narrowed(part: np.ndarray, kind: np.dtype, where: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # which is said below
        array = part.astype(kind, copy=False)
    if bad := non_finite(array):
        largest = np.abs(part.astype(np.float64)).max()
        wider = largest <= np.finfo(np.float32).max and kind == np.float16
        advice = "choose float32 or bfloat16" if wider else "no dtype that we serve in has them"
        raise CheckpointError(
            f"{where}: {bad} values are too large for {kind.name} (up to {largest:.3g}); {advice}"
        )
    return array


_CHUNK = 1 << 20  # elements looked at at once: the temporaries stay in the CPU's cache


def non_finite(array: np.ndarray) -> int:
    """How many values of an array are NaN or Inf; 0 for dtypes that have neither."""
    if array.dtype.kind in "iub":
        return 0
    flat, count = array.reshape(-1), 0
    for start in range(0, flat.size, _CHUNK):
        finite = np.isfinite(flat[start : start + _CHUNK])
        count += finite.size - int(np.count_nonzero(finite))
    return count
