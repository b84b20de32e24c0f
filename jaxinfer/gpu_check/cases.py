"""What is compiled: a serving plan for real GPUs, its programs, and what each must satisfy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig, MlaConfig, ModelConfig, RopeConfig
from jaxinfer.gpu_check.target import GpuTarget, devices
from jaxinfer.kv_pool import abstract_pools, pages_for
from jaxinfer.memory_plan import plan_memory
from jaxinfer.models import family_of
from jaxinfer.params import Tree, abstract_params
from jaxinfer.programs import Lowerable, program_set, step_shapes
from jaxinfer.sharding import make_mesh, pool_sharding, replicated, sharding_of
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import StepShape
from pallas_kernels.paged_attention import choose_body
from pallas_kernels.sampling_threshold import choose_body as choose_sampling

LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rope=RopeConfig(theta=500000.0),
)
LATENT = ModelConfig(  # latent attention, of the shape of DeepSeek V2 Lite, and no experts
    family="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    num_layers=27,
    num_heads=16,
    num_kv_heads=1,
    head_dim=512 + 64,
    rotary_dim=64,
    rope_pairs="neighbours",
    attention_scale=192**-0.5,
    max_position=8192,
    mla=MlaConfig(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
)
LATENT_PREFIX = "latent "  # of the names of its programs
ENGINE = EngineConfig(
    max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=2048, dtype="bfloat16"
)
FEW_LAYERS = 4
PROGRAMS = {  # by devices: the programs compiled by default
    1: (
        "forward 64+0",
        "forward 256+0",
        "forward 8+256",
        "forward 256+2048",
        "sample greedy 264",
        "sample draw 264",
        "sample filter 264",
        "sample full 264",
        "admit",
        "load_history",
        "latent forward 64+0",
    ),
    8: (
        "forward 64+0",
        "forward 256+0",
        "forward 8+256",
        "forward 256+2048",
        "sample full 264",
        "latent forward 8+256",
    ),
}
SLACK = 64 << 20


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold of a compiled program. Bytes are of one device.

    Attributes:
        updated: arrays that must be updated in place (structs with shardings).
        outputs: the sharding of every result, None where it does not matter.
        pool_array: bytes of one layer's k or v pages; no result may be that large, but updates.
        temp_limit: bytes of temporaries.
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
        updated: Tree
        taken: Tree
        match program.key:
            case StepShape() as shape:
                rows = shape.sample_rows
                activation = _widest(config, ways) * (shape.rows + shape.chunk)
                if ways > 1:  # attention and MLP of every layer, embedding; logits
                    collectives = Counter(
                        {"all-reduce": 2 * config.num_layers + 1, "all-gather": 1}
                    )
                updated, taken = (pools, slots), (params, pools, slots)
                load = whole if config.moe else None
                outputs = (*_shardings(updated), (whole, whole), whole, load)
            case (int() as rows, variant):
                updated = (slots, history if variant == "full" else None)
                taken = (*updated, options)
                outputs = (*_shardings(updated), whole)
            case "admit":
                updated = taken = (slots, options)
                outputs = _shardings(updated)
            case _:
                updated = taken = history
                outputs = _shardings(updated)
        return Expectation(
            updated=updated,
            outputs=outputs,
            pool_array=device_bytes(pools[0][0]),
            temp_limit=2 * 4 * rows * config.vocab_size + 2 * activation + SLACK,
            collectives=collectives,
            memory=self.target.memory,
            elsewhere=self.resident - device_bytes(taken),
        )


def model_of(program: str) -> ModelConfig:
    """The model that a program of that name is a step of."""
    return LATENT if program.startswith(LATENT_PREFIX) else LLAMA_3_8B


def make_plan(
    target: GpuTarget, ways: int, layers: int, whole_model: ModelConfig = LLAMA_3_8B
) -> Plan:
    """Plan memory for the whole model, then keep `layers` of it, each as large as in the whole.

    Raises MemoryPlanError when the model does not fit, ShardingError when it does not divide.
    """
    mesh = make_mesh(devices(target, ways), ways)
    engine = dataclasses.replace(ENGINE, tensor_parallel_size=ways)
    whole = replicated(mesh)
    table_width = pages_for(engine.max_model_len, engine.page_size)  # type: ignore[arg-type]

    def on_all(make: Any, *sizes: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
            jax.eval_shape(lambda: make(*sizes)),
        )

    slots = on_all(empty_slots, engine.max_num_seqs, (table_width,))
    options = on_all(empty_options, engine.max_num_seqs)
    history = on_all(empty_history, engine.max_num_seqs, whole_model.vocab_size)

    def params_of(model: ModelConfig) -> Tree:
        specs = family_of(model.family).param_specs(model)
        return abstract_params(specs, engine.dtype, lambda spec: sharding_of(spec, mesh))

    weights = device_bytes(params_of(whole_model))
    memory, groups = plan_memory(
        whole_model,
        engine,
        engine.max_model_len,  # type: ignore[arg-type]
        weights,
        device_bytes((slots, options, history)),
        target,  # type: ignore[arg-type]
    )
    model = dataclasses.replace(whole_model, num_layers=layers)
    groups = tuple(dataclasses.replace(g, layers=tuple(range(layers))) for g in groups)
    pools = abstract_pools(groups, pool_sharding(groups[0].layer_shape, mesh, groups[0].axes))
    kind, dims = groups[0].dtype, groups[0].dims
    body = choose_body("cuda", target.name, target.compute_capability, *dims, kind)
    sampling = choose_sampling("cuda", target.name, target.compute_capability).implementation
    step = StepModel(model, groups, body.implementation, mesh, sampling=sampling)
    state = (params_of(model), pools, slots, options, history)
    shapes = step_shapes(
        engine.max_num_seqs, engine.max_num_batched_tokens, engine.page_size, len(groups)
    )
    prefix = LATENT_PREFIX if whole_model.mla else ""
    programs = {
        f"{prefix}{p.name}": dataclasses.replace(p, name=f"{prefix}{p.name}")
        for p in program_set(step, shapes, state)
    }
    resident = weights + memory.pool_bytes + device_bytes(state[2:])
    return Plan(target, step, state, programs, resident)


def device_bytes(tree: Tree) -> int:
    """Bytes that abstract arrays take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _widest(config: ModelConfig, ways: int) -> int:
    """Bytes of a token's largest activation on one device."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    values = max(config.hidden_size, 2 * config.intermediate_size // ways, qkv // ways)
    return values * jnp.dtype(ENGINE.dtype).itemsize
