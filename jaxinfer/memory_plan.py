"""What the engine promises about memory before it serves: weights, pool, workspace, all named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import psutil

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_pool import (
    KVGroup,
    host_pages_for,
    kv_groups,
    least_pages,
    on_platform,
    pages_for,
    pages_that_fit,
    within_reach,
)
from jaxinfer.models import family_of
from jaxinfer.page_transfer import BATCH, MOST_BATCHES
from jaxinfer.params import named_leaves
from jaxinfer.platform import allocator_fraction
from jaxinfer.quantization.kinds import KINDS, NONE, Kind
from jaxinfer.sizes import size_text
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_plan import MAX_PIECES, SCORED_ROWS
from pallas_kernels.dispatch import MOST_BYTES, MOST_ELEMENTS

CPU_POOL_BYTES = 2 << 30  # a host's memory is shared with others: take a fixed, modest pool
WORKSPACE_SLACK = 64 << 20


class Device(Protocol):
    """What is planned for: one of JAX's, or one that is not there."""

    @property
    def platform(self) -> str: ...
    def memory_stats(self) -> Mapping[str, Any] | None: ...


class MemoryPlanError(ValueError):
    """The model does not fit, or leaves no room for one full-length sequence."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device. `workspace` bounds the largest program's temporaries and logits.

    With offloading, `transfer` bounds the pages on their way, and `host` is the host's memory that
    holds pages of preempted sequences. `chunk_tokens` are those of prompts in a step. `unreached`
    are of pages that would fit, but beyond what kernels reach.
    """

    device_bytes: int
    usable_bytes: int
    weights_bytes: int
    slot_bytes: int
    workspace_bytes: int
    pool_bytes: int
    transfer_bytes: int = 0
    host_bytes: int = 0
    chunk_tokens: int = 0
    unreached_bytes: int = 0

    def lines(self, groups: tuple[KVGroup, ...], max_model_len: int) -> list[str]:
        """The start-up report: what takes the memory and what the pool holds."""
        offload = [
            f"offloading: {size_text(self.host_bytes)} of host memory for pages, "
            f"{size_text(self.transfer_bytes)} for those on their way"
        ]
        unreached = [
            f"KV pool: {size_text(self.unreached_bytes)} more would fit, but kernels reach "
            f"{size_text(MOST_ELEMENTS)} of a layer's keys in 8 bits unless there are over "
            f"{size_text(MOST_BYTES)}"
        ]
        return [
            f"memory: {size_text(self.device_bytes)} on the device, "
            f"{size_text(self.usable_bytes)} usable",
            f"weights {size_text(self.weights_bytes)}, KV pool {size_text(self.pool_bytes)}, "
            f"slot state {size_text(self.slot_bytes)}, "
            f"workspace {size_text(self.workspace_bytes)}",
            *self._capacity(groups, max_model_len),
            *(unreached if self.unreached_bytes else []),
            *(offload if self.host_bytes else []),
        ]

    def _capacity(self, groups: tuple[KVGroup, ...], max_model_len: int) -> Iterator[str]:
        """What each group of the pool holds, and how many full sequences that makes."""
        sequences = [self.sequences_in(group, max_model_len) for group in groups]
        for group, count in zip(groups, sequences):
            number = len(group.layers)
            layers = "" if len(groups) == 1 else f" for {number} layer{'s' * (number > 1)}"
            what = f"the full {max_model_len}"
            if group.window is not None and group.window < max_model_len:
                what = f"a window of {group.window}"
            yield (
                f"KV pool{layers}: {group.num_pages - 1} pages of {group.page_size} tokens = "
                f"{group.capacity} tokens, {count:.1f} sequences at {what} tokens"
            )
        if len(groups) > 1:
            yield f"KV pool: {min(sequences):.1f} sequences at the full {max_model_len} tokens"

    def sequences_in(self, group: KVGroup, length: int) -> float:
        """Sequences of `length` tokens that a group holds at once, beside a chunk on its way."""
        pages = group.num_pages - 1
        if group.window is None:
            return group.capacity / length
        (least,) = least_pages((group,), length, self.chunk_tokens)
        return 1 + (pages + 1 - least) / group.pages_of(length)


