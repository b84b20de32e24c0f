"""Any checkpoint → a model ready to serve: config, parameters in place, tokenizer."""

from __future__ import annotations

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
from jaxinfer.checkpoints.foreign_orbax import find_tree, open_foreign
from jaxinfer.checkpoints.gguf_io import open_gguf
from jaxinfer.checkpoints.safetensors_io import open_huggingface
from jaxinfer.checkpoints.source import (
    Progress,
    Source,
    check_vocabulary,
    load_params,
    non_finite,
)
from jaxinfer.checkpoints.storage import (
    Fits,
    chosen_kind,
    chosen_storage,
    log_kept,
    served_storage,
    with_numbers,
)
from jaxinfer.config import DTYPES, ModelConfig
from jaxinfer.generation import GenerationDefaults, TextOptions
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, Tree, named_leaves
from jaxinfer.paths import exists
from jaxinfer.quantization.kinds import NONE
from jaxinfer.quantization.quantise import placing
from jaxinfer.quantization.weight import Layouts, own_layouts
from jaxinfer.tokenizer import Tokenizer

_ON_HUB = re.compile(
    r"(https://(www\.)?huggingface\.co/|hf://)?(?P<name>[\w-][\w.-]*/[\w.-]+)/?(tree/main/?)?"
)


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
        hub = _ON_HUB.fullmatch(str(name_or_path))
        hint = ""
        if hub:
            hint = f"; from the Hugging Face Hub: hf download {hub['name']} --local-dir FOLDER"
        raise CheckpointError(f"{path} does not exist; MODEL is {kinds}{hint}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path} is a file but no .gguf file; MODEL is {kinds}")
        return path
    if orbax_io.is_unfinished(path):
        raise CheckpointError(
            f"{path} lacks {orbax_io.MANIFEST}: a conversion that was not finished, or damaged; "
            "convert the original again"
        )
    if orbax_io.is_orbax_folder(path) or (path / "config.json").is_file() or find_tree(path):
        return path
    # A folder of the Hub's cache has the model below.
    found = [*sorted(path.glob("*.gguf")), *sorted(path.glob("snapshots/*/config.json"))]
    found = [file.parent if file.name == "config.json" else file for file in found]
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
    fits: Fits | None = None,
) -> LoadedModel:
    """Load a checkpoint of any known kind (`resolve_model`), or raise CheckpointError.

    `text` is what takes the place of the checkpoint's own chat template and generation defaults.
    `dtype` is what weights and activations are in (None: as stored; quantised GGUF: float32).
    `sharding_of` says where each parameter lies (None: all on the first device).
    `quantization` is one of `quantization.kinds`, or none, or auto (None: as stored, but
    see `storage.on_cpus`; `fits` says whether a host has room for numbers).
    """
    path = resolve_model(path)
    if sharding_of is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        sharding_of = lambda spec: sharding  # noqa: E731
    if orbax_io.is_orbax_folder(path):
        args = (dtype, sharding_of, progress, text or TextOptions(), quantization, fits)
        return _load_orbax(path, *args)
    source = open_source(path)
    tokenizer, generation = _text_of(path, source.require_tokenizer(), text or TextOptions())
    kind = check_dtype(dtype or source.dtype)
    asked, platform = quantization, jax.devices()[0].platform
    stored = chosen_storage(source, asked, platform)
    chosen = served_storage(source.config, asked, stored, kind, platform, fits)
    quantization, layouts = chosen
    log_kept(source, layouts)
    put = placing(NONE if layouts else quantization, kind, sharding_of)
    params = load_params(source, kind, put, progress, (quantization, layouts or {}))
    described = source.description
    return LoadedModel(
        source.config, params, tokenizer, generation, kind, described, quantization, layouts
    )


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
    asked: str | None,
    fits: Fits | None,
) -> LoadedModel:
    manifest, tokenizer = open_model_folder(path)
    config, platform = manifest.config, jax.devices()[0].platform
    as_stored, kind = manifest.quantization, check_dtype(dtype or manifest.dtype)
    quantization, layouts = chosen_kind(asked, as_stored, platform), manifest.layouts
    tokenizer, generation = _text_of(path, tokenizer, text)
    specs = family_of(config.family).param_specs(config)
    if as_stored != NONE:
        layouts = own_layouts(specs, as_stored) if layouts is None else layouts
        kept = (NONE, None) if quantization == NONE else (quantization, layouts)
        quantization, layouts = served_storage(config, asked, kept, kind, platform, fits)
    if progress:
        progress("restoring parameters", 0, 1)
    restored_as = quantization if as_stored == NONE or layouts else as_stored
    params = orbax_io.restore(path, manifest, kind, sharding_of, restored_as)
    if as_stored != NONE:
        put = placing(NONE if layouts else quantization, kind, sharding_of)

        def placed(numbers: np.ndarray, spec: ParamSpec) -> Any:
            with np.errstate(over="ignore"):  # which is said below
                return put(numbers.astype(spec.resolve_dtype(kind), copy=False), spec)

        params = with_numbers(params, specs, layouts, placed)
    if jnp.finfo(kind).max < jnp.finfo(manifest.dtype).max:
        for name, array in named_leaves(params):
            if not _all_finite(array):
                raise CheckpointError(f"{path}: {name}: has values too large for {kind}")
    if progress:
        progress("restoring parameters", 1, 1)
    description = f"Orbax checkpoint {path}"
    return LoadedModel(
        config, params, tokenizer, generation, kind, description, quantization, layouts
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
