"""What a step computes: its static side, and where its tokens go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxinfer.config import ModelConfig
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.kv_pool import KVGroup
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped_matmul import Implementation as Grouped


@dataclass(frozen=True, slots=True)
class StepModel:
    """The static side of a step: what is computed, how attention is, and over which devices.

    `sampling`: how the sampler's thresholds are found.
    `cpu_heads`: what the CPU's kernel of decode attention is made for; None: XLA attends.
    `attention_block`: keys that attention takes at once; None: what is fastest for the rows.
    `experts`: what multiplies with experts' matrices; None: XLA, in the platform's form.
    """

    config: ModelConfig
    groups: tuple[KVGroup, ...]
    attention: Implementation
    mesh: Mesh | None = None
    attention_block: int | None = None
    experts: Grouped | None = None
    sampling: Implementation = "reference_static"
    cpu_heads: Heads | None = None

    def group_of(self, layer: int) -> int:
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)


class Placement(NamedTuple):
    """Where the tokens of a step go in one KV group, and what attention needs to know."""

    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]
    table: Int[Array, "N W"]
    decode_table: Int[Array, "S W"]
    kv_lens: Int[Array, " S"]
    tiles: Int[Array, "tiles 4"] | None
