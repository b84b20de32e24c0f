"""Any checkpoint → a model ready to serve: config, parameters in place, tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.finite import non_finite
from jaxinfer.checkpoints.foreign_orbax import find_tree, open_foreign
from jaxinfer.checkpoints.gguf_io import open_gguf
from jaxinfer.checkpoints.packed import describe_kept, kept_layouts
from jaxinfer.checkpoints.safetensors_io import open_huggingface
from jaxinfer.checkpoints.source import (
    Progress,
    Source,
    check_vocabulary,
    load_params,
)
from jaxinfer.config import DTYPES, ModelConfig
from jaxinfer.generation import GenerationDefaults, TextOptions
from jaxinfer.params import ParamSpec, Tree, named_leaves
from jaxinfer.paths import exists
from jaxinfer.quantization.kinds import AUTO, KINDS, NONE, Layout, alike, choose
from jaxinfer.quantization.quantise import placing
from jaxinfer.quantization.weight import Layouts
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `params` is the family's tree of arrays on their devices."""

    config: ModelConfig
    params: Tree
    tokenizer: Tokenizer
    generation: GenerationDefaults
    dtype: str
    description: str
    quantization: str = NONE
    layouts: Layouts | None = None  # of weights that are not in the kind's own


def resolve_model(name_or_path: str | Path) -> Path:
    """The path of a checkpoint. Raises CheckpointError saying what a MODEL may be.

    `demo` is not a path: `jaxinfer.demo.demo_checkpoint` provides it.
    """
    path = Path(name_or_path).expanduser()
    kinds = "an Orbax folder, a Hugging Face folder, a .gguf file, or `demo`"
    if not exists(path):
        hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name_or_path))
        hint = f"; from the Hugging Face Hub: hf download {path} --local-dir FOLDER" if hub else ""
        raise CheckpointError(f"{path} does not exist; MODEL is {kinds}{hint}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file but no .gguf file; MODEL is {kinds}")
        return path
    if orbax_io.is_unfinished(path):
        raise CheckpointError(
            f"{path} lacks {orbax_io.MANIFEST}: a conversion that was not finished, or damaged; "
            "convert the original again"
        )
    if orbax_io.is_orbax_folder(path) or (path / "config.json").is_file() or find_tree(path):
        return path
    found = sorted(path.glob("*.gguf"))
    hint = f"; did you mean {found[0]}?" if found else ""
    raise CheckpointError(
        f"{path} holds neither {orbax_io.MANIFEST} nor config.json nor an Orbax tree{hint}; "
        f"MODEL is {kinds}"
    )


