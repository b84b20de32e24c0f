"""The whole decode step of a random model of 8B parameters: the engine as it serves, driven without
a server."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.bench.drive import drive, full_decode_steps
from jaxinfer.bench.workload import make_workload
from jaxinfer.checkpoints import LoadedModel
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine import Engine
from jaxinfer.generation import GenerationDefaults
from jaxinfer.gpu_check.on_device.tasks import SEED, Record, Setting
from jaxinfer.known_models import known_model
from jaxinfer.memory_plan import MemoryPlan
from jaxinfer.models import family_of
from jaxinfer.params import init_params
from jaxinfer.roofline.step import Serving, StepLoad, step_floor
from jaxinfer.startup import build_engine

MODEL = "llama-3-8b"
STEP_TARGET = 0.75


@dataclass(frozen=True, slots=True)
class StepSizes:
    """A model, how it is served, and what it is asked: rows that decode after prompts of so many
    tokens."""

    model: ModelConfig
    engine: EngineConfig
    rows: tuple[int, ...]
    prompt: int
    output: int


def step_sizes(dry: bool) -> StepSizes:
    """The real sizes, or in a dry run tiny ones."""
    model = known_model(MODEL)
    if not dry:
        engine = EngineConfig(
            max_num_seqs=64, max_model_len=4096, max_num_batched_tokens=512, dtype="bfloat16"
        )
        return StepSizes(model, engine, rows=(16, 64), prompt=2048, output=64)
    small = dataclasses.replace(
        model, num_layers=1, hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab_size=256,
    )  # fmt: skip
    engine = EngineConfig(
        max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64, dtype="bfloat16",
        kv_pool_bytes=1 << 20,
    )  # fmt: skip
    return StepSizes(small, engine, rows=(1,), prompt=40, output=6)


def whole_step(setting: Setting) -> Record:
    """Time between tokens, tokens a second and their floors; peak memory against the promise."""
    sizes = step_sizes(setting.dry)
    family = family_of(sizes.model.family)
    params = init_params(family.param_specs(sizes.model), sizes.engine.dtype, SEED)
    none: Any = None  # random weights have no tokenizer
    model = LoadedModel(
        sizes.model, params, none, GenerationDefaults(()), sizes.engine.dtype, f"random {MODEL}"
    )
    engine = build_engine(model, sizes.engine, guard_compiles=True)
    ready = _peak_bytes()
    try:
        rows = [_decode(engine, sizes, rows, setting) for rows in sizes.rows]
    finally:
        if engine.compiles is not None:
            engine.compiles.close()  # what this process compiles next is no request's doing
    memory = engine.memory
    assert isinstance(memory, MemoryPlan)
    peak, promised = _peak_bytes(), _promised(memory)
    return {
        "model": MODEL,
        "rows": rows,
        "met": all(row.get("met", True) for row in rows),
        "peak_bytes": peak,
        "peak_bytes_when_ready": ready,
        "promised_bytes": promised,
        # While it compiles, XLA tries matrix products out in memory of its own.
        "passed": peak is None or peak <= promised or peak == ready,
    }


def _peak_bytes() -> int | None:
    """The most that was in use on the device so far; None where nobody counts."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _decode(engine: Engine, sizes: StepSizes, rows: int, setting: Setting) -> Record:
    """So many streams at once, after their prompts."""
    vocabulary, longest = sizes.model.vocab_size, engine.limits.max_model_len
    items = make_workload(
        "synthetic", rows, sizes.prompt, sizes.output, vocabulary, longest, seed=rows
    )
    run = drive(engine, items, rows)
    seconds = [taken for _, taken in full_decode_steps(run.marks, rows)]
    if not seconds:
        raise RuntimeError(f"{rows} rows never decoded together")
    step = statistics.median(seconds)
    record: Record = {
        "rows": rows,
        "context": sizes.prompt + sizes.output // 2,
        "tpot_ms": step * 1e3,
        "tokens_per_second": rows / step,
        "prefill_tokens_per_second": run.prefill_rate,
    }
    if setting.device is None or setting.dry:
        return record
    load = StepLoad(rows, record["context"])
    floor = step_floor(sizes.model, load, Serving(sizes.engine.dtype), setting.device)
    part = floor.us / (step * 1e6)
    return record | {"floor_us": floor.us, "of_floor": part, "met": part >= STEP_TARGET}


def _promised(memory: MemoryPlan) -> int:
    """Bytes of the device that the engine said it would take at most."""
    return (
        memory.weights_bytes
        + memory.pool_bytes
        + memory.slot_bytes
        + memory.workspace_bytes
        + memory.transfer_bytes
    )
