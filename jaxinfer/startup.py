"""From a loaded model to a ready engine: plan memory, make the state, compile everything."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxinfer.compile_watch import CompileWatch
from jaxinfer.config import Determinism, EngineConfig, ModelConfig
from jaxinfer.cpu_kernels.choose import attention_heads, attention_scratch
from jaxinfer.determinism import ATTENTION_BLOCK, Build, choose
from jaxinfer.engine import Engine
from jaxinfer.expert_load import ExpertLoad
from jaxinfer.experts import choose_experts, largest_copied
from jaxinfer.host_memory import in_large_pages, keep_freed_memory
from jaxinfer.kv_pool import KVGroup, Pools, empty_pools, host_pages_for, kv_groups, pages_for
from jaxinfer.memory_plan import MemoryPlan, MemoryPlanError, plan_memory, state_bytes
from jaxinfer.models import family_of
from jaxinfer.page_dtypes import in_8_bits
from jaxinfer.page_transfer import PageTransfer
from jaxinfer.params import ParamSpec, Tree
from jaxinfer.paths import cache_dir
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.program_store import ProgramStore, describe_arrays
from jaxinfer.programs import (
    Programs,
    Progress,
    compile_programs,
    program_set,
    step_shapes,
)
from jaxinfer.quantization.kinds import KINDS, NONE
from jaxinfer.quantization.multipliers import with_multipliers
from jaxinfer.quantization.savings import savings
from jaxinfer.quantization.weight import largest_made, specs_of, widened
from jaxinfer.runner import Runner
from jaxinfer.scheduler import Scheduler
from jaxinfer.sharding import (
    make_mesh,
    param_shardings,
    pool_sharding,
    replicated,
    sharding_of,
)
from jaxinfer.sizes import size_text
from jaxinfer.slot_state import (
    History,
    Options,
    Slots,
    empty_history,
    empty_options,
    empty_slots,
)
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import StepShape
from jaxinfer.structure_check import vocabulary_of
from jaxinfer.token_masks import TokenMasks
from jaxinfer.validation import EngineLimits
from pallas_kernels import sampling_threshold
from pallas_kernels.dispatch import Body, Device, Implementation
from pallas_kernels.grouped_matmul import Implementation as Grouped
from pallas_kernels.paged_attention import choose_body

if TYPE_CHECKING:
    from jaxinfer.checkpoints import LoadedModel

logger = logging.getLogger(__name__)


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder: the next start only loads them."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    progress: Progress | None = None,
    guard_compiles: bool = False,
) -> Engine:
    """An engine with every program compiled; the report of memory and capacity goes to the log.

    Raises MemoryPlanError when it does not fit, ValueError for limits that contradict the model.
    """
    mesh = _mesh(config)
    if mesh is not None:
        use_compilation_cache()  # a single device has a ProgramStore, which JAX's cache would spoil
    max_model_len = _max_model_len(model.config, config)
    rope = model.config.rope.served(max_model_len)
    if rope.scaling == "longrope":
        logger.info(
            "RoPE: the factors of long contexts, for all lengths; --max-model-len "
            f"{rope.original_max_position} takes those of short ones"
        )
    served = dataclasses.replace(model.config, rope=rope)
    of_one_page = kv_groups(served, 1, config.page_size, config.pages)
    widths = (pages_for(max_model_len, config.page_size),) * len(of_one_page)
    slots = empty_slots(config.max_num_seqs, widths)
    options = empty_options(config.max_num_seqs, served.vocab_size)
    history = empty_history(config.max_num_seqs, served.vocab_size)
    params, device = model.params, jax.devices()[0]
    if mesh is not None:
        placement = param_shardings(_specs(params, served), mesh)
        params = jax.device_put(params, placement)  # moves nothing that was loaded in place
        slots, options, history = jax.device_put((slots, options, history), replicated(mesh))
    params, why = with_multipliers(params, _device(device), mesh)
    if why:
        logger.warning("weights are multiplied by XLA, not by kernels: %s (docs/kernels.md)", why)
    weights, kept = _bytes_on_one(params), _bytes_on_one((slots, options, history))
    made = largest_made(params) if device.platform == "cpu" or why else 0
    made += widened(params) if device.platform == "cpu" else 0
    experts = _experts(_device(device), served, config, params)
    if experts is not None and experts.why:
        what = "experts are computed by XLA, not by kernels: %s (docs/kernels.md)"
        logger.warning(what, experts.why)
        made = max(made, largest_copied(_specs(params, served), config.dtype))
    made += attention_scratch(config, served, of_one_page[0])
    memory, groups = plan_memory(served, config, max_model_len, weights, kept, device, made=made)
    for line in memory.lines(groups, max_model_len):
        logger.info(line)
    saved = savings(served, config, memory, groups, max_model_len, mesh)
    for line in saved.lines() if saved else ():
        logger.info(line)
    state = (params, _pools(groups, mesh), slots, options, history)
    if device.platform == "cpu":
        _use_large_pages(*state[:2])
    runner, determinism = _runner(served, config, groups, state, memory, mesh, progress)
    compiles = CompileWatch(guard_compiles)
    engine = Engine(
        _scheduler(config, groups, runner, determinism),
        runner,
        _limits(served, config, groups, max_model_len),
        overlap=config.overlap,
        memory=memory,
        compiles=compiles,
        clock=time.monotonic,
        experts=ExpertLoad.none_yet(served),
        masks=TokenMasks(
            served.vocab_size,
            functools.partial(vocabulary_of, model.tokenizer, served.vocab_size),
        ),
    )
    compiles.ready()
    return engine


def _pools(groups: tuple[KVGroup, ...], mesh: Mesh | None) -> Pools:
    place = mesh and pool_sharding(groups[0].layer_shape, mesh, groups[0].axes)
    return empty_pools(groups, place)


def _use_large_pages(params: Tree, pools: Pools) -> None:
    large = in_large_pages(jax.tree.leaves(params))
    in_large_pages(jax.tree.leaves(pools), at_once=False)
    if large:
        logger.info(f"{size_text(large)} of memory with weights are in large pages")


def _runner(
    model: ModelConfig,
    config: EngineConfig,
    groups: tuple[KVGroup, ...],
    state: tuple[Any, Any, Slots, Options, History],
    memory: MemoryPlan,
    mesh: Mesh | None,
    progress: Progress | None,
) -> tuple[Runner, Determinism]:
    """The runner with all its programs, held to the workspace that was planned for them."""
    started = time.monotonic()
    runner = Runner(Programs(), config.max_num_seqs, state)
    programs, build = runner.programs, _builder(runner, config, model, groups, mesh, progress)
    determinism: Determinism = "off"
    if config.deterministic:
        lengths = (config.max_num_batched_tokens, _max_model_len(model, config))
        kind = KINDS.get(config.quantization or NONE)
        rounds = kind is not None and kind.activations != "as_given"
        rounds = rounds or in_8_bits(config.pages)
        determinism = choose(runner, build, groups, *lengths, model.vocab_size, rounds)
    else:
        sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.page_size, len(groups))
        build(step_shapes(*sizes))
    if config.kv_offload_bytes:
        length = _max_model_len(model, config)
        host_pages = host_pages_for(groups, config.kv_offload_bytes, length)
        by_group = [(programs.read_pages[i], programs.write_pages[i]) for i in range(len(groups))]
        runner.transfer = PageTransfer(groups, host_pages, by_group)
    seconds, temporary = time.monotonic() - started, programs.temp_bytes
    logger.info(
        f"{len(programs.names)} programs ready in {seconds:.1f} s, "
        f"largest temporary {size_text(temporary)}"
    )
    handed = programs.handed_bytes(model, jax.numpy.dtype(config.dtype).itemsize)
    scratch = attention_scratch(config, model, groups[0])
    if temporary + scratch + handed > memory.workspace_bytes:
        raise RuntimeError(
            f"the largest program needs {temporary} bytes of temporaries and {scratch} in threads, "
            f"and hands over {handed}, more than the {memory.workspace_bytes} planned; "
            "lower max_num_batched_tokens or max_num_seqs"
        )
    return runner, determinism


def _builder(
    runner: Runner,
    config: EngineConfig,
    model: ModelConfig,
    groups: tuple[KVGroup, ...],
    mesh: Mesh | None,
    progress: Progress | None,
) -> Build:
    """What compiles the programs of some shapes, or loads them, into a runner's table."""
    block = ATTENTION_BLOCK if config.deterministic else None
    device = _device(jax.devices()[0])
    experts = _experts(device, model, config, runner.params)
    step_model = StepModel(
        model,
        groups,
        _attention(device, groups, config.dtype),
        mesh,
        block,
        experts=experts.implementation if experts else None,
        sampling=_sampling(device),
        cpu_heads=attention_heads(config, model, groups[0]),
    )
    state = (runner.params, runner.pools, runner.slots, runner.options, runner.history)
    store = None  # which keeps programs of a single device only
    if mesh is None:
        store = ProgramStore(cache_dir() / "programs", step_model, describe_arrays(state))
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if mesh else None),
        state,
    )

    def build(shapes: tuple[StepShape, ...]) -> None:
        wanted = program_set(step_model, shapes, structs, config.kv_offload_bytes > 0)
        compile_programs(wanted, runner.programs, progress, store)
        if jax.default_backend() == "cpu":
            keep_freed_memory()

    return build


