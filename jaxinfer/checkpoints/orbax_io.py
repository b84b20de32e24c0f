"""Our own checkpoint folder: parameters in Orbax, config and tokenizer beside them.

    jaxinfer.json   format version, ModelConfig, dtype, source, tensors, files
    params/         the parameter tree, one Orbax array each
    tokenizer/      tokenizer.json, tokenizer_config.json, generation_config.json

The folder is written under another name and renamed when complete, so an interrupted conversion
never leaves one that loads. Arrays are stored uncompressed and in files of their own: restoring is
then little more than reading (`array_files.py`). A zarr reader takes an absent file for zeros and
cannot see a flipped bit, so `jaxinfer.json` lists every file with its size and checksum.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoints.array_files import read_arrays, write_array
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.finite import non_finite
from jaxinfer.checkpoints.partial_folder import partial_folder
from jaxinfer.checkpoints.source import summarise
from jaxinfer.config import DTYPES, ModelConfig
from jaxinfer.field_rules import SETTINGS, TEXT, Rule, one_of
from jaxinfer.json_files import parse_object
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import check_sizes
from jaxinfer.params import ParamSpec, Tree, map_named_specs, map_specs, named_leaves
from jaxinfer.quantization.kinds import KINDS, NONE, Layout
from jaxinfer.quantization.quantise import placing
from jaxinfer.quantization.weight import Layouts, Quantised, own_layouts, quantised_specs
from jaxinfer.tokenizer import Tokenizer

FORMAT_VERSION = 1
MANIFEST, PARAMS, TOKENIZER = "jaxinfer.json", "params", "tokenizer"
_RULES = {  # of the manifest's fields
    "format_version": Rule("an integer", lambda value: type(value) is int),
    "config": SETTINGS,
    "dtype": one_of(*DTYPES),
    "source": TEXT,
    "quantization": one_of(NONE, *KINDS),
    "layouts": SETTINGS.or_null(),
    "tensors": SETTINGS,
    "files": SETTINGS,
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What jaxinfer.json says.

    Attributes:
        dtype: what the parameters are stored in, but for quantised ones.
        source: what the checkpoint was converted from.
        quantization: the kind of its weights (`quantization.kinds`), or none.
        layouts: of its parameters, where they are not the kind's own; None: they are.
        tensors: path in the tree -> [shape, dtype].
        files: path under params/ -> [bytes, CRC-32].
    """

    config: ModelConfig
    dtype: str
    source: str
    quantization: str
    layouts: Layouts | None
    tensors: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, tuple[int, int]]


def is_orbax_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def is_unfinished(path: Path) -> bool:
    """Whether a folder is what a conversion that was killed leaves, or lost its manifest."""
    return not is_orbax_folder(path) and all((path / n).is_dir() for n in (PARAMS, TOKENIZER))


def save(
    path: Path,
    params: Tree,
    config: ModelConfig,
    dtype: str,
    tokenizer: Tokenizer,
    source: str,
    quantization: str = NONE,
    layouts: Layouts | None = None,
) -> None:
    """Write a checkpoint folder at `path` of parameters that are in memory (see `writing`)."""
    with writing(path, config, dtype, tokenizer, source, quantization, layouts) as write:
        for name, array in named_leaves(params):
            write(name, np.asarray(array))