def device_memory(device: Device) -> tuple[int, int]:
    """Bytes the device has (for a CPU: the host) and bytes of it that may be allocated."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if not stats:
        total = psutil.virtual_memory().total
        return total, total
    return int(stats["bytes_limit"] / allocator_fraction()), stats["bytes_limit"]


def workspace_bytes(
    model: ModelConfig, config: EngineConfig, itemsize: int, made: int | None = None
) -> int:
    """Bound on a program's temporaries (twice the logits, twice the widest activation, slack) and
    on what goes from one program to the next: logits, with what `forbid` leaves of them, and a
    chunk's last activations, twice.

    Quantised weights: as many of both as products are made of; and `made`, the bytes of the largest
    matrix that XLA makes numbers of to multiply with it (None: as the kind has it).
    """
    rows = config.max_num_seqs + config.max_num_batched_tokens
    kind = KINDS.get(config.quantization or NONE)
    widest, products = widest_activation(model), kind.products if kind else 1
    if made is None:
        made = _largest_made(model, kind, itemsize) if kind else 0
    logits = 4 * model.vocab_size * max(config.max_num_seqs + MAX_PIECES, SCORED_ROWS)
    values = 2 * products * rows * widest * max(itemsize, 4)
    hidden = 2 * config.max_num_batched_tokens * model.hidden_size * itemsize
    return (2 + 2 * products) * logits + values + hidden + made + WORKSPACE_SLACK


def _largest_made(model: ModelConfig, kind: Kind, itemsize: int) -> int:
    if not kind.dequantised:
        return 0
    shapes = [
        spec.shape[spec.axes[0] == "experts" :]
        for _, spec in named_leaves(family_of(model.family).param_specs(model))
        if spec.inputs and (kind.vocabulary or spec.axes[0] != "vocab")
    ]
    return max(map(math.prod, shapes)) * (itemsize if kind.layout.values == "int8" else 4)


def widest_activation(model: ModelConfig, ways: int = 1) -> int:
    """Values of a token's widest activation on one of `ways` devices."""
    widths = [
        2 * model.intermediate_size // ways,
        (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // ways,
        model.hidden_size,
    ]
    if model.value_dim:  # every head's query is as wide as a latent, and so is what it gives
        widths.append(model.num_heads * (2 * model.head_dim + model.value_dim) // ways)
    if moe := model.moe:  # a row for each expert of a token
        widths.append(moe.top_k * (2 * moe.intermediate_size // ways + model.hidden_size))
    return max(widths)


def state_bytes(model: ModelConfig, config: EngineConfig, max_model_len: int) -> int:
    """Bytes of what is kept for every slot. Makes no array."""
    groups = kv_groups(model, 1, config.page_size, config.pages)
    widths = (pages_for(max_model_len, config.page_size),) * len(groups)
    slots = config.max_num_seqs
    state = jax.eval_shape(
        lambda: (
            empty_slots(slots, widths),
            empty_options(slots, model.vocab_size),
            empty_history(slots, model.vocab_size),
        )
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    weights_bytes: int,
    slot_bytes: int,
    device: Device,
    made: int | None = None,
    loaded: bool = True,
) -> tuple[MemoryPlan, tuple[KVGroup, ...]]:
    """Divide the device's memory. Raises MemoryPlanError naming what does not fit and what to do.

    With tensor parallelism the figures are of one device, over which heads are divided.
    `made`: see `workspace_bytes`. `loaded`: whether a host holds weights and slot state already.
    """
    kv_dtype = config.pages
    total, limit = device_memory(device)
    usable = min(int(total * config.memory_utilization), limit)
    if device.platform == "cpu":  # others use the host too; what is loaded is taken already
        available = psutil.virtual_memory().available
        available += weights_bytes + slot_bytes if loaded else 0
        usable = min(usable, available)
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    workspace = workspace_bytes(model, config, itemsize, made)
    host, batch = _offload_bytes(model, config, max_model_len)
    workspace, transfer = max(workspace, 2 * batch), 2 * MOST_BATCHES * batch
    if device.platform == "cpu":
        usable -= host
    room = usable - weights_bytes - slot_bytes - workspace - transfer
    taken = (
        f"{size_text(usable)} usable, weights {size_text(weights_bytes)}, slot state "
        f"{size_text(slot_bytes)}, workspace {size_text(workspace + transfer)}"
    )
    if config.kv_pool_bytes is None and room < 0:
        raise MemoryPlanError(
            f"{model.family} does not fit into {size_text(total)}: {taken}; raise "
            f"tensor_parallel_size, which is {config.tensor_parallel_size}, or lower max_num_seqs "
            "and max_num_batched_tokens"
        )
    wanted = config.kv_pool_bytes
    if wanted is None:
        wanted = min(room, CPU_POOL_BYTES) if device.platform == "cpu" else room
    if wanted > room:
        raise MemoryPlanError(
            f"a KV pool of {size_text(wanted)} does not fit: {taken} leave {size_text(room)}; "
            "lower the pool, max_num_seqs or max_num_batched_tokens"
        )
    shards, slots, page_size = _pool_shards(model, config), config.max_num_seqs, config.page_size
    groups = kv_groups(model, 1, page_size, kv_dtype)
    lengths = max_model_len, config.max_num_batched_tokens
    fit = pages_that_fit(groups, wanted * shards, slots, *lengths)
    pages = fit if device.platform == "cpu" else within_reach(groups, fit, shards)
    least = least_pages(groups, *lengths)
    if any(count < needed for count, needed in zip(pages, least)):
        needed = sum(count * group.page_bytes for count, group in zip(least, groups))
        raise MemoryPlanError(
            f"one sequence of max_model_len {max_model_len} needs {size_text(needed)} of KV pool, "
            f"{size_text(max(wanted, 0))} is there ({taken}); lower max_model_len or give the pool "
            "more memory"
        )
    groups = on_platform(kv_groups(model, pages, page_size, kv_dtype), device.platform)
    pool, fits = (
        sum(n * g.page_bytes for n, g in zip(counts, groups)) // shards for counts in (pages, fit)
    )
    plan = MemoryPlan(
        total, usable, weights_bytes, slot_bytes, workspace, pool, transfer, host, lengths[1],
        fits - pool,
    )  # fmt: skip
    return plan, groups


def _offload_bytes(model: ModelConfig, config: EngineConfig, length: int) -> tuple[int, int]:
    """Bytes of host memory for whole pages, and of one batch of pages on one device; (0, 0): off.

    Raises MemoryPlanError when the host has not as much, or it is less than one page.
    """
    asked = config.kv_offload_bytes
    if not asked:
        return 0, 0
    groups = kv_groups(model, 1, config.page_size, config.pages)
    counts = host_pages_for(groups, asked, length)
    host = sum(count * group.page_bytes for count, group in zip(counts, groups))
    available = psutil.virtual_memory().available
    if not 0 < host <= available:
        raise MemoryPlanError(
            f"kv_offload_bytes is {size_text(asked)}; it must hold one page of "
            f"{size_text(sum(group.page_bytes for group in groups))} at least and fit into the "
            f"{size_text(available)} of host memory that are free"
        )
    largest = max(group.page_bytes for group in groups) // _pool_shards(model, config)
    return host, BATCH * largest


def _pool_shards(model: ModelConfig, config: EngineConfig) -> int:
    """Devices that share a pool: latents are those of all heads, so each has them all."""
    return 1 if model.mla else config.tensor_parallel_size