def _max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    if not 2 <= config.max_model_len <= model.max_position:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; the model allows 2 to {model.max_position}"
        )
    return config.max_model_len


def _mesh(config: EngineConfig) -> Mesh | None:
    """The devices one model replica is sharded over; None for a single one."""
    size = config.tensor_parallel_size
    return None if size == 1 else make_mesh(jax.devices(), size)


def param_placement(config: EngineConfig) -> Callable[[ParamSpec], Any] | None:
    """Where `load_model` should put each parameter, so that no device ever holds them all."""
    mesh = _mesh(config)
    return None if mesh is None else functools.partial(sharding_of, mesh=mesh)


def has_room(config: EngineConfig, model: ModelConfig, dtype: str, weights: int) -> bool:
    """Whether a model that is not loaded yet could be served from a host's memory, with weights of
    so many bytes, which all devices of a host have together."""
    config = dataclasses.replace(config, dtype=dtype, quantization=NONE)
    length = _max_model_len(model, config)
    kept = state_bytes(model, config, length)
    try:
        plan_memory(model, config, length, weights, kept, jax.devices()[0], loaded=False)
    except MemoryPlanError:
        return False
    return True


def _device(device: jax.Device) -> Device:
    """What kernels are chosen by."""
    version: str | None = getattr(device, "compute_capability", None)
    major, _, minor = (version or "").partition(".")
    capability = (int(major), int(minor)) if version else None
    return Device(device.platform, device.device_kind, capability)


