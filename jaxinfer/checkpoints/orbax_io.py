"""Our own checkpoint folder: parameters in Orbax, config and tokenizer beside them.

    jaxinfer.json   format version, ModelConfig, dtype, source, tensors, files
    params/         the parameter tree, one Orbax array each
    tokenizer/      tokenizer.json, tokenizer_config.json, generation_config.json

The folder is written under another name and renamed when complete, so an interrupted conversion
never leaves one that loads. Arrays are stored uncompressed and in files of their own: restoring is
then little more than reading. A zarr reader takes an absent file for zeros and cannot see a flipped
bit, so `jaxinfer.json` lists every file with its size and checksum, and restoring checks them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.source import non_finite, summarise
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import check_sizes
from jaxinfer.params import ParamSpec, Tree, map_named_specs, map_specs, named_leaves
from jaxinfer.tokenizer import Tokenizer

FORMAT_VERSION = 1
_IN_FLIGHT = 32 << 20  # bytes read at once; a larger parameter is read alone
_SMALL = 1 << 16  # bytes; files up to this size are checked before any is used
MANIFEST, PARAMS, TOKENIZER = "jaxinfer.json", "params", "tokenizer"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What jaxinfer.json says.

    Attributes:
        dtype: what the parameters are stored in.
        source: what the checkpoint was converted from.
        tensors: path in the tree -> [shape, dtype].
        files: path under params/ -> [bytes, CRC-32].
    """

    config: ModelConfig
    dtype: str
    source: str
    tensors: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, tuple[int, int]]


def is_orbax_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def save(
    path: Path, params: Tree, config: ModelConfig, dtype: str, tokenizer: Tokenizer, source: str
) -> None:
    """Write a checkpoint folder at `path`, which appears only when it is complete.

    `params` may hold NumPy or JAX arrays. Raises CheckpointError when `path` exists, and for NaN
    or Inf values: with the checksums, that makes looking for them at every restore needless.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists already; remove it or choose another destination")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    tensors = {}
    for name, array in named_leaves(params):
        if bad := non_finite(np.asarray(array)):
            raise CheckpointError(f"{name}: {bad} of {array.size} values are NaN or Inf")
        tensors[name] = [list(array.shape), array.dtype.name]
    try:
        tokenizer.save(partial / TOKENIZER)
        with _without_warnings():
            _checkpointer().save((partial / PARAMS).absolute(), _save_args(params))
        manifest = {
            "format_version": FORMAT_VERSION,
            "config": config.to_json(),
            "dtype": dtype,
            "source": source,
            "tensors": tensors,
            "files": _inventory(partial / PARAMS),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest), "utf-8")
        partial.rename(path)
    except FileExistsError as error:
        raise CheckpointError(f"{path} appeared while it was being written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """jaxinfer.json of a checkpoint folder. Raises CheckpointError naming what is wrong in it."""
    file = path / MANIFEST
    try:
        data = json.loads(file.read_text("utf-8"))
        if data["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version = {data['format_version']}, this version of jaxinfer reads "
                f"{FORMAT_VERSION}; convert the original again"
            )
        config = ModelConfig.from_json(data["config"])
        family_of(config.family)
        check_sizes(config)
        return Manifest(
            config,
            data["dtype"],
            data["source"],
            {
                n: (tuple(shape), np.dtype(kind).name)
                for n, (shape, kind) in data["tensors"].items()
            },
            {name: (size, crc) for name, (size, crc) in data["files"].items()},
        )
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def restore(
    path: Path, manifest: Manifest, dtype: str, sharding_of: Callable[[ParamSpec], Any]
) -> Tree:
    """The parameters in `dtype`, each shard read straight to where it belongs.

    Besides the parameters, memory holds what is in flight: at most the largest of them, as it is
    read and as it is placed. Raises CheckpointError naming the tensors or files that are missing,
    extra, misshapen, cut short or changed.
    """
    check(path, manifest)
    specs = family_of(manifest.config.family).param_specs(manifest.config)
    folder = (path / PARAMS).absolute()
    batches = _batches(manifest, specs, dtype, sharding_of)
    params = map_specs(lambda _: ..., specs)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        # Metadata first, so that nothing is read as it should not be; arrays while they are read.
        by_size = sorted(manifest.files.items(), key=lambda item: item[1][0])
        checks = [pool.submit(_check_file, folder, *item) for item in by_size]
        small = sum(size <= _SMALL for _, (size, _) in by_size)
        _raise_problems(path, [check.result() for check in checks[:small]])
        try:
            for limit, arguments in batches:
                part = _checkpointer(limit).restore(folder, arguments)
                params = jax.tree.map(lambda old, new: old if new is ... else new, params, part)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise CheckpointError(f"{folder} cannot be restored: {error}") from error
        _raise_problems(path, [check.result() for check in checks[small:]])
    return params


def _batches(
    manifest: Manifest, specs: Tree, dtype: str, sharding_of: Callable[[ParamSpec], Any]
) -> list[tuple[int, Any]]:
    """(bytes in flight, Orbax arguments): the large parameters first, then the others.

    A large one waits until its bytes are free. Last, that would be when memory is fullest.
    """
    stored = {name: np.dtype(kind).itemsize for name, (_, kind) in manifest.tensors.items()}
    sizes = {  # as stored or as restored, whichever is wider
        name: math.prod(spec.shape) * max(stored[name], spec.resolve_dtype(dtype).itemsize)
        for name, spec in named_leaves(specs)
    }
    large = {name for name, size in sizes.items() if size > _IN_FLIGHT}
    groups = [(large, max(sizes.values())), (sizes.keys() - large, _IN_FLIGHT)]
    return [
        (limit + 1, _restore_args(specs, group, dtype, sharding_of))
        for group, limit in groups
        if group
    ]


def _raise_problems(path: Path, problems: list[str | None]) -> None:
    if found := [problem for problem in problems if problem]:
        raise CheckpointError(summarise(str(path), found))


def is_current(path: Path) -> bool:
    """Whether a folder is whole and of the shapes that this version's families expect."""
    try:
        check(path, read_manifest(path))
    except ValueError:
        return False
    return True


