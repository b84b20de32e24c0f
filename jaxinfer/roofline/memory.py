"""The engine's memory plan for a device that is not there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_pool import KVGroup, kv_groups, pages_for
from jaxinfer.memory_plan import MemoryPlan, plan_memory
from jaxinfer.models import family_of
from jaxinfer.page_dtypes import in_8_bits
from jaxinfer.params import named_leaves
from jaxinfer.roofline.devices import Device
from jaxinfer.roofline.step import Serving, attention_shape, matrix_of
from jaxinfer.slot_state import empty_history, empty_options, empty_slots


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """What the engine would plan, on one device.

    Attributes:
        kv_bytes_per_token: of all layers, for a token that every layer still keeps.
        page_ratio: tokens that a page holds, times those of the groups' page size: above 1 for
            pages of a type that the engine does not serve.
        not_served: in words, what of it the engine cannot do today; "" when nothing.
    """

    memory: MemoryPlan
    groups: tuple[KVGroup, ...]
    max_model_len: int
    kv_bytes_per_token: int
    page_ratio: float = 1.0
    not_served: str = ""

    @property
    def capacity(self) -> int:
        """Tokens of the pool of layers that keep the most of a sequence."""
        return int(self.groups[0].capacity * self.page_ratio)

    def fits(self, batch: int, context: int) -> bool:
        """Whether so many sequences of that length are in the pool at once."""
        return all(
            batch * (context if group.window is None else group.pages_of(context) * group.page_size)
            <= group.capacity * self.page_ratio
            for group in self.groups
        )


def weights_bytes(model: ModelConfig, serving: Serving) -> int:
    """Bytes of the parameters on one device.

    Raises ShardingError when the model does not divide over the devices.
    """
    total = 0
    for path, spec in named_leaves(family_of(model.family).param_specs(model)):
        name = path.rpartition(".")[2]
        shape, storage = serving.shard(spec, path), serving.storage_of(spec)
        if storage is None:
            total += math.prod(shape) * spec.resolve_dtype(serving.dtype).itemsize
        else:
            total += storage.weight_bytes(*matrix_of(name, shape))
    return total


def kv_bytes_per_token(model: ModelConfig, serving: Serving) -> int:
    """Bytes of one token in the pool of one device, scales of quantised pages included."""
    kinds = (model.kind(i) for i in range(model.num_layers))
    return sum(attention_shape(model, kind, serving).token_bytes for kind in kinds)


def plan_on_paper(
    model: ModelConfig, engine: EngineConfig, serving: Serving, device: Device
) -> PaperPlan:
    """Divide a device's memory as the engine does at its start, which it is not there for.

    Types of pages that the engine does not serve are planned as bfloat16 ones, and hold as many
    more tokens as they are smaller. Raises MemoryPlanError when it does not fit.
    """
    max_model_len = engine.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model allows at most {model.max_position}"
        )
    served_pages = model.mla is None or not in_8_bits(serving.pages)
    kv_dtype = serving.pages if served_pages else "bfloat16"
    config = dataclasses.replace(
        engine,
        dtype=serving.dtype,
        kv_dtype=kv_dtype,
        page_size=serving.page_size,
        tensor_parallel_size=serving.gpus,
    )
    weights, slots = weights_bytes(model, serving), _slot_bytes(model, config, max_model_len)
    memory, groups = plan_memory(model, config, max_model_len, weights, slots, device)  # type: ignore[arg-type]
    per_token = kv_bytes_per_token(model, serving)
    plain = kv_bytes_per_token(model, dataclasses.replace(serving, kv_dtype=kv_dtype))
    ratio, not_served = plain / per_token, "" if served_pages else f"{serving.pages} pages"
    return PaperPlan(memory, groups, max_model_len, per_token, ratio, not_served)


def _slot_bytes(model: ModelConfig, config: EngineConfig, max_model_len: int) -> int:
    """Bytes of what the engine remembers of its slots beside the pool."""
    groups = len(kv_groups(model, 1, config.page_size, config.dtype))
    widths = (pages_for(max_model_len, config.page_size),) * groups

    def make() -> Any:
        return (
            empty_slots(config.max_num_seqs, widths),
            empty_options(config.max_num_seqs, model.vocab_size),
            empty_history(config.max_num_seqs, model.vocab_size),
        )

    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(make))
    )
