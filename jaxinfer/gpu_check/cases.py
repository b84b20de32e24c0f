"""What is compiled: a serving plan for real GPUs, its programs, and what each must satisfy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.experts import choose_experts
from jaxinfer.gpu_check.target import GpuTarget, devices
from jaxinfer.known_models import known_model
from jaxinfer.kv_pool import abstract_pools, kv_groups, pages_for
from jaxinfer.memory_plan import plan_memory, widest_activation
from jaxinfer.models import family_of
from jaxinfer.params import Tree, abstract_params
from jaxinfer.programs import Lowerable, program_set, step_shapes
from jaxinfer.sharding import make_mesh, pool_sharding, replicated, sharding_of
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import SCORED_ROWS, StepShape
from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention import choose_body
from pallas_kernels.sampling_threshold import choose_body as choose_sampling

ENGINE = EngineConfig(
    max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=2048, dtype="bfloat16"
)
FEW_LAYERS = 4
STEPS = ("forward 64+0", "forward 256+0", "forward 8+256", "forward 256+2048")
OTHERS = (
    "sample greedy 264",
    "sample draw 264",
    "sample filter 264",
    "sample full 264",
    "score 2048",
    "admit",
    "load_history",
)
PROGRAMS = {  # by model and GPUs: what is compiled
    ("llama-3-8b", 1): (*STEPS, *OTHERS),
    ("llama-3-8b", 8): (*STEPS, "sample full 264", "score 2048"),
    ("qwen3-32b", 8): STEPS,
    ("gemma3-27b", 1): STEPS,
    ("mixtral-8x7b", 1): STEPS,
    ("deepseek-v3", 8): STEPS,
}
# In bfloat16, to which it is converted as it is loaded, it does not fit on as many GPUs: the plan
# is one of the few layers alone.
IN_PART = {("deepseek-v3", 8)}
SLACK = 64 << 20
# Of a layer in a decode step, at most. Experts are chosen, and rows sorted by them; in a model with
# latent attention they come in groups.
LAUNCHES = {"dense": 14, "experts": 26, "latent experts": 34}
SHARDED_LAUNCHES = 2  # more with tensor parallelism: its all-reduces


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold of a compiled program. Bytes are of one device.

    Attributes:
        updated: arrays that must be updated in place (structs with shardings).
        outputs: the sharding of every result, None where it does not matter.
        pool_array: bytes of one layer's k or v pages; no result may be that large, but updates.
        temp_limit: bytes of temporaries.
        launches: for a step that only decodes, of each layer how many there may be; () otherwise.
        layers: of what kind each layer is, by the names of `LAUNCHES`; () for what is no step.
        collectives: how many of each kind, all outside loops.
        memory: bytes of the device; elsewhere: bytes of it that are taken but no argument of the
            program: the rest of the engine's state, layers that were left out included.
    """

    updated: Tree
    outputs: Tree
    pool_array: int
    temp_limit: int
    collectives: Counter[str]
    memory: int
    elsewhere: int
    layers: tuple[str, ...] = ()
    launches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A model served on `ways` GPUs: its state as abstract arrays, and the programs over it."""

    target: GpuTarget
    model: StepModel
    state: tuple[Any, ...]  # params, pools, slots, options, history
    programs: dict[str, Lowerable]
    resident: int  # bytes on one device of the state with all layers

    def expectation(self, program: Lowerable) -> Expectation:
        """What the program of that name must satisfy."""
        params, pools, slots, options, history = self.state
        config, mesh = self.model.config, self.model.mesh
        assert mesh is not None
        ways, whole = mesh.shape["model"], replicated(mesh)
        rows, activation, collectives = 0, 0, Counter[str]()
        layers: tuple[str, ...] = ()
        launches: tuple[int, ...] = ()
        updated: Tree
        taken: Tree
        match program.key:
            case StepShape() as shape:
                rows = shape.sample_rows
                widest = widest_activation(config, ways) * jnp.dtype(ENGINE.dtype).itemsize
                activation = widest * (shape.rows + shape.chunk)
                layers = _layer_kinds(config)
                if not shape.chunk:
                    more = SHARDED_LAUNCHES if ways > 1 else 0
                    launches = tuple(LAUNCHES[layer] + more for layer in layers)
                if ways > 1:  # attention and MLP of every layer, embedding; logits
                    collectives = Counter(
                        {"all-reduce": 2 * config.num_layers + 1, "all-gather": 1}
                    )
                updated, taken = (pools, slots), (params, pools, slots)
                load = whole if any(layer.endswith("experts") for layer in layers) else None
                hidden = whole if shape.chunk else None
                outputs = (*_shardings(updated), (whole, whole), whole, load, hidden)
            case (int() as rows, variant):
                updated = (slots, history if variant == "full" else None)
                taken = (*updated, options)
                outputs = (*_shardings(updated), whole)
            case ("score", int()):
                rows, updated, taken, outputs = SCORED_ROWS, (), params, (whole,)
                if ways > 1:  # logits
                    collectives = Counter({"all-gather": 1})
            case "admit":
                updated = taken = (slots, options)
                outputs = _shardings(updated)
            case _:
                updated = taken = history
                outputs = _shardings(updated)
        return Expectation(
            updated=updated,
            outputs=outputs,
            pool_array=min(device_bytes(layer[0]) for layer in pools),  # scales are far smaller
            temp_limit=2 * 4 * rows * config.vocab_size + 2 * activation + SLACK,
            collectives=collectives,
            memory=self.target.memory,
            elsewhere=self.resident - device_bytes(taken),
            layers=layers,
            launches=launches,
        )


def make_plan(target: GpuTarget, name: str, ways: int, layers: int | None = None) -> Plan:
    """Plan memory for the whole model of that name, then keep `layers` of it (None: all), each as
    large as in the whole; models of `IN_PART` are planned as if those were all.

    Raises MemoryPlanError when the model does not fit, ShardingError when it does not divide.
    """
    mesh = make_mesh(devices(target, ways), ways)
    engine = dataclasses.replace(ENGINE, tensor_parallel_size=ways)
    whole, config = replicated(mesh), known_model(name)
    kept = some_layers(config, config.num_layers if layers is None else layers)
    model = dataclasses.replace(
        config, num_layers=len(kept), kinds=tuple(config.kind(i) for i in kept)
    )
    if (name, ways) in IN_PART:
        config, kept = model, range(len(kept))

    def on_all(make: Any, *sizes: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
            jax.eval_shape(lambda: make(*sizes)),
        )

    def params_of(model: ModelConfig) -> Tree:
        specs = family_of(model.family).param_specs(model)
        return abstract_params(specs, engine.dtype, lambda spec: sharding_of(spec, mesh))

    length, page_size, dtype = engine.max_model_len, engine.page_size, engine.dtype
    assert length is not None
    num_groups = len(kv_groups(config, 1, page_size, dtype))
    slots = on_all(empty_slots, engine.max_num_seqs, (pages_for(length, page_size),) * num_groups)
    options = on_all(empty_options, engine.max_num_seqs, config.vocab_size)
    history = on_all(empty_history, engine.max_num_seqs, config.vocab_size)
    others = (slots, options, history)
    weights = device_bytes(params_of(config))
    memory, groups = plan_memory(
        config,
        engine,
        length,
        weights,
        device_bytes(others),
        target,  # type: ignore[arg-type]
    )
    groups = tuple(
        dataclasses.replace(g, layers=tuple(i for i, own in enumerate(kept) if own in g.layers))
        for g in groups
    )
    pools = abstract_pools(groups, pool_sharding(groups[0].layer_shape, mesh, groups[0].axes))
    kind, dims = groups[0].dtype, groups[0].dims
    device = Device("cuda", target.name, target.compute_capability)
    attention = choose_body(*device, *dims, kind).implementation
    sampling = choose_sampling(device).implementation
    experts = choose_experts(device, model, engine.dtype, ways)
    grouped = None if experts is None else experts.implementation
    step = StepModel(model, groups, attention, mesh, experts=grouped, sampling=sampling)
    state = (params_of(model), pools, *others)
    shapes = step_shapes(engine.max_num_seqs, engine.max_num_batched_tokens, page_size, num_groups)
    programs = {p.name: p for p in program_set(step, shapes, state)}
    resident = weights + memory.pool_bytes + device_bytes(others)
    return Plan(target, step, state, programs, resident)


def some_layers(config: ModelConfig, count: int) -> range:
    """So many layers in a row: the first of those in which each kind there is occurs most often."""

    def fewest(start: int) -> tuple[int, int]:
        kinds = Counter(config.kind(i) for i in range(start, start + count))
        return len(kinds), min(kinds.values())

    start = max(range(config.num_layers - count + 1), key=fewest)
    return range(start, start + count)


def device_bytes(tree: Tree) -> int:
    """Bytes that abstract arrays take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """Of each layer, one of `LAUNCHES`."""
    experts = "latent experts" if config.mla else "experts"
    kinds = (config.kind(i) for i in range(config.num_layers))
    return tuple(experts if config.moe and kind.moe else "dense" for kind in kinds)