def open_source(path: Path, config_file: str | Path | None = None) -> Source:
    """A Hugging Face folder, a GGUF file or another project's Orbax checkpoint, opened.

    `config_file` is the config.json of the latter, if none lies beside it. Raises CheckpointError.
    """
    foreign = path.is_dir() and not any(path.glob("*.safetensors")) and find_tree(path) is not None
    if config_file is not None and not foreign:
        raise CheckpointError(f"{path} has a config of its own; leave out {config_file}")
    if not foreign and path.is_dir() and not any(path.glob("*.safetensors")):
        inner = [child for child in sorted(path.iterdir()) if child.is_dir() and find_tree(child)]
        if inner:
            raise CheckpointError(f"{path} holds no model itself; did you mean {inner[0]}?")
    if foreign:
        source = open_foreign(path, None if config_file is None else Path(config_file).expanduser())
    else:
        source = open_gguf(path) if path.is_file() else open_huggingface(path)
    if source.tokenizer is not None:
        check_vocabulary(source.description, source.config, source.tokenizer)
    return source


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    sharding_of: Callable[[ParamSpec], Any] | None = None,
    progress: Progress | None = None,
    text: TextOptions | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a checkpoint of any known kind (`resolve_model`), or raise CheckpointError.

    `text` is what takes the place of the checkpoint's own chat template and generation defaults.
    `dtype` is what weights and activations are in (None: as stored; quantised GGUF: float32).
    `sharding_of` says where each parameter lies (None: all on the first device).
    `quantization` is one of `quantization.kinds`, or none, or auto (None: as stored).
    """
    path = resolve_model(path)
    if sharding_of is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        sharding_of = lambda spec: sharding  # noqa: E731
    if orbax_io.is_orbax_folder(path):
        return _load_orbax(path, dtype, sharding_of, progress, text or TextOptions(), quantization)
    source = open_source(path)
    tokenizer, generation = _text_of(path, source.require_tokenizer(), text or TextOptions())
    kind = check_dtype(dtype or source.dtype)
    quantization, layouts = chosen_storage(source, quantization, jax.devices()[0].platform)
    put = placing(NONE if layouts else quantization, kind, sharding_of)
    params = load_params(source, kind, put, progress, (quantization, layouts or {}))
    described = source.description
    return LoadedModel(
        source.config, params, tokenizer, generation, kind, described, quantization, layouts
    )


def chosen_storage(
    source: Source, asked: str | None, platform: str
) -> tuple[str, dict[str, Layout] | None]:
    """The kind to have a source's weights in, as `asked`, and the layouts of those that stay as
    they are stored; None: they are read as numbers and rounded, if the kind is not none.

    Weights stay where nothing else is asked for, or a kind that they are stored in; not where it
    rounds activations, which meet groups of weights one by one, so that one scale a row is faster.
    Raises CheckpointError as `chosen_kind` does.
    """
    stored = NONE if source.packed is None else source.packed.kind
    if stored == NONE:
        return chosen_kind(asked, NONE, platform), None
    layouts = kept_layouts(source)
    kind = stored if asked in (None, AUTO) else chosen_kind(asked, NONE, platform)
    grouped = any(layout.group for layout in layouts.values())
    if asked in (None, AUTO) and (not layouts or platform not in KINDS[kind].platforms):
        logger.info(f"weights stored as {stored} are made numbers of: no form of it runs here")
        return NONE, None
    if kind == NONE or not layouts or not alike(kind, stored):
        return kind, None
    if grouped and kind != stored and KINDS[kind].activations != "as_given":
        return kind, None
    for line in describe_kept(source, layouts):
        logger.info(line)
    return kind, layouts


def chosen_kind(asked: str | None, stored: str, platform: str) -> str:
    """The kind to have weights in; see `choose`. Raises CheckpointError."""
    try:
        return choose(asked, stored, platform)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _text_of(
    path: Path, tokenizer: Tokenizer, text: TextOptions
) -> tuple[Tokenizer, GenerationDefaults]:
    """What is said about chats and generating, checked before any parameter is read."""
    try:
        return text.tokenizer(tokenizer), text.defaults(tokenizer)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def open_model_folder(path: Path) -> tuple[orbax_io.Manifest, Tokenizer]:
    """The manifest and tokenizer of an Orbax folder of ours."""
    manifest = orbax_io.read_manifest(path)
    try:
        tokenizer = Tokenizer.from_folder(path / orbax_io.TOKENIZER)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    check_vocabulary(str(path), manifest.config, tokenizer)
    return manifest, tokenizer


def _load_orbax(
    path: Path,
    dtype: str | None,
    sharding_of: Callable[[ParamSpec], Any],
    progress: Progress | None,
    text: TextOptions,
    quantization: str | None,
) -> LoadedModel:
    manifest, tokenizer = open_model_folder(path)
    quantization = chosen_kind(quantization, manifest.quantization, jax.devices()[0].platform)
    tokenizer, generation = _text_of(path, tokenizer, text)
    kind = check_dtype(dtype or manifest.dtype)
    if progress:
        progress("restoring parameters", 0, 1)
    params = orbax_io.restore(path, manifest, kind, sharding_of, quantization)
    if jnp.finfo(kind).max < jnp.finfo(manifest.dtype).max:
        for name, array in named_leaves(params):
            if not _all_finite(array):
                raise CheckpointError(f"{path}: {name}: has values too large for {kind}")
    if progress:
        progress("restoring parameters", 1, 1)
    description = f"Orbax checkpoint {path}"
    return LoadedModel(
        manifest.config,
        params,
        tokenizer,
        generation,
        kind,
        description,
        quantization,
        manifest.layouts,
    )


def _all_finite(array: jax.Array) -> bool:
    """Whether no value is NaN or Inf, without a temporary of the array's size."""
    if all(device.platform == "cpu" for device in array.devices()):
        return all(non_finite(np.asarray(s.data)) == 0 for s in array.addressable_shards)
    return bool(jnp.isfinite(jnp.sum(array, dtype=jnp.float32)))  # sums keep NaN and Inf


def check_dtype(dtype: str) -> str:
    """The dtype itself, if models can be served in it. Raises CheckpointError naming those."""
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype
