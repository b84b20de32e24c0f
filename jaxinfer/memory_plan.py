"""What the engine promises about memory before it serves: weights, pool, workspace, all named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import psutil

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_pool import KVGroup, host_pages_for, kv_groups, pages_for, pages_that_fit
from jaxinfer.models import family_of
from jaxinfer.page_transfer import BATCH, MOST_BATCHES
from jaxinfer.params import named_leaves
from jaxinfer.platform import allocator_fraction
from jaxinfer.quantization.kinds import KINDS, NONE
from jaxinfer.sizes import size_text
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_plan import MAX_PIECES, SCORED_ROWS

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
    holds pages of preempted sequences.
    """

    device_bytes: int
    usable_bytes: int
    weights_bytes: int
    slot_bytes: int
    workspace_bytes: int
    pool_bytes: int
    transfer_bytes: int = 0
    host_bytes: int = 0

    def lines(self, groups: tuple[KVGroup, ...], max_model_len: int) -> list[str]:
        """The start-up report: what takes the memory and what the pool holds."""
        offload = [
            f"offloading: {size_text(self.host_bytes)} of host memory for pages, "
            f"{size_text(self.transfer_bytes)} for those on their way"
        ]
        return [
            f"memory: {size_text(self.device_bytes)} on the device, "
            f"{size_text(self.usable_bytes)} usable",
            f"weights {size_text(self.weights_bytes)}, KV pool {size_text(self.pool_bytes)}, "
            f"slot state {size_text(self.slot_bytes)}, "
            f"workspace {size_text(self.workspace_bytes)}",
            *(_capacity(group, max_model_len, len(groups)) for group in groups),
            *(offload if self.host_bytes else []),
        ]


def _capacity(group: KVGroup, max_model_len: int, num_groups: int) -> str:
    """What one group of the pool holds."""
    kept = max_model_len if group.window is None else min(group.window, max_model_len)
    count = len(group.layers)
    layers = "" if num_groups == 1 else f" for {count} layer{'s' if count > 1 else ''}"
    what = f"the full {max_model_len}" if group.window is None else f"a window of {group.window}"
    return (
        f"KV pool{layers}: {group.num_pages - 1} pages of {group.page_size} tokens = "
        f"{group.capacity} tokens, {group.capacity / kept:.1f} sequences at {what} tokens"
    )


def device_memory(device: Device) -> tuple[int, int]:
    """Bytes the device has (for a CPU: the host) and bytes of it that may be allocated."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if not stats:
        total = psutil.virtual_memory().total
        return total, total
    return int(stats["bytes_limit"] / allocator_fraction()), stats["bytes_limit"]


def workspace_bytes(
    model: ModelConfig, config: EngineConfig, itemsize: int, by_kernels: bool = False
) -> int:
    """Bound on a program's temporaries (twice the logits, twice the widest activation, slack) and
    on what goes from one program to the next: logits, with what `forbid` leaves of them, and a
    chunk's last activations, twice.

    Quantised weights: as many of both as products are made of; where activations are not rounded,
    the largest matrix in their dtype, unless kernels multiply.
    """
    rows = config.max_num_seqs + config.max_num_batched_tokens
    widest, products, matrix = widest_activation(model), 1, 0
    if kind := KINDS.get(config.quantization or NONE):
        products = kind.products
        if not by_kernels and kind.dequantised:
            specs = named_leaves(family_of(model.family).param_specs(model))
            shapes = [
                spec.shape[spec.axes[0] == "experts" :]
                for _, spec in specs
                if spec.inputs and (kind.vocabulary or spec.axes[0] != "vocab")
            ]
            matrix = max(map(math.prod, shapes)) * (itemsize if kind.stored == "int8" else 4)
    logits = 4 * model.vocab_size * max(config.max_num_seqs + MAX_PIECES, SCORED_ROWS)
    values = 2 * products * rows * widest * max(itemsize, 4)
    hidden = 2 * config.max_num_batched_tokens * model.hidden_size * itemsize
    return (2 + 2 * products) * logits + values + hidden + matrix + WORKSPACE_SLACK


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
    groups = kv_groups(model, 1, config.page_size, config.kv_dtype or config.dtype)
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
    by_kernels: bool = False,
) -> tuple[MemoryPlan, tuple[KVGroup, ...]]:
    """Divide the device's memory. Raises MemoryPlanError naming what does not fit and what to do.

    With tensor parallelism the figures are of one device, over which heads are divided.
    `by_kernels`: no quantised weight is made numbers of to multiply with it.
    """
    kv_dtype = config.kv_dtype or config.dtype
    total, limit = device_memory(device)
    usable = min(int(total * config.memory_utilization), limit)
    if device.platform == "cpu":  # others use the host too; what is loaded is taken already
        available = psutil.virtual_memory().available + weights_bytes + slot_bytes
        usable = min(usable, available)
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    workspace = workspace_bytes(model, config, itemsize, by_kernels)
    host, batch = _offload_bytes(model, config, kv_dtype)
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
    on_all_devices = wanted * _pool_shards(model, config)
    slots, page_size = config.max_num_seqs, config.page_size
    pages = pages_that_fit(model, page_size, kv_dtype, on_all_devices, slots, max_model_len)
    needed = pages_for(max_model_len, page_size) + 1
    if min(pages) < needed:
        least = kv_groups(model, needed, page_size, kv_dtype)
        raise MemoryPlanError(
            f"one sequence of max_model_len {max_model_len} needs "
            f"{size_text(sum(needed * group.page_bytes for group in least))} of KV pool, "
            f"{size_text(max(wanted, 0))} is there ({taken}); lower max_model_len or give the pool "
            "more memory"
        )
    # More pages than all slots could ever fill would only cost memory.
    pages = tuple(min(count, (needed - 1) * slots + 1) for count in pages)
    groups = kv_groups(model, pages, config.page_size, kv_dtype)
    pool = sum(g.num_pages * g.page_bytes for g in groups) // _pool_shards(model, config)
    plan = MemoryPlan(total, usable, weights_bytes, slot_bytes, workspace, pool, transfer, host)
    return plan, groups


def _offload_bytes(model: ModelConfig, config: EngineConfig, kv_dtype: str) -> tuple[int, int]:
    """Bytes of host memory for whole pages, and of one batch of pages on one device; (0, 0): off.

    Raises MemoryPlanError when the host has not as much, or it is less than one page.
    """
    asked = config.kv_offload_bytes
    if not asked:
        return 0, 0
    groups = kv_groups(model, 1, config.page_size, kv_dtype)
    host = host_pages_for(groups, asked)[0] * sum(group.page_bytes for group in groups)
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
