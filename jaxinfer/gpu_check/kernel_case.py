"""A kernel with one model's shapes, and what must hold of the code it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.sharding import replicated

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What to compile.

    Attributes:
        kernel: what it computes, "attention, decode".
        case: whose shapes these are; with `kernel` it names the case.
        shape: the shapes in words, for the table.
        lower: lowers the kernel's program for the devices of a mesh.
        entry: how the kernel's name begins in the compiler's output.
        oldest: the compute capability it needs.
        newest: the last compute capability that it is for, if any.
        tensor_cores: whether its products must be on tensor cores.
        instructions: how instructions begin that must be in its code besides.
    """

    kernel: str
    case: str
    shape: str
    lower: Callable[[Mesh], Any]
    entry: str
    oldest: Capability = (8, 0)
    newest: Capability | None = None
    tensor_cores: bool = True
    instructions: tuple[str, ...] = ()

    def runs_on(self, capability: Capability) -> bool:
        """Whether GPUs of this compute capability have the kernel."""
        return self.oldest <= capability and (self.newest is None or capability <= self.newest)


def abstract(mesh: Mesh, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An array that every device of the mesh has whole."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))
