"""Hugging Face folder or GGUF file → Orbax folder of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load import check_dtype, open_source, resolve_model
from jaxinfer.checkpoints.source import Progress, load_params
from jaxinfer.generation import TextOptions
from jaxinfer.params import Tree, named_leaves


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: str | None = None,
    progress: Progress | None = None,
    *,
    text: TextOptions | None = None,
) -> Path:
    """Convert a Hugging Face folder or GGUF file to our Orbax folder at `dst`, a new path.

    `dtype` None keeps the source's (quantised GGUF: float32). A chat template in `text` takes the
    place of the source's. Raises CheckpointError.
    """
    src, dst = resolve_model(src), Path(dst).expanduser()
    if orbax_io.is_orbax_folder(src):
        raise CheckpointError(f"{src} is an Orbax checkpoint already")
    if dst.exists():
        raise CheckpointError(f"{dst} exists already; remove it or choose another destination")
    source = open_source(src)
    tokenizer = (text or TextOptions()).tokenizer(source.require_tokenizer())
    kind = check_dtype(dtype or source.dtype)
    params = load_params(source, kind, lambda array, spec: array, progress)
    _check_space(dst, params)
    if progress:
        progress("writing checkpoint", 0, 1)
    orbax_io.save(dst, params, source.config, kind, tokenizer, source.description)
    if progress:
        progress("writing checkpoint", 1, 1)
    return dst


def _check_space(dst: Path, params: Tree) -> None:
    """Say so before writing, rather than fail in the middle."""
    parent = next(p for p in dst.absolute().parents if p.exists())
    needed = sum(array.nbytes for _, array in named_leaves(params))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(f"{dst} needs {needed} bytes, {parent} has {free} free")