def check(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for tensors this version does not expect and files of a wrong size."""
    specs = family_of(manifest.config.family).param_specs(manifest.config)
    expected = {name: spec.shape for name, spec in named_leaves(specs)}
    found = {name: shape for name, (shape, _) in manifest.tensors.items()}
    problems = [
        f"{name}: expected shape {list(expected[name])}, found {list(found[name])}"
        for name in expected
        if name in found and expected[name] != found[name]
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


def _check_file(folder: Path, name: str, expected: tuple[int, int]) -> str | None:
    """What is wrong with a file, None when it is as it was written."""
    try:
        crc = _crc32(folder / name)
    except OSError as error:
        return f"{PARAMS}/{name}: {error.strerror}"
    if crc != expected[1]:
        was = f"CRC-32 {expected[1]:08x}, found {crc:08x}"
        return f"{PARAMS}/{name}: changed since it was written (expected {was})"
    return None


def _crc32(path: Path) -> int:
    crc = 0
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def _inventory(folder: Path) -> dict[str, list[int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): [p.stat().st_size, _crc32(p)] for p in files}


# Orbax takes a while to import, so only those who save or restore do.


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Orbax warns of each save that it has no OCDBT files to merge: we write none."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _checkpointer(restore_bytes: int | None = None) -> Any:
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_compression=False,
        restore_concurrent_gb=restore_bytes and restore_bytes / 1e9,
    )
    return ocp.Checkpointer(handler)


def _save_args(params: Tree) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave(params)


def _restore_args(
    specs: Tree, names: Set[str], dtype: str, sharding_of: Callable[[ParamSpec], Any]
) -> Any:
    """Orbax arguments that restore the named parameters and leave `...` for the others."""
    import orbax.checkpoint as ocp

    def item(name: str, spec: ParamSpec) -> Any:
        if name not in names:
            return ocp.PLACEHOLDER
        return jax.ShapeDtypeStruct(spec.shape, spec.resolve_dtype(dtype))

    def arguments(spec: ParamSpec) -> Any:
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=spec.resolve_dtype(dtype),
            sharding=sharding_of(spec),
            global_shape=spec.shape,
        )

    return ocp.args.PyTreeRestore(
        item=map_named_specs(item, specs), restore_args=map_specs(arguments, specs)
    )
