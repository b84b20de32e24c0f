"""What a checkpoint's weights are served as: as they are stored, in another kind, or as numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.packed import describe_kept, kept_layouts, numbers
from jaxinfer.checkpoints.source import Source
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, Tree, named_leaves, param_bytes
from jaxinfer.quantization.kinds import AUTO, KINDS, NONE, alike, choose
from jaxinfer.quantization.rounding import Rounded
from jaxinfer.quantization.weight import (
    Layouts,
    Quantised,
    activations_for,
    quantised_spec,
    quantised_specs,
)
from jaxinfer.sizes import size_text
from pallas_kernels.quantised_matmul.activations import PAIR

logger = logging.getLogger(__name__)

Storage = tuple[str, Layouts | None]  # a kind, and layouts of parameters where not the kind's own
Fits = Callable[[ModelConfig, str, int], bool]  # model, dtype, bytes of weights -> is there room


def chosen_storage(source: Source, asked: str | None, platform: str) -> Storage:
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
    return kind, layouts


def chosen_kind(asked: str | None, stored: str, platform: str) -> str:
    """The kind to have weights in; see `choose`. Raises CheckpointError."""
    try:
        return choose(asked, stored, platform)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def on_cpus(model: ModelConfig, asked: str | None, stored: Storage, dtype: str) -> Storage:
    """What serves on CPUs what is `stored` so: XLA would make numbers of some weights in every
    step, which takes longer than all the rest, so unless their kind is asked for by name they are
    numbers from the start, or what `asked` makes of numbers if no weight is left as stored."""
    kind, layouts = stored
    if asked not in (None, AUTO) or kind == NONE or layouts is None:
        return stored
    specs = dict(named_leaves(family_of(model.family).param_specs(model)))

    def is_made(path: str) -> bool:
        layout = layouts[path]
        activations = activations_for(layout, KINDS[kind])
        spec = quantised_spec(specs[path], layout, activations, dtype)
        return isinstance(spec, Quantised) and spec.made > 0

    left = {path: layout for path, layout in layouts.items() if not is_made(path)}
    return (kind, left) if left else (choose(asked, NONE, "cpu"), None)


def weight_bytes(model: ModelConfig, storage: Storage, dtype: str) -> int:
    """Bytes of a model's parameters."""
    specs = family_of(model.family).param_specs(model)
    return param_bytes(quantised_specs(specs, storage[0], dtype, storage[1]), dtype)


def served_storage(
    model: ModelConfig,
    asked: str | None,
    stored: Storage,
    dtype: str,
    platform: str,
    fits: Fits | None = None,
) -> Storage:
    """What to serve weights as that are `stored` so: on CPUs `on_cpus`, where `fits` (None: always)
    says that there is room. The log says what was chosen, and what else could be."""
    chosen = on_cpus(model, asked, stored, dtype) if platform == "cpu" else stored
    if chosen == stored:
        return stored
    own, others = (weight_bytes(model, storage, dtype) for storage in (stored, chosen))
    what = f"numbers in {dtype}" if chosen[0] == NONE else chosen[0]
    if fits is not None and not fits(model, dtype, others):
        logger.warning(
            f"weights stay as stored ({stored[0]}, {size_text(own)}), and every step makes numbers "
            f"of them, which is slow on a CPU: as {what} they would take {size_text(others)}, for "
            "which there is not enough memory beside the rest"
        )
        return stored
    logger.info(
        f"weights stored as {stored[0]} become {what} at load, {size_text(others)} in all; "
        f"--quantization {stored[0]} keeps their {size_text(own)}, of which every step would make "
        "numbers"
    )
    return chosen


def log_kept(source: Source, layouts: Layouts | None) -> None:
    """Say what of a source stays as it is stored, and what of it is not used."""
    if source.packed is not None:
        for line in describe_kept(source, layouts) if layouts else source.packed.notes:
            logger.info(line)


def numbers_of(weight: Quantised) -> np.ndarray:
    """What a weight stands for, float32 in the parameter's own shape."""
    parts = jax.tree.map(np.asarray, weight)
    layout, shape = weight.layout, weight.shape
    whole = np.empty(shape, np.float32)

    def matrix(at: Any) -> np.ndarray:
        def by_row(array: Any) -> Any:
            return None if array is None else array[at].T

        def values(array: np.ndarray) -> np.ndarray:
            own = array[at]
            rows = int(np.prod(own.shape[: -weight.inputs]))
            return own.reshape(rows, -1)

        scales, zeros = by_row(parts.scales), by_row(parts.zeros)
        made = numbers(Rounded(values(parts.values), scales, None, zeros, parts.order), layout)
        if parts.low is not None:
            made += numbers(Rounded(values(parts.low), scales / np.float32(PAIR)), layout)
        return made

    for at in range(shape[0]) if weight.experts else [...]:
        whole[at] = matrix(at).reshape(whole[at].shape)
    return whole


def with_numbers(
    params: Tree, specs: Tree, layouts: Layouts | None, put: Callable[[Any, ParamSpec], Any]
) -> Tree:
    """Restored parameters of the plain `specs`, those that `layouts` does not name as numbers that
    went through `put`; one by one, so that what they are made of goes as they come."""
    is_weight = lambda leaf: isinstance(leaf, Quantised)  # noqa: E731
    flat = jax.tree.leaves(params, is_leaf=is_weight)
    structure = jax.tree.structure(params, is_leaf=is_weight)
    del params
    for i, (path, spec) in enumerate(named_leaves(specs)):
        if isinstance(flat[i], Quantised) and path not in (layouts or {}):
            flat[i] = put(numbers_of(flat[i]), spec)
    return jax.tree.unflatten(structure, flat)
