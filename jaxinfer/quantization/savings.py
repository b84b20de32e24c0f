"""What quantised weights buy: bytes, and the room for keys and values that they leave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxinfer.kv_pool import KVGroup, pages_for
from jaxinfer.memory_plan import MemoryPlan
from jaxinfer.params import Tree, named_leaves, param_bytes
from jaxinfer.sharding import sharding_of
from jaxinfer.sizes import size_text


@dataclass(frozen=True, slots=True)
class Savings:
    """Bytes on one device: of weights, and of the memory left for KV pages, with and without.

    `token_bytes` are of a token in all layers that keep it, as a full sequence has them on average;
    `length` is of one.
    """

    quantization: str
    weights: int
    plain_weights: int
    room: int
    plain_room: int
    token_bytes: int
    length: int

    def lines(self) -> list[str]:
        """In words, for logs and tables."""
        saved = self.plain_weights - self.weights
        return [
            f"quantization {self.quantization}: weights {size_text(self.weights)} instead of "
            f"{size_text(self.plain_weights)}, {size_text(saved)} saved",
            f"room for KV: {self._room(self.room)}; without quantization {self._plain_room()}",
        ]

    def _room(self, room: int) -> str:
        tokens = room // self.token_bytes
        full = f"{tokens / self.length:.1f} sequences at the full {self.length} tokens"
        return f"{size_text(room)} = {tokens} tokens, {full}"

    def _plain_room(self) -> str:
        if self.plain_room <= 0:
            return f"none: {size_text(-self.plain_room)} would be missing"
        return self._room(self.plain_room)

    def to_json(self) -> dict[str, Any]:
        full = self.token_bytes * self.length
        return {
            "quantization": self.quantization,
            "weights_bytes": [self.plain_weights, self.weights],
            "kv_room_bytes": [self.plain_room, self.room],
            "full_length_sequences": [round(r / full, 1) for r in (self.plain_room, self.room)],
        }


def savings(
    quantization: str,
    plan: MemoryPlan,
    groups: tuple[KVGroup, ...],
    max_model_len: int,
    plain_weights: int,
    plain_workspace: int,
) -> Savings:
    """Of a plan with quantised weights, against weights and workspace without."""
    used = plan.weights_bytes + plan.slot_bytes + plan.workspace_bytes + plan.transfer_bytes
    plain = plain_weights + plan.slot_bytes + plain_workspace + plan.transfer_bytes
    pool = sum(group.num_pages * group.page_bytes for group in groups)
    pages = [group.pages_of(max_model_len) * group.page_bytes for group in groups]
    token_bytes = sum(pages) / (pages_for(max_model_len, groups[0].page_size) * groups[0].page_size)
    on_one = math.ceil(token_bytes * plan.pool_bytes / pool)  # heads are divided over devices
    return Savings(
        quantization,
        plan.weights_bytes,
        plain_weights,
        plan.usable_bytes - used,
        plan.usable_bytes - plain,
        on_one,
        max_model_len,
    )


def weights_on_one(specs: Tree, dtype: str, mesh: Mesh | None) -> int:
    """Bytes that parameters of these specs take on one device."""
    if mesh is None:
        return param_bytes(specs, dtype)
    return sum(
        math.prod(sharding_of(spec, mesh).shard_shape(spec.shape))
        * spec.resolve_dtype(dtype).itemsize
        for _, spec in named_leaves(specs)
    )
