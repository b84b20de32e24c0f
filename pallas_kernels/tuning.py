"""Sizes of blocks that were measured to be fastest on a kind of GPU: what `tuned.json` says.

A kernel has a rule that chooses its sizes from shapes. For shapes that the table has an entry of,
on the device at hand, the entry wins. So what is chosen follows from shapes, device and file alone.
The table is filled by `scripts/gpu_check --device`; it may well be empty.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

FILE = Path(__file__).with_name("tuned.json")


class Tiling(NamedTuple):
    """How a kernel is cut for the device.

    Attributes:
        rows / columns: of one block: of attention, query rows and keys; of a product, rows and
            columns of the result.
        warps: of one program.
        stages: of the pipeline of loads.
        depth: of a product, entries of the inner dimension in one turn; 0: not cut so.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0


# device kind -> kernel -> shape -> sizes by field of `Tiling`
Table = dict[str, dict[str, dict[str, dict[str, int]]]]


def choose(kernel: str, shape: str, rule: Tiling) -> Tiling:
    """The sizes for a kernel and a shape, both by name, on the device at hand: the table's, else
    the `rule`'s.

    Raises ValueError for an entry that is no tiling.
    """
    found = table().get(device_kind(), {}).get(kernel, {}).get(shape)
    return rule if found is None else tiling(found)


@functools.cache
def table() -> Table:
    """What the file says. Raises ValueError where it is no table."""
    return read(FILE)


def read(file: Path) -> Table:
    """The table in a file. Raises ValueError saying what is wrong with it."""
    try:
        found = json.loads(file.read_text())
        for kernels in found.values():
            for shapes in kernels.values():
                for sizes in shapes.values():
                    tiling(sizes)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no table of block sizes: {error}") from error
    return found


def tiling(sizes: dict[str, Any]) -> Tiling:
    """An entry of the table. Raises ValueError for fields and values that no tiling has."""
    if not {"rows", "columns", "warps", "stages"} <= set(sizes) <= set(Tiling._fields):
        raise ValueError(f"{sizes} has not the fields {', '.join(Tiling._fields)}")
    for name, size in sizes.items():
        if type(size) is not int or size < (0 if name == "depth" else 1):
            raise ValueError(f"{name} is {size!r}; it must be a positive integer")
    return Tiling(**sizes)


def device_kind() -> str:
    """What the device that a kernel is traced for calls itself."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
