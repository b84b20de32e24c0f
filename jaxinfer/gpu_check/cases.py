"""What is compiled: a serving plan for real GPUs, its programs, and what each must satisfy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.experts import choose_experts
from jaxinfer.gpu_check.target import GpuTarget, devices
from jaxinfer.known_models import known_model
from jaxinfer.kv_pool import abstract_pools, kv_groups, pages_for
from jaxinfer.memory_plan import plan_memory, widest_activation
from jaxinfer.models import family_of
from jaxinfer.page_dtypes import AUTO
from jaxinfer.params import ParamSpec, Tree, abstract_params
from jaxinfer.programs import Lowerable, program_set, step_shapes
from jaxinfer.quantization.kinds import KINDS, NONE
from jaxinfer.quantization.multipliers import own_part, terms_of, with_multipliers
from jaxinfer.quantization.weight import Quantised, quantised_specs
from jaxinfer.roofline.storage import stored_so
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
    "forbid 264",
    "score 2048",
    "put_masks",
    "admit",
    "load_history",
)


class Served(NamedTuple):
    """A model, the GPUs that share it, the kind its weights are in, and what its KV pages are."""

    model: str
    ways: int = 1
    quantization: str = NONE
    kv_dtype: str = AUTO

    def __str__(self) -> str:
        kind = "" if self.quantization == NONE else f" in {self.quantization}"
        pages = "" if self.kv_dtype == AUTO else f" with {self.kv_dtype} pages"
        return f"{self.model}{kind}{pages} on {self.ways} GPU{'s' if self.ways > 1 else ''}"


PROGRAMS = {  # what is compiled
    Served("llama-3-8b"): (*STEPS, *OTHERS),
    Served("llama-3-8b", 8): (*STEPS, "sample full 264", "score 2048"),
    Served("qwen3-32b", 8): STEPS,
    Served("gemma3-27b"): STEPS,
    Served("mixtral-8x7b"): STEPS,
    Served("deepseek-v3", 8, "fp8-block"): STEPS,
    **{
        Served("llama-3-8b", 1, kind): STEPS[::2]
        for kind in ("int8", "int4", "mxfp4", "fp8", "w8a8", "w8a8-fp8")
    },
    **{Served("llama-3-8b", 1, NONE, pages): STEPS[::2] for pages in ("int8", "fp8")},
}
SLACK = 64 << 20
# Of a layer in a decode step, at most. Experts are chosen, and rows sorted by them; in a model with
# latent attention they come in groups.
LAUNCHES = {"dense": 14, "experts": 26, "latent experts": 34}
SHARDED_LAUNCHES = 2  # more with tensor parallelism: its all-reduces
ROUNDING_LAUNCHES = 4  # more where activations are rounded, before every product


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold of a compiled program. Bytes are of one device.

    Attributes:
        updated: arrays that must be updated in place (structs with shardings).
        outputs: the sharding of every result, None where it does not matter.
        pool_array: bytes of one layer's k or v pages; no result may be that large, but updates;
            scale_array: those of their scales, or 0; nor may one be as large.
        temp_limit: bytes of temporaries.
        launches: for a step that only decodes, of each layer how many there may be; () otherwise.
        layers: of what kind each layer is, by the names of `LAUNCHES`; () for what is no step.
        weights: the parameters that a step takes, and weight_bytes what they take by their shapes;
            matrices: rows and columns of those that are quantised and not as many rows as the
            step's activations have; nothing that large may be made.
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
    scale_array: int = 0
    layers: tuple[str, ...] = ()
    launches: tuple[int, ...] = ()
    weights: Tree = ()
    weight_bytes: int = 0
    matrices: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """A model served on `ways` GPUs: its state as abstract arrays, and the programs over it."""

    target: GpuTarget
    model: StepModel
    state: tuple[Any, ...]  # params, pools, slots, options, history
    programs: dict[str, Lowerable]
    resident: int  # bytes on one device of the state with all layers
    specs: Tree  # of the parameters
    quantization: str = NONE

    def expectation(self, program: Lowerable) -> Expectation:
        """What the program of that name must satisfy."""
        params, pools, slots, options, history = self.state
        config, mesh = self.model.config, self.model.mesh
        assert mesh is not None
        ways, whole = mesh.shape["model"], replicated(mesh)
        rows, activation, collectives = 0, 0, Counter[str]()
        layers, launches = tuple[str, ...](), tuple[int, ...]()
        counts: set[int] = set()  # rows of activations
        owned = self._owned(ways)
        updated: Tree
        taken: Tree
        match program.key:
            case StepShape() as shape:
                rows, tokens = shape.sample_rows, shape.rows + shape.chunk
                counts = {shape.chunk, tokens, tokens * (config.moe.top_k if config.moe else 1)}
                itemsize = jnp.dtype(ENGINE.dtype).itemsize
                activation = widest_activation(config, ways) * itemsize * tokens
                layers = _layer_kinds(config)
                launches = () if shape.chunk else self._launches(layers, ways)
                sums = 2 * config.num_layers + 1  # attention and MLP of every layer, embedding
                if ways > 1:  # logits are gathered
                    collectives = Counter({"all-reduce": sums, "all-gather": 1})
                updated, taken = (pools, slots), (params, pools, slots)
                load = whole if any(layer.endswith("experts") for layer in layers) else None
                last = (load, whole if shape.chunk else None)
                outputs = (*_shardings(updated), (whole, whole), whole, *last)
            case (int() as rows, variant):
                updated = (slots, history if variant == "full" else None)
                taken = (*updated, options)
                outputs = (*_shardings(updated), whole)
            case ("score", int()):
                rows, updated, taken, outputs = SCORED_ROWS, (), params, (whole,)
                if ways > 1:  # logits
                    collectives = Counter({"all-gather": 1})
            case ("forbid", int() as rows):
                updated, taken = slots, (slots, options)
                outputs = (whole, (whole, whole), _shardings(slots))
            case "put_masks":
                updated = taken = options
                outputs = _shardings(updated)
            case "admit":
                updated = taken = (slots, options)
                outputs = _shardings(updated)
            case _:
                updated = taken = history
                outputs = _shardings(updated)
        return Expectation(
            updated=updated,
            outputs=outputs,
            pool_array=min(device_bytes(layer[0]) for layer in pools),
            scale_array=device_bytes(pools[0][2:3]),
            temp_limit=2 * 4 * rows * config.vocab_size + 2 * activation + SLACK,
            collectives=collectives,
            memory=self.target.memory,
            elsewhere=self.resident - device_bytes(taken),
            layers=layers,
            launches=launches,
            weights=params if layers else (),
            weight_bytes=sum(map(_stored_bytes, owned)) if layers else 0,
            matrices=frozenset(m for part in owned for m in _matrix(part) if m[0] not in counts),
        )

    def _owned(self, ways: int) -> list[Any]:
        """What a device has of every parameter."""
        params = jax.tree.leaves(self.specs, is_leaf=_is_weight)
        return [own_part(param, ways, ENGINE.dtype) for param in params]

    def _launches(self, layers: tuple[str, ...], ways: int) -> tuple[int, ...]:
        """How many each layer of a decode step may take."""
        kind, more = KINDS.get(self.quantization), SHARDED_LAUNCHES if ways > 1 else 0
        if kind is not None and kind.activations != "as_given":
            more += ROUNDING_LAUNCHES
        return tuple(LAUNCHES[layer] + more for layer in layers)


def make_plan(target: GpuTarget, served: Served, layers: int | None = None) -> Plan:
    """Plan memory for the whole model, then keep `layers` of it (None: all), each as large as in
    the whole.

    Raises MemoryPlanError when the model does not fit, ShardingError when it does not divide.
    """
    name, ways, quantization, kv_dtype = served
    mesh = make_mesh(devices(target, ways), ways)
    engine = dataclasses.replace(
        ENGINE, tensor_parallel_size=ways, quantization=quantization, kv_dtype=kv_dtype
    )
    device = Device("cuda", target.name, target.compute_capability)
    whole, config = replicated(mesh), known_model(name)
    kept = some_layers(config, config.num_layers if layers is None else layers)
    model = dataclasses.replace(
        config, num_layers=len(kept), kinds=tuple(config.kind(i) for i in kept)
    )

    def on_all(make: Any, *sizes: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
            jax.eval_shape(lambda: make(*sizes)),
        )

    def specs_of(model: ModelConfig) -> Tree:
        plain = family_of(model.family).param_specs(model)
        return quantised_specs(plain, quantization, engine.dtype)

    def params_of(specs: Tree) -> Tree:
        params = abstract_params(specs, engine.dtype, lambda spec: sharding_of(spec, mesh))
        chosen, why = with_multipliers(params, device, mesh)
        assert not why, why
        return chosen

    length, page_size = engine.max_model_len, engine.page_size
    assert length is not None
    num_groups = len(kv_groups(config, 1, page_size, engine.pages))
    slots = on_all(empty_slots, engine.max_num_seqs, (pages_for(length, page_size),) * num_groups)
    options = on_all(empty_options, engine.max_num_seqs, config.vocab_size)
    history = on_all(empty_history, engine.max_num_seqs, config.vocab_size)
    others = (slots, options, history)
    weights = device_bytes(params_of(specs_of(config)))
    memory, groups = plan_memory(
        config,
        engine,
        length,
        weights,
        device_bytes(others),
        target,  # type: ignore[arg-type]
        made=0,
    )
    groups = tuple(
        dataclasses.replace(g, layers=tuple(i for i, own in enumerate(kept) if own in g.layers))
        for g in groups
    )
    pools = abstract_pools(groups, pool_sharding(groups[0].layer_shape, mesh, groups[0].axes))
    attention = choose_body(*device, *groups[0].dims, groups[0].dtype).implementation
    sampling = choose_sampling(device).implementation
    experts = choose_experts(device, specs_of(model), engine.dtype, ways)
    grouped = None if experts is None else experts.implementation
    step = StepModel(model, groups, attention, mesh, experts=grouped, sampling=sampling)
    state = (params_of(specs_of(model)), pools, *others)
    shapes = step_shapes(engine.max_num_seqs, engine.max_num_batched_tokens, page_size, num_groups)
    programs = {p.name: p for p in program_set(step, shapes, state)}
    resident = weights + memory.pool_bytes + device_bytes(others)
    return Plan(target, step, state, programs, resident, specs_of(model), quantization)


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


def _is_weight(x: Any) -> bool:
    return isinstance(x, Quantised | ParamSpec)


def _stored_bytes(part: Any) -> int:
    """Bytes of a device's part of a parameter, by its shape and the bits of an entry."""
    if not isinstance(part, Quantised):
        return math.prod(part.shape) * part.dtype.itemsize
    *lead, outputs, columns = terms_of(part)[0].shape
    stored = stored_so(part.layout, part.activations)
    return stored.weight_bytes(outputs, columns) * math.prod(lead)


def _matrix(part: Any) -> list[tuple[int, int]]:
    """Rows and columns of a quantised weight, those of all experts together."""
    if not isinstance(part, Quantised):
        return []
    *rows, columns = terms_of(part)[0].shape
    return [(math.prod(rows), columns)]


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """Of each layer, one of `LAUNCHES`."""
    experts = "latent experts" if config.mla else "experts"
    kinds = (config.kind(i) for i in range(config.num_layers))
    return tuple(experts if config.moe and kind.moe else "dense" for kind in kinds)
