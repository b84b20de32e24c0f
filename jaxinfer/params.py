"""Parameters are declared once, as a tree of `ParamSpec`.

Shape, sharding, init and restore derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

Init = Literal["normal", "ones", "zeros"]
Tree = Any  # nested dicts and lists whose leaves are ParamSpec or arrays


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its shape, logical axes (one name or None a dimension) and init.

    `inputs` is how many trailing axes products sum over: such a parameter may be quantised. 0: none
    do, or it has to stay as it is.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init = "normal"
    dtype: str | None = None  # None: the model's dtype
    inputs: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not name the dimensions of {self.shape}")

    def resolve_dtype(self, model_dtype: str) -> jnp.dtype:
        return jnp.dtype(self.dtype or model_dtype)


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def map_specs(fn: Callable[[ParamSpec], Any], specs: Tree) -> Tree:
    """Apply `fn` to every ParamSpec of a tree."""
    return jax.tree.map(fn, specs, is_leaf=is_spec)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) pairs, e.g. ("layers.3.qkv", ...), in tree order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec):
        yield ".".join(map(_key, path)), leaf


def _key(entry: Any) -> str:
    """A step of a path: the key of a dict, the place in a list, or the field of a node."""
    return str(next(getattr(entry, n) for n in ("key", "idx", "name") if hasattr(entry, n)))


def map_named_specs(fn: Callable[[str, ParamSpec], Any], specs: Tree) -> Tree:
    """Like `map_specs`; `fn` also gets the dotted path of `named_leaves`."""
    names = (name for name, _ in named_leaves(specs))
    return map_specs(lambda spec: fn(next(names), spec), specs)


def param_bytes(specs: Tree, dtype: str) -> int:
    """Bytes of all parameters in the model's dtype."""
    return sum(math.prod(s.shape) * s.resolve_dtype(dtype).itemsize for _, s in named_leaves(specs))


def init_params(specs: Tree, dtype: str, seed: int = 0) -> Tree:
    """Random parameters on the default device: tests, benchmarks and dummy loads."""
    keys = iter(jax.random.split(jax.random.key(seed), sum(1 for _ in named_leaves(specs))))

    def make(spec: ParamSpec) -> jax.Array:
        kind = spec.resolve_dtype(dtype)
        if spec.init == "ones":
            return jnp.ones(spec.shape, kind)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, kind)
        scale = spec.shape[-1] ** -0.5
        return (jax.random.normal(next(keys), spec.shape, jnp.float32) * scale).astype(kind)

    return map_specs(make, specs)


def abstract_params(specs: Tree, dtype: str, sharding_of: Callable[[ParamSpec], Any]) -> Tree:
    """ShapeDtypeStructs with shardings: what restore and ahead-of-time compilation take."""
    return map_specs(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.resolve_dtype(dtype), sharding=sharding_of(s)),
        specs,
    )
