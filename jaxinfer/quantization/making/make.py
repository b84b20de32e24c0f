"""A checkpoint quantised layer by layer, in the memory that one layer takes.

What a layer became is a file of its own, in a hidden folder beside the checkpoint to be: a run that
was killed goes on where it was, and only when all layers are there is the checkpoint written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.param_reader import ParamReader, open_params
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, Tree, map_named_specs, named_leaves
from jaxinfer.quantization.kinds import KINDS, Kind, Layout
from jaxinfer.quantization.making.awq import rounded_by_range, scale_layer
from jaxinfer.quantization.making.calibration import Calibration, sequences
from jaxinfer.quantization.making.gptq import gptq
from jaxinfer.quantization.quantise import assembled
from jaxinfer.quantization.rounding import Rounded, round_matrix
from jaxinfer.quantization.weight import own_layout, quantised_spec
from pallas_kernels.quantised_matmul import dequantise

Method = Literal["rtn", "awq", "gptq"]
METHODS = ("rtn", "awq", "gptq")
Progress = Callable[[str, int, int], None]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to quantise; see `jaxinfer quantize --help`. Raises ValueError naming the field."""

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 128
    damping: float = 0.01
    act_order: bool = False
    max_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; choose {', '.join(METHODS)}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; choose 4 or 8")
        if self.group_size != -1 and (self.group_size < 16 or self.group_size % 2):
            raise ValueError(f"group_size is {self.group_size}; choose an even number from 16 on, "
                             "or -1 for one scale a row")  # fmt: skip
        if not 0 < self.damping < 1:
            raise ValueError(f"damping is {self.damping}; it lies between 0 and 1")

    @property
    def kind(self) -> str:
        return "int4" if self.bits == 4 else "int8"

    def layout(self, spec: ParamSpec) -> Layout | None:
        """Of a parameter: as the kind has it, but for the size of groups."""
        kind = KINDS[self.kind]
        wanted = dataclasses.replace(kind.layout, group=max(self.group_size, 0))
        return own_layout(spec, dataclasses.replace(kind, layout=wanted))


def quantise_checkpoint(
    src: str | Path,
    dst: str | Path,
    settings: Settings,
    texts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Path:
    """Write `src`, quantised, as an Orbax folder of ours at `dst`, a new path.

    `texts` are what awq and gptq calibrate on. Raises CheckpointError, and ValueError for
    calibration text that is too short.
    """
    dst = Path(dst).expanduser()
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists already; remove it or choose another destination")
    reader, report = open_params(src), progress or (lambda what, done, total: None)
    specs = family_of(reader.config.family).param_specs(reader.config)
    layouts = {
        name: layout for name, spec in named_leaves(specs) if (layout := settings.layout(spec))
    }
    with _work_folder(dst, _fingerprint(reader, settings, texts)) as folder:
        _quantise_layers(reader, specs, layouts, settings, texts, folder, report)
        _write(reader, specs, layouts, settings, folder, dst, report)
        shutil.rmtree(folder)
    return dst


def _quantise_layers(
    reader: ParamReader,
    specs: Tree,
    layouts: dict[str, Layout],
    settings: Settings,
    texts: Sequence[str],
    folder: Path,
    report: Progress,
) -> None:
    """A file of each layer that has none yet."""
    count, calibration = len(specs["layers"]), None
    if settings.method != "rtn":
        tokens = [reader.tokenizer.encode(text, True) for text in texts]
        first = {n: jnp.asarray(_numbers(reader, n)) for n in ("embed", "positions") if n in specs}
        pieces = sequences(tokens, settings.max_tokens)
        calibration = Calibration(reader.config, first, pieces)
    for i, spec in enumerate(specs["layers"]):
        report("quantising layers", i, count)
        file = folder / f"layer-{i}.npz"
        own = {n: layouts[p] for n in spec if (p := f"layers.{i}.{n}") in layouts}
        if not file.exists():
            params = {name: _numbers(reader, f"layers.{i}.{name}") for name in spec}
            made = _layer(reader, i, params, spec, own, settings, calibration)
            part = file.with_suffix(".part")
            with part.open("wb") as out:
                np.savez(out, **made)  # type: ignore[arg-type]
            part.rename(file)
        if calibration is not None and i + 1 < count:
            calibration.advance(i, _in_memory(file, spec, own))
    report("quantising layers", count, count)


def _layer(
    reader: ParamReader,
    layer: int,
    params: Arrays,
    specs: dict[str, ParamSpec],
    layouts: dict[str, Layout],
    settings: Settings,
    calibration: Calibration | None,
) -> Arrays:
    """Arrays of a layer's parameters, by the names of their parts."""
    moments: Arrays = {}
    if calibration is not None:
        given = {name: jnp.asarray(array) for name, array in params.items()}
        moments = calibration.moments(layer, given, tuple(layouts))
        if settings.method == "awq":
            params, moments = scale_layer(reader.config, params, moments, layouts)
    made: Tree = dict(params)
    for name, layout in layouts.items():
        spec = specs[name]
        lead = spec.shape[:1] if spec.axes[0] == "experts" else (1,)
        matrices = params[name].reshape(*lead, -1, math.prod(spec.shape[-spec.inputs :]))
        rounded = [_round(rows, moments.get(name), layout, settings) for rows in matrices]
        made[name] = assembled(rounded, spec, layout, KINDS[settings.kind], "float32")
    return {name: np.asarray(array) for name, array in named_leaves(made)}


def _round(
    rows: np.ndarray, moments: np.ndarray | None, layout: Layout, settings: Settings
) -> Rounded:
    if moments is None:
        return round_matrix(rows, layout)
    if settings.method == "awq":
        return rounded_by_range(rows, moments, layout)
    return gptq(rows, moments, layout, settings.damping, settings.act_order)


def _numbers(reader: ParamReader, name: str) -> np.ndarray:
    return np.asarray(reader.read(name), np.float32)


def _layer_specs(spec: Tree, layouts: dict[str, Layout]) -> Tree:
    return {n: quantised_spec(s, layouts.get(n), "as_given", "float32") for n, s in spec.items()}


def _read_layer(file: Path) -> Arrays:
    """What a layer became. Raises CheckpointError for a file that a crash cut short."""
    try:
        with np.load(file) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}); remove it, and start again to have the layer made"
        ) from error