@contextmanager
def writing(
    path: Path,
    config: ModelConfig,
    dtype: str,
    tokenizer: Tokenizer,
    source: str,
    quantization: str = NONE,
    layouts: Layouts | None = None,
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """A function that writes one parameter of a checkpoint folder at `path`.

    The folder appears when all are written and the context ends well. Raises CheckpointError when
    `path` exists or cannot be written, and for NaN or Inf values: with the checksums, that makes
    looking for them at every restore needless.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already; remove it or choose another destination")
    tensors: dict[str, Any] = {}
    files: dict[str, list[int]] = {}
    try:
        with partial_folder(path) as partial:

            def write(name: str, array: np.ndarray) -> None:
                if bad := non_finite(array):
                    raise CheckpointError(f"{name}: {bad} of {array.size} values are NaN or Inf")
                tensors[name] = [list(array.shape), array.dtype.name]
                files.update(write_array(partial / PARAMS, name, array))

            tokenizer.save(partial / TOKENIZER)
            specs = family_of(config.family).param_specs(config)
            if layouts is None and quantization != NONE:
                layouts = own_layouts(specs, quantization)  # as this version has them
            stored = quantised_specs(specs, quantization, dtype, layouts)
            _save_skeleton(partial / PARAMS, stored, dtype)
            yield write
            manifest = {
                "format_version": FORMAT_VERSION,
                "config": config.to_json(),
                "dtype": dtype,
                "source": source,
                "quantization": quantization,
                "layouts": None
                if layouts is None
                else {n: at.to_json() for n, at in layouts.items()},
                "tensors": tensors,
                "files": files | _inventory(partial / PARAMS, files),
            }
            (partial / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    except OSError as error:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} appeared while it was being written") from error
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """jaxinfer.json of a checkpoint folder. Raises CheckpointError naming what is wrong in it."""
    file = path / MANIFEST
    try:
        data = {"quantization": NONE, "layouts": None} | parse_object(file.read_text("utf-8"))
        for name, rule in _RULES.items():
            rule.check(name, data.get(name))
        if data["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version = {data['format_version']}, this version of jaxinfer reads "
                f"{FORMAT_VERSION}; convert the original again"
            )
        if data["layouts"] is not None and data["quantization"] == NONE:
            raise ValueError("layouts are given, and quantization is none")
        config = ModelConfig.from_json(data["config"])
        family_of(config.family)
        check_sizes(config)
        return Manifest(
            config,
            data["dtype"],
            data["source"],
            data["quantization"],
            data["layouts"] and {n: Layout.from_json(d) for n, d in data["layouts"].items()},
            {
                n: (tuple(shape), np.dtype(kind).name)
                for n, (shape, kind) in data["tensors"].items()
            },
            {name: (size, crc) for name, (size, crc) in data["files"].items()},
        )
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:  # a value within is of another kind
        raise CheckpointError(
            f"{file}: is damaged ({error}); convert the original again"
        ) from error


def restore(
    path: Path,
    manifest: Manifest,
    dtype: str,
    sharding_of: Callable[[ParamSpec], Any],
    quantization: str | None = None,
) -> Tree:
    """The parameters in `dtype`, each byte read once and its shards put where they belong.

    `quantization` is the kind to have them in, which must be stored alike if they are stored in
    one (None: as stored).

    Besides the parameters, memory holds what is in flight: at most the largest of them. Raises
    CheckpointError naming the tensors or files that are missing, extra, misshapen, cut short or
    changed.
    """
    check(path, manifest)
    specs = family_of(manifest.config.family).param_specs(manifest.config)
    wanted, quantised = quantization or manifest.quantization, manifest.quantization != NONE
    if quantised:
        layouts = own_layouts(specs, manifest.quantization)
        if manifest.layouts is not None:
            layouts = manifest.layouts
        specs = quantised_specs(specs, wanted, dtype, layouts)
    spec_of = dict(named_leaves(specs))
    put = placing(NONE if quantised else wanted, dtype, sharding_of)

    def place(name: str, array: np.ndarray) -> Any:
        spec = spec_of[name]
        placed, kind = put(array, spec), spec.resolve_dtype(dtype)
        if isinstance(placed, Quantised):
            return placed
        return placed if placed.dtype == kind else placed.astype(kind)

    arrays = read_arrays(path / PARAMS, manifest.files, manifest.tensors, place)
    return map_named_specs(lambda name, _: arrays[name], specs)


def is_current(path: Path) -> bool:
    """Whether a folder is whole and of the shapes that this version's families expect."""
    try:
        check(path, read_manifest(path))
    except ValueError:
        return False
    return True


def check(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for tensors this version does not expect and files of a wrong size."""
    plain = family_of(manifest.config.family).param_specs(manifest.config)
    specs = quantised_specs(plain, manifest.quantization, manifest.dtype, manifest.layouts)
    expected = {
        name: (spec.shape, spec.resolve_dtype(manifest.dtype).name)
        for name, spec in named_leaves(specs)
    }
    found = manifest.tensors
    problems = [
        f"{name}: expected shape {list(expected[name][0])} of {expected[name][1]}, "
        f"found {list(found[name][0])} of {found[name][1]}"
        for name in expected
        if name in found and expected[name] != found[name]
    ]
    parameters = dict(named_leaves(plain))
    problems += [
        f"layouts: {name}: not a parameter of this model"
        for name in manifest.layouts or ()
        if name not in parameters
    ]
    problems += [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: not a tensor of this model" for name in found if name not in expected]
    if problems:
        raise CheckpointError(summarise(str(path / MANIFEST), problems))
    _check_sizes(path / PARAMS, manifest)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    problems = []
    for name, (size, _) in manifest.files.items():
        try:
            found = f"{(folder / name).stat().st_size} bytes"
        except FileNotFoundError:
            found = "no file"
        if found != f"{size} bytes":
            problems.append(f"{PARAMS}/{name}: expected {size} bytes, found {found}")
    if problems:
        raise CheckpointError(summarise(str(folder.parent), problems))


def _crc32(path: Path) -> int:
    crc = 0
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _inventory(folder: Path, known: Collection[str] = ()) -> dict[str, list[int]]:
    """Size and CRC-32 of every file that is not known yet."""
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {n: [p.stat().st_size, _crc32(p)] for n, p in paths.items() if n not in known}


def _save_skeleton(folder: Path, specs: Tree, dtype: str) -> None:
    """Let Orbax write the tree, with one value for each array: they are then written one by one,
    and Orbax's own metadata of a NumPy array has no shape."""
    import orbax.checkpoint as ocp  # takes a while, so only those who save wait for it

    ones = map_specs(lambda s: np.zeros((1,) * len(s.shape), s.resolve_dtype(dtype)), specs)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that it has no OCDBT files to merge: we write none
    try:
        ocp.Checkpointer(handler).save(folder.absolute(), ocp.args.PyTreeSave(ones))
    finally:
        logger.setLevel(level)
