"""Parameters of any checkpoint one at a time, in any order: for what cannot have them all in
memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.array_files import read_arrays
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load import open_model_folder, open_source, resolve_model
from jaxinfer.checkpoints.source import check_inventory, read_param
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.params import named_leaves
from jaxinfer.quantization.kinds import NONE
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParamReader:
    """An opened checkpoint; `read` gives a parameter by its path, in `dtype` or as it has to be."""

    config: ModelConfig
    dtype: str
    tokenizer: Tokenizer
    description: str
    read: Callable[[str], np.ndarray]


def open_params(path: str | Path) -> ParamReader:
    """A checkpoint whose weights are numbers, or can be read as such. Raises CheckpointError."""
    path = resolve_model(path)
    if not orbax_io.is_orbax_folder(path):
        source = open_source(path)
        check_inventory(source)
        family = family_of(source.config.family)
        specs = dict(named_leaves(family.param_specs(source.config)))
        sources = family.hf_sources(source.config)
        return ParamReader(
            source.config,
            source.dtype,
            source.require_tokenizer(),
            source.description,
            lambda name: read_param(source, name, sources[name], specs[name], source.dtype),
        )
    manifest, tokenizer = open_model_folder(path)
    if manifest.quantization != NONE:
        raise CheckpointError(
            f"{path}: its weights are stored as {manifest.quantization} already; take the original"
        )
    orbax_io.check(path, manifest)

    def read(name: str) -> np.ndarray:
        files = {n: at for n, at in manifest.files.items() if n.startswith(f"{name}/")}
        own = {name: manifest.tensors[name]}
        array: np.ndarray = read_arrays(
            path / orbax_io.PARAMS, files, own, lambda _, stored: stored
        )[name]
        return array

    return ParamReader(manifest.config, manifest.dtype, tokenizer, f"Orbax checkpoint {path}", read)