def _attention(device: Device, groups: tuple[KVGroup, ...], dtype: str) -> Implementation:
    """What computes attention; the log says why if it is no kernel on a GPU."""
    body = choose_body(*device, *groups[0].dims, groups[0].dtype, dtype)
    if body.why:
        logger.warning("attention is computed by XLA, not by kernels: %s (docs/gpu.md)", body.why)
    return body.implementation


def _specs(params: Tree, model: ModelConfig) -> Tree:
    """Of parameters as they are stored."""
    return specs_of(params, family_of(model.family).param_specs(model))


def _experts(
    device: Device, model: ModelConfig, config: EngineConfig, params: Tree
) -> Body[Grouped] | None:
    """What multiplies with experts' matrices as they are stored; None without any."""
    ways = config.tensor_parallel_size
    return choose_experts(device, _specs(params, model), config.dtype, ways)


def _sampling(device: Device) -> Implementation:
    """What finds the sampler's thresholds; the log says why if it is no kernel on a GPU."""
    body = sampling_threshold.choose_body(device)
    if body.why:
        logger.warning(
            "tokens are filtered by XLA, not by a kernel: %s (docs/kernels.md)", body.why
        )
    return body.implementation


def _scheduler(
    config: EngineConfig, groups: tuple[KVGroup, ...], runner: Runner, determinism: Determinism
) -> Scheduler:
    limits = SchedulerLimits(
        num_slots=config.max_num_seqs,
        chunk_tokens=max(shape.chunk for shape in runner.programs.forward),
        page_size=config.page_size,
        num_pages=tuple(group.num_pages for group in groups),
        windows=tuple(group.window for group in groups),
    )
    target = config.tpot_target_ms
    policy = SchedulerPolicy(
        prefix_cache=config.prefix_cache,
        watermark=config.kv_watermark,
        ageing=config.priority_ageing,
        tenant_weights=config.tenant_weights,
        tpot_target=None if target is None else target / 1000,
        batch_priority=config.batch_priority,
        interactive_reserve=config.interactive_reserve,
        host_pages=runner.transfer.host_pages if runner.transfer else (),
        separate_phases=determinism == "fixed",
    )
    return Scheduler(limits, policy)


def _limits(
    model: ModelConfig, config: EngineConfig, groups: tuple[KVGroup, ...], max_model_len: int
) -> EngineLimits:
    return EngineLimits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=min((g.capacity for g in groups if g.window is None), default=max_model_len),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        batch_priority=config.batch_priority,
        interactive_reserve=config.interactive_reserve,
    )


def _bytes_on_one(tree: Any) -> int:
    """Bytes that the arrays take on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
