"""Any checkpoint → Orbax folder of ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load import check_dtype, open_source, resolve_model
from jaxinfer.checkpoints.source import Progress, load_params
from jaxinfer.checkpoints.storage import chosen_storage, log_kept
from jaxinfer.generation import TextOptions
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, named_leaves, param_bytes
from jaxinfer.paths import exists
from jaxinfer.quantization.quantise import quantise
from jaxinfer.quantization.weight import quantised_specs


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: str | None = None,
    progress: Progress | None = None,
    config_file: str | Path | None = None,
    *,
    text: TextOptions | None = None,
    quantization: str | None = None,
) -> Path:
    """Convert any checkpoint to our Orbax folder at `dst`, a new path, parameter by parameter.

    `dtype` None keeps the source's (quantised GGUF: float32); `config_file` is the config.json of
    an Orbax checkpoint of another project that has none beside it. A chat template in `text` takes
    the place of the source's; `quantization` is the kind to write weights in, or auto, or none
    (None: as they are stored, where that is a kind). Raises CheckpointError.
    """
    src, dst = resolve_model(src), Path(dst).expanduser()
    if orbax_io.is_orbax_folder(src):
        raise CheckpointError(f"{src} is an Orbax checkpoint already")
    if os.path.lexists(dst):  # which takes a name that no file can have for absent
        raise CheckpointError(f"{dst} exists already; remove it or choose another destination")
    source = open_source(src, config_file)
    tokenizer = (text or TextOptions()).tokenizer(source.require_tokenizer())
    kind = check_dtype(dtype or source.dtype)
    # A file is not bound to a device.
    quantization, layouts = chosen_storage(source, quantization, "cpu")
    log_kept(source, layouts)
    plain = family_of(source.config.family).param_specs(source.config)
    specs = quantised_specs(plain, quantization, kind, layouts)
    _check_space(dst, param_bytes(specs, kind))
    names = (name for name, _ in named_leaves(specs))  # in the order they are loaded
    args = (source.config, kind, tokenizer, source.description, quantization, layouts)
    with orbax_io.writing(dst, *args) as write:

        def place(made: Any, spec: ParamSpec) -> None:
            if not layouts:
                made = quantise(made, spec, quantization, kind)
            for part in jax.tree.leaves(made):
                write(next(names), part)

        load_params(source, kind, place, progress, (quantization, layouts or {}))
        if progress:
            progress("writing checkpoint", 0, 1)
    if progress:
        progress("writing checkpoint", 1, 1)
    return dst


def _check_space(dst: Path, needed: int) -> None:
    """Say so before writing, rather than fail in the middle."""
    parent = next(p for p in dst.absolute().parents if exists(p))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(f"{dst} needs {needed} bytes, {parent} has {free} free")
