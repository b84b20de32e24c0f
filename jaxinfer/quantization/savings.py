"""What weights and pages of fewer bytes buy: room for keys and values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_pool import KVGroup, kv_groups, pages_for
from jaxinfer.memory_plan import MemoryPlan, workspace_bytes
from jaxinfer.models import family_of
from jaxinfer.params import Tree, named_leaves, param_bytes
from jaxinfer.quantization.kinds import NONE
from jaxinfer.sharding import sharding_of
from jaxinfer.sizes import size_text


@dataclass(frozen=True, slots=True)
class Savings:
    """Bytes on one device, as served and plain, which is with weights and pages of the model's
    dtype: of weights, of the memory left for KV pages, and of a token in all layers.

    Of a token: as a full sequence, of `length` tokens, has them on average.
    """

    quantization: str
    pages: str
    weights: int
    plain_weights: int
    room: int
    plain_room: int
    token_bytes: int
    plain_token_bytes: int
    length: int

    def lines(self) -> list[str]:
        """In words, for logs and tables."""
        without, lines = [], []
        if self.quantization != NONE:
            without.append("quantization")
            lines.append(
                f"quantization {self.quantization}: weights {size_text(self.weights)} instead of "
                f"{size_text(self.plain_weights)}, "
                f"{size_text(self.plain_weights - self.weights)} saved"
            )
        if self.token_bytes != self.plain_token_bytes:
            without.append(f"{self.pages} pages")
            lines.append(
                f"KV pages {self.pages}: {size_text(self.token_bytes)} a token instead of "
                f"{size_text(self.plain_token_bytes)}"
            )
        plain = f"none: {size_text(-self.plain_room)} would be missing"
        if self.plain_room > 0:
            plain = self._room(self.plain_room, self.plain_token_bytes)
        room = self._room(self.room, self.token_bytes)
        return [*lines, f"room for KV: {room}; without {' and '.join(without)} {plain}"]

    def _room(self, room: int, token_bytes: int) -> str:
        tokens = room // token_bytes
        full = f"{tokens / self.length:.1f} sequences at the full {self.length} tokens"
        return f"{size_text(room)} = {tokens} tokens, {full}"

    def to_json(self) -> dict[str, Any]:
        """Pairs are (plain, as served)."""
        per_token = (self.plain_token_bytes, self.token_bytes)
        rooms = (self.plain_room, self.room)
        return {
            "quantization": self.quantization,
            "kv_dtype": self.pages,
            "weights_bytes": [self.plain_weights, self.weights],
            "kv_bytes_per_token": list(per_token),
            "kv_room_bytes": list(rooms),
            "full_length_sequences": [
                round(room / (size * self.length), 1) for room, size in zip(rooms, per_token)
            ],
        }


def savings(
    model: ModelConfig,
    config: EngineConfig,
    plan: MemoryPlan,
    groups: tuple[KVGroup, ...],
    max_model_len: int,
    mesh: Mesh | None = None,
) -> Savings | None:
    """Of a plan for `config`, whose kind of weights is chosen; None where nothing is saved."""
    quantization = config.quantization or NONE
    plain_groups = kv_groups(model, 1, config.page_size, config.dtype)
    pool = sum(group.num_pages * group.page_bytes for group in groups)

    def token_bytes(groups: tuple[KVGroup, ...]) -> int:
        """Of a full sequence's tokens in the mean, on one device: heads are divided over them."""
        pages = sum(group.pages_of(max_model_len) * group.page_bytes for group in groups)
        tokens = pages_for(max_model_len, config.page_size) * config.page_size
        return math.ceil(pages / tokens * plan.pool_bytes / pool)

    if quantization == NONE and token_bytes(groups) >= token_bytes(plain_groups):
        return None
    weights = weights_on_one(family_of(model.family).param_specs(model), config.dtype, mesh)
    plain_config = dataclasses.replace(config, quantization=NONE)
    workspace = workspace_bytes(model, plain_config, jnp.dtype(config.dtype).itemsize)
    kept = plan.slot_bytes + plan.transfer_bytes
    return Savings(
        quantization,
        config.pages,
        plan.weights_bytes,
        weights,
        plan.usable_bytes - plan.weights_bytes - plan.workspace_bytes - kept,
        plan.usable_bytes - weights - workspace - kept,
        token_bytes(groups),
        token_bytes(plain_groups),
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
