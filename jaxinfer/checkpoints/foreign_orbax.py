"""Orbax checkpoints that other JAX projects wrote, seen as Hugging Face tensors.

The tree may be the folder itself, a step of a CheckpointManager or an item of one. It has no
config: a config.json, and a tokenizer, lie beside it or are named. Parameters are read by
TensorStore, and of one that holds all layers only the layer that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.foreign_trees import LAYOUTS, Layout, Place
from jaxinfer.checkpoints.safetensors_io import read_hf_config
from jaxinfer.checkpoints.source import Source, summarise
from jaxinfer.config import DTYPES, ModelConfig
from jaxinfer.json_files import read_object
from jaxinfer.models import family_of
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer_files import MissingTokenizerError

METADATA, CONFIG = "_METADATA", "config.json"
_ITEMS = ("items", "default", "state", "params", "model", "model_params")
_WRAPPERS = {"params", "model", "state", "transformer"}  # what trees have around parameters
_NOT_PARAMETERS = {"step", "opt_state", "optimizer", "rng", "rngs"}
_SHOWN = 8  # leaves listed of a tree that is not known


def find_tree(path: Path) -> Path | None:
    """The folder with an Orbax tree, at `path` or where managers of checkpoints put it.

    Raises CheckpointError when there are several steps to choose from.
    """
    for folder in (path, *(path / item for item in _ITEMS)):
        if (folder / METADATA).is_file():
            return folder
    steps = sorted((p for p in path.glob("*") if p.name.isdecimal()), key=lambda p: int(p.name))
    found = [tree for tree in map(find_tree, steps) if tree is not None]
    if len(found) > 1:
        names = ", ".join(step.name for step in steps)
        raise CheckpointError(f"{path} holds several steps: {names}; name one, as {steps[-1]}")
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class _Tree:
    """An opened tree: TensorStore arrays by normalised path, and the file each is in."""

    folder: Path
    arrays: dict[str, Any]
    stored_names: dict[str, str]


class ForeignTensors:
    """The tensors of another project's tree under Hugging Face names."""

    def __init__(self, tree: _Tree, layout: Layout, config: ModelConfig):
        """Raises CheckpointError listing the leaves that are misshapen."""
        self._tree = tree
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Place, tuple[Any, ...]]] = {}
        problems = []
        for source in family_of(config.family).hf_sources(config).values():
            for name, shape in source.tensors.items():
                known = [p for p in layout.places(config, name) if p.leaf in tree.arrays]
                found = [(place, self._index(place)) for place in known]
                if fits := [(place, index) for place, index in found if index is not None]:
                    self.shapes[name], self._places[name] = shape, fits[0]
                elif known:
                    problems.append(self._misshapen(known[0]))
        if problems:
            raise CheckpointError(summarise(str(tree.folder), list(dict.fromkeys(problems))))
        used = {place.leaf for place, _ in self._places.values()}
        for leaf, array in tree.arrays.items():
            if leaf not in used and not re.fullmatch(layout.ignored, leaf):
                self.shapes[tree.stored_names[leaf]] = tuple(array.shape)

    def _index(self, place: Place) -> tuple[Any, ...] | None:
        return place.index(tuple(self._tree.arrays[place.leaf].shape))

    def _misshapen(self, place: Place) -> str:
        found = list(self._tree.arrays[place.leaf].shape)
        of_each = "" if place.layer is None else f" of each of {place.layer[1]} layers"
        own = self._tree.stored_names[place.leaf]
        return f"{own}: expected shape {list(place.shape)}{of_each}, found {found}"

    def read(self, name: str) -> np.ndarray:
        place, index = self._places[name]
        try:
            array = self._tree.arrays[place.leaf][index].read().result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.where(name)}: cannot be read: {error}") from error
        return place.finish(np.asarray(array))

    def storage(self, name: str) -> tuple[str, int]:
        place, index = self._places[name]
        array = self._tree.arrays[place.leaf][index]
        return array.dtype.name, array.size * array.dtype.numpy_dtype.itemsize

    def where(self, name: str) -> str:
        leaf = self._places[name][0].leaf if name in self._places else ""
        own = self._tree.stored_names.get(leaf, name)
        return f"{self._tree.folder}: {own}"


