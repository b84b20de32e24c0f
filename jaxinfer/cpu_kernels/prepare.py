"""A model's parameters with panels in the place of weights, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cpu_kernels.compiler import Vectors
from jaxinfer.cpu_kernels.integer_panels import IntegerPanels, takes
from jaxinfer.cpu_kernels.panels import STORED, Panels, packed
from jaxinfer.host_memory import give_back_freed_memory
from jaxinfer.params import ParamSpec, Tree, is_spec
from jaxinfer.quantization.weight import Quantised


def in_panels(params: Tree, specs: Tree, vectors: Vectors) -> Counter[str]:
    """Put the weights of products, but for those of experts, into panels, if they are numbers or a
    kernel takes their integers; how many there were of each dtype.

    One after the other in its place, so that both are in memory of one weight only.
    """
    counts = Counter[str]()
    with ThreadPoolExecutor() as threads:
        for place, key, spec in _places(params, specs):
            weight = place[key]
            if not spec.inputs or spec.axes[0] == "experts":
                continue
            if isinstance(weight, jax.Array) and weight.dtype.name in STORED:
                matrix = np.asarray(weight).reshape(-1, math.prod(spec.shape[-spec.inputs :]))
                del weight
                place[key] = Panels(packed(matrix, vectors.panel, threads), spec.shape)
                counts[matrix.dtype.name] += 1
            elif isinstance(weight, Quantised) and takes(weight, vectors):
                place[key] = IntegerPanels.of(weight, vectors.panel, threads)
                counts["int8"] += 1
    give_back_freed_memory()
    return counts


def without_panels(params: Tree) -> Tree:
    """A tree of its own in which weights are in the place of panels."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, IntegerPanels):
            return leaf.weight()
        return jnp.asarray(leaf.array()) if isinstance(leaf, Panels) else leaf

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Panels | IntegerPanels))


def _places(params: Tree, specs: Tree) -> Iterator[tuple[Any, Any, ParamSpec]]:
    """The dict or list and the key in it of every parameter, and its spec."""
    for key in specs if isinstance(specs, dict) else range(len(specs)):
        if is_spec(specs[key]):
            yield params, key, specs[key]
        else:
            yield from _places(params[key], specs[key])
