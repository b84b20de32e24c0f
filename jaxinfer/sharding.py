"""Logical axes → rules → mesh axes: how parameters, KV pools and slot state lie on the devices.

Models name logical axes only. Rules map each to a mesh axis or to None (replicated). Mesh axes are
of type Auto: the compiler places the collectives, and `scripts/gpu_check` asserts which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.params import ParamSpec, Tree, is_spec, named_leaves

MESH_AXES = ("data", "stage", "model", "expert")

Rules = Mapping[str, str | None]
DEFAULT_RULES: Rules = MappingProxyType(
    {
        "batch": "data",
        "heads": "model",
        "kv_heads": "model",
        "mlp": "model",
        "vocab": "model",
        "experts": "expert",
        "embed": None,  # the residual stream is whole on every device
    }
)
POOL_AXES = (None, "kv_heads")  # [pages, kv_heads, ...], of pages and of their scales
LATENT_AXES = (None, None)  # of pages that all heads share


class ShardingError(ValueError):
    """Arrays that cannot be laid over the mesh as the rules say."""


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int = 1) -> Mesh:
    """A mesh of all four axes over the first `tensor_parallel_size` devices, all on `model`.

    Raises ShardingError when there are fewer devices.
    """
    if not 1 <= tensor_parallel_size <= len(devices):
        count = len(devices)
        there = f"are {count} devices; choose 1 to {count}"
        if count == 1:
            there = "is 1 device; leave it at 1"
        raise ShardingError(f"tensor_parallel_size = {tensor_parallel_size}, but there {there}")
    shape = tuple(tensor_parallel_size if axis == "model" else 1 for axis in MESH_AXES)
    grid = np.array(devices[:tensor_parallel_size], dtype=object).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(axes: Sequence[str | None], rules: Rules = DEFAULT_RULES) -> PartitionSpec:
    """The mesh axis of each dimension.

    Raises ShardingError for a logical axis without a rule, and for two dimensions that the rules
    put on one mesh axis.
    """
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ShardingError(f"logical axis {axis!r} has no rule; known: {', '.join(rules)}")
    placed = [None if axis is None else rules[axis] for axis in axes]
    taken = [axis for axis in placed if axis is not None]
    if len(set(taken)) != len(taken):
        raise ShardingError(f"logical axes {tuple(axes)} collide on mesh axes {tuple(taken)}")
    return PartitionSpec(*placed)


def sharding_of(
    spec: ParamSpec,
    mesh: Mesh | AbstractMesh,
    rules: Rules = DEFAULT_RULES,
    name: str = "parameter",
) -> NamedSharding:
    """Where one parameter lies. Raises ShardingError naming it when an axis does not divide."""
    return _shard(spec.shape, spec.axes, mesh, rules, name)


def param_shardings(specs: Tree, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES) -> Tree:
    """A tree of NamedShardings like `specs`. Raises ShardingError naming the parameter by path."""
    shardings = [sharding_of(spec, mesh, rules, name) for name, spec in named_leaves(specs)]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), shardings)


def pool_sharding(
    layer_shape: tuple[int, int, int, int],
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str | None] = POOL_AXES,
    rules: Rules = DEFAULT_RULES,
) -> NamedSharding:
    """Where a KV pool [pages, kv_heads, page_size, head_dim] lies: by key/value head.

    Raises ShardingError when the heads do not divide over the mesh axis.
    """
    return _shard(layer_shape, axes, mesh, rules, "KV pool")


def constrain(tree: Tree, mesh: Mesh | None, *axes: str | None) -> Tree:
    """Inside a program: its arrays lie where the logical `axes` say; none: whole on every device.

    A program that hands its state to the next one pins it, or the compiler may choose a layout
    that the next program was not compiled for. Without a mesh there is nothing to do.
    """
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, partition_spec(axes)))


def on_each_device(
    body: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`body`, run by every device of the mesh for its parts of arrays: kernels are opaque to the
    compiler's partitioner. Without a mesh it is the same."""
    if mesh is None:
        return body
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device: slot state, step inputs and logits."""
    return NamedSharding(mesh, PartitionSpec())


def _shard(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    rules: Rules,
    name: str,
) -> NamedSharding:
    try:
        placed = partition_spec(axes, rules)
    except ShardingError as error:
        raise ShardingError(f"{name}: {error}") from None
    for size, axis, mesh_axis in zip(shape, axes, placed):
        if mesh_axis is None:
            continue
        if mesh_axis not in mesh.shape:
            raise ShardingError(
                f"{name}: axis {axis!r} goes to {mesh_axis!r}, which is no axis of the mesh "
                f"{tuple(mesh.axis_names)}"
            )
        if size % (ways := mesh.shape[mesh_axis]):
            raise ShardingError(
                f"{name}: axis {axis!r} of size {size} does not divide over the {ways} devices of "
                f"mesh axis {mesh_axis!r}; choose a parallel size that divides {size}"
            )
    return NamedSharding(mesh, placed)
