"""Where an engine uses kernels for this CPU, and what it has to have in place for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import jax

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.cpu_kernels.compiler import Vectors, vectors
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.panels import STORED
from jaxinfer.cpu_kernels.prepare import in_panels
from jaxinfer.kv_pool import KVGroup
from jaxinfer.models import family_of
from jaxinfer.program_store import cpus
from jaxinfer.step_plan import TILE_ROWS

if TYPE_CHECKING:
    from jaxinfer.checkpoints import LoadedModel

logger = logging.getLogger(__name__)
FLOAT_BYTES = 4


def vectors_for(config: EngineConfig) -> Vectors | None:
    """What kernels compute with; None where XLA is left to itself."""
    alone = jax.default_backend() == "cpu" and config.tensor_parallel_size == 1
    found = vectors() if alone and config.cpu_kernels else None
    if found is None:
        return None
    from jaxinfer.cpu_kernels.xla_call import speaks  # which needs LLVM

    return found if speaks() else None


def prepare_weights(model: LoadedModel, config: EngineConfig) -> None:
    """Put weights in the form that kernels read, in the place of their arrays."""
    found = vectors_for(config)
    if found is None:
        return
    from jaxinfer.cpu_kernels import matmul  # which needs LLVM

    specs = family_of(model.config.family).param_specs(model.config)
    for dtype, count in in_panels(model.params, specs, found).items():
        matmul.register(dtype)  # before programs that call it are loaded
        width = f"{found.lanes} numbers a register"
        logger.info(f"{count} {dtype} weights are multiplied by kernels for this CPU, {width}")


def attention_heads(config: EngineConfig, model: ModelConfig, group: KVGroup) -> Heads | None:
    """What the kernels of attention are made for, and have to be there; None: XLA attends."""
    heads = _heads(config, model, group)
    if heads is None:
        return None
    from jaxinfer.cpu_kernels import attention  # which needs LLVM

    attention.register_decode(heads)  # before programs that call them are loaded
    attention.register_prefill(heads)
    return heads


def attention_scratch(config: EngineConfig, model: ModelConfig, group: KVGroup) -> int:
    """Bytes that prefill attention takes beside XLA's temporaries: a tile's in each thread."""
    heads = _heads(config, model, group)
    if heads is None:
        return 0
    floats = TILE_ROWS * heads.group * heads.floats_of_row + heads.floats_of_page
    return FLOAT_BYTES * floats * max(cpus(), jax.device_count())


def _heads(config: EngineConfig, model: ModelConfig, group: KVGroup) -> Heads | None:
    plain = group.dtype in STORED and group.value_dim is None
    if vectors_for(config) is None or not plain:
        return None
    cap = model.attention_soft_cap or 0.0
    heads = Heads(model.group_size, *group.dims, group.page_size, cap, group.dtype)
    return heads if heads.taken else None