def _in_memory(file: Path, spec: Tree, layouts: dict[str, Layout]) -> Tree:
    """A layer as it became, in numbers."""
    arrays = _read_layer(file)
    made = map_named_specs(lambda name, _: jnp.asarray(arrays[name]), _layer_specs(spec, layouts))
    for name in layouts:
        (matrix,) = made[name].terms
        made[name] = dequantise(matrix).reshape(spec[name].shape)
    return made


def _write(
    reader: ParamReader,
    specs: Tree,
    layouts: dict[str, Layout],
    settings: Settings,
    folder: Path,
    dst: Path,
    report: Progress,
) -> None:
    """The checkpoint, of the layers' files and of what is before and after them."""
    kind, count = KINDS[settings.kind], len(specs["layers"])
    source = (
        f"{reader.description}, quantised by {settings.method} to {settings.bits} bits in groups "
        f"of {settings.group_size}"
    )
    args = (reader.config, reader.dtype, reader.tokenizer, source, settings.kind, layouts)
    with orbax_io.writing(dst, *args) as write:
        for name, spec in specs.items():
            if name != "layers":
                for leaf, array in named_leaves(
                    {name: _outside(reader, name, spec, layouts, kind)}
                ):
                    write(leaf, array)
        for i, spec in enumerate(specs["layers"]):
            own = {n: layouts[p] for n in spec if (p := f"layers.{i}.{n}") in layouts}
            arrays = _read_layer(folder / f"layer-{i}.npz")
            for leaf, part in named_leaves(_layer_specs(spec, own)):
                kept = arrays[leaf].astype(part.resolve_dtype(reader.dtype))
                write(f"layers.{i}.{leaf}", kept)
            report("writing checkpoint", i + 1, count)


def _outside(
    reader: ParamReader, name: str, spec: ParamSpec, layouts: dict[str, Layout], kind: Kind
) -> Any:
    """A parameter that is of no layer: the vocabulary to nearest, others as they are."""
    array = reader.read(name).astype(spec.resolve_dtype(reader.dtype))
    if name not in layouts:
        return array
    rows = array.reshape(-1, math.prod(spec.shape[-spec.inputs :]))
    matrix = round_matrix(rows, layouts[name])
    return assembled([matrix], spec, layouts[name], kind, reader.dtype)


def _fingerprint(reader: ParamReader, settings: Settings, texts: Sequence[str]) -> str:
    """Of all that decides what a layer becomes."""
    told = [reader.description, reader.config.to_json(), dataclasses.asdict(settings), list(texts)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _work_folder(dst: Path, fingerprint: str) -> Iterator[Path]:
    """The hidden folder of the layers' files, which stays when it ends badly. Raises
    CheckpointError if another process works in it, or it was begun otherwise."""
    folder = dst.with_name(f".{dst.name}.quantize")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{dst} is being written by another process") from error
        told = folder / "begun"
        done = any(folder.glob("layer-*.npz"))
        if done and told.read_text() != fingerprint:
            raise CheckpointError(
                f"{folder} was begun from another checkpoint, text or options; give the same to go "
                "on, or remove it"
            )
        told.write_text(fingerprint)
        yield folder