def open_foreign(path: Path, config_file: Path | None = None) -> Source:
    """Tree, config and tokenizer of another project's checkpoint.

    `config_file` is a config.json; None: the one beside the tree. Raises CheckpointError naming
    what is missing or not known, with what was found.
    """
    folder = find_tree(path)
    if folder is None:
        raise CheckpointError(f"{path}: no Orbax tree ({METADATA}) in it")
    config_file = config_file or _beside(path, folder)
    _, config, eos_ids = read_hf_config(config_file)
    tokenizer, missing = None, ""
    try:
        tokenizer = Tokenizer.from_folder(config_file.parent, eos_ids)
    except MissingTokenizerError as error:
        missing = str(error)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    tree = _open_tree(folder)
    layout = _layout(tree, config)
    tensors = ForeignTensors(tree, layout, config)
    description = f"Orbax checkpoint {folder} of {layout.title}"
    return Source(description, config, _natural_dtype(tree), tensors, tokenizer, missing)


def _beside(path: Path, folder: Path) -> Path:
    """config.json in the folder of the tree or in one of those around it."""
    around = [folder, *folder.parents[:3]]
    found = [where / CONFIG for where in around if (where / CONFIG).is_file()]
    if not found:
        raise CheckpointError(
            f"{path}: an Orbax checkpoint of another project; it needs the model's {CONFIG} and "
            f"tokenizer.json: put them into {path}, or name one: jaxinfer convert --config FILE"
        )
    return found[0]


def _open_tree(folder: Path) -> _Tree:
    import tensorstore  # only who reads such a tree waits for it

    try:
        data = read_object(folder / METADATA)
        names = dict(_leaves(data["tree_metadata"]))
        opened = {
            leaf: tensorstore.open(_spec(folder, name, data), open=True, read=True)
            for leaf, name in names.items()
        }
        return _Tree(folder, {leaf: future.result() for leaf, future in opened.items()}, names)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error!r}") from error


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(normalised path, name in the checkpoint) of every parameter."""
    paths = [
        [str(key["key"]) for key in entry["key_metadata"]]
        for entry in tree.values()
        if entry["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")
    ]
    paths = [path for path in paths if path[0] not in _NOT_PARAMETERS]
    if any(path[0] == "params" for path in paths):  # a training state has others beside them
        paths = [path for path in paths if path[0] == "params"]
    for path, keys in zip(paths, _normalised(paths)):
        yield ".".join(keys), ".".join(path)


def _normalised(paths: list[list[str]]) -> list[list[str]]:
    """Without what wraps all parameters, and without NNX's name for a variable's value."""
    split = [[part for key in path for part in key.split("/")] for path in paths]
    while split and len(outer := {keys[0] for keys in split}) == 1 and outer <= _WRAPPERS:
        if any(len(keys) < 2 or keys[1] == "embed_tokens" for keys in split):
            break  # Hugging Face's `model.embed_tokens` is a name, not a wrapper
        split = [keys[1:] for keys in split]
    return [keys[:-1] if keys[-1] in ("value", "raw_value") else keys for keys in split]


def _spec(folder: Path, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """How TensorStore opens a parameter. An absent chunk is an error, if zeros are stored too."""
    base = f"file://{folder.absolute()}/"
    if metadata.get("use_ocdbt", (folder / "manifest.ocdbt").exists()):
        store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{folder.absolute()}/{name}/"}
    return {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "kvstore": store,
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value"),
    }


def _layout(tree: _Tree, config: ModelConfig) -> Layout:
    leaves = list(tree.arrays)
    for layout in LAYOUTS:
        if layout.matches(leaves):
            if config.family not in layout.families:
                raise CheckpointError(
                    f"{tree.folder}: trees of {layout.title} are known for "
                    f"{', '.join(sorted(layout.families))}, not for {config.family}"
                )
            return layout
    found = [f"{tree.stored_names[leaf]}: {list(a.shape)}" for leaf, a in tree.arrays.items()]
    known = ", ".join(layout.title for layout in LAYOUTS)
    title = f"{tree.folder}, whose tree is of none of the known projects ({known}),"
    raise CheckpointError(summarise(title, found or ["no arrays"], _SHOWN))


def _natural_dtype(tree: _Tree) -> str:
    """What most values are stored in."""
    sizes: dict[str, int] = {}
    for array in tree.arrays.values():
        sizes[array.dtype.name] = sizes.get(array.dtype.name, 0) + array.size
    most = max(sizes, key=lambda name: sizes[name])
    return most if most in DTYPES else "float32"
