"""The closed set of programs a request can reach, all compiled before the engine is ready."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxinfer.config import Determinism, ModelConfig
from jaxinfer.kv_pool import Pools
from jaxinfer.logprobs import score
from jaxinfer.page_transfer import BATCH, batch_structs, pools_of, read_pages, write_pages
from jaxinfer.program_store import ProgramStore
from jaxinfer.sampler import VARIANTS, SampleRows, Variant, forbid, sample
from jaxinfer.sharding import replicated
from jaxinfer.slot_state import (
    HISTORY_CHUNK,
    MASK_BATCH,
    History,
    Options,
    Slots,
    admission_size,
    mask_words,
)
from jaxinfer.step import admit, forward, load_history, put_masks
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import MAX_PIECES, SCORED_ROWS, StepShape

FEWEST_ROWS = 8  # the rung between one stream and doublings
SMALLEST_CHUNK = 64
LEAST_FIXED_CHUNK = 128

# On CPUs, programs compile side by side already: splitting each one as well takes longer, and so
# does loading the parts from the cache. On GPUs the pool fills the memory on purpose, and counting
# it as argument and as result XLA would compute everything again that it could otherwise keep: of
# page tables, once a layer. What programs need beside the pool was measured before it was sized.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_parallel_codegen_split_count": 1},
    "gpu": {"xla_disable_hlo_passes": "rematerialization"},
}

Progress = Callable[[str, int, int], None]  # what, done, of


def row_rungs(max_num_seqs: int) -> tuple[int, ...]:
    """Decode rows a step may have: 1, then 8 doubling up to all slots."""
    rungs, rows = {1, max_num_seqs}, FEWEST_ROWS
    while rows < max_num_seqs:
        rungs.add(rows)
        rows *= 2
    return tuple(sorted(rungs))


def chunk_rungs(max_chunk: int) -> tuple[int, ...]:
    """Prefill chunk sizes: 64 doubling up to the largest."""
    rungs, tokens = {max_chunk}, SMALLEST_CHUNK
    while tokens < max_chunk:
        rungs.add(tokens)
        tokens *= 2
    return tuple(sorted(rungs))


def step_shapes(
    max_num_seqs: int,
    max_chunk: int,
    page_size: int,
    num_groups: int,
    determinism: Determinism = "off",
) -> tuple[StepShape, ...]:
    """Every program shape: decode alone on each rung of rows, and each chunk size beside rows.

    From the largest chunk down, sizes alternate between all rows and few: each program costs
    start-up time, and the next larger one serves for what is missing.

    With determinism no program has less than `FEWEST_ROWS`: matrix products of fewer rows are
    another kernel's, with other roundings. "fixed" has two programs: all rows, and one chunk
    without any.
    """
    all_rows = max_num_seqs if determinism == "off" else max(max_num_seqs, FEWEST_ROWS)
    if determinism == "fixed":
        sizes = [(all_rows, 0), (0, fixed_chunk(max_chunk))]
    else:
        chunks, few = chunk_rungs(max_chunk), min(FEWEST_ROWS, all_rows)
        rungs = row_rungs(all_rows)
        sizes = [(rows, 0) for rows in rungs if rows > 1 or determinism == "off"]
        sizes += [(all_rows, chunk) for chunk in chunks[::-2]]
        sizes += [(few, chunk) for chunk in chunks[-2::-2]]
    return tuple(StepShape(rows, chunk, page_size, num_groups) for rows, chunk in sizes)


def fixed_chunk(max_chunk: int) -> int:
    """The chunk of determinism "fixed", paid whole however few tokens it has: a quarter of the
    largest, but no less than what makes good use of the weights."""
    return min(max_chunk, max(LEAST_FIXED_CHUNK, max_chunk // 4))


def smallest_shape(shapes: tuple[StepShape, ...], rows: int, chunk: int) -> StepShape:
    """The cheapest program that holds `rows` decode rows and `chunk` prompt tokens."""
    fitting = [
        s for s in shapes if s.rows >= rows and s.chunk >= chunk and bool(s.chunk) == bool(chunk)
    ]
    return min(fitting, key=lambda s: (s.chunk, s.rows))


Key = (
    StepShape
    | tuple[int, Variant]
    | tuple[Literal["read_pages", "write_pages", "forbid", "score"], int]
    | Literal["admit", "load_history", "put_masks"]
)


@dataclass(frozen=True, slots=True)
class Lowerable:
    """One program of the set: its name, its place in `Programs`, and how to trace it."""

    name: str
    key: Key
    lower: Callable[[], Any]


@dataclass(slots=True)
class Programs:
    """Compiled executables by what they are for, and the memory the largest of them needs."""

    forward: dict[StepShape, Any] = field(default_factory=dict)
    forbid: dict[int, Any] = field(default_factory=dict)  # by rows
    sample: dict[tuple[int, Variant], Any] = field(default_factory=dict)
    score: dict[int, Any] = field(default_factory=dict)  # by the chunk's size
    read_pages: dict[int, Any] = field(default_factory=dict)  # by KV group, with offloading only
    write_pages: dict[int, Any] = field(default_factory=dict)
    admit: Any = None
    load_history: Any = None
    put_masks: Any = None
    temp_bytes: int = 0
    names: set[str] = field(default_factory=set)

    def enter(self, program: Lowerable, executable: Any) -> None:
        """Put a member of the set where it belongs and account for its memory."""
        key = program.key
        match key:
            case StepShape():
                self.forward[key] = executable
            case ("score", chunk):
                self.score[chunk] = executable
            case ("read_pages", group):
                self.read_pages[group] = executable
            case ("write_pages", group):
                self.write_pages[group] = executable
            case ("forbid", rows):
                self.forbid[rows] = executable
            case (int() as rows, variant):
                self.sample[rows, variant] = executable
            case "admit" | "load_history" | "put_masks":
                setattr(self, key, executable)
        analysis = executable.memory_analysis()
        if analysis is not None:
            self.temp_bytes = max(self.temp_bytes, analysis.temp_size_in_bytes)
        self.names.add(program.name)

    def keep(self, shapes: tuple[StepShape, ...]) -> None:
        """Forget the steps of all other shapes."""
        self.forward = {shape: self.forward[shape] for shape in shapes}

    def handed_bytes(self, model: ModelConfig, itemsize: int) -> int:
        """The largest that goes from one program to the next: logits, the model's own and what is
        left of them by `forbid`, and the last layer's output for a chunk, with that of the step
        before, which may still be there.
        """
        logits = 2 * max(rows for rows, _ in self.sample) * model.vocab_size * 4
        return logits + 2 * max(self.score) * model.hidden_size * itemsize


def program_set(
    model: StepModel,
    shapes: tuple[StepShape, ...],
    state: tuple[Any, Any, Slots, Options, History],
    offload: bool = False,
) -> list[Lowerable]:
    """The closed set for `state` = (params, pools, slots, options, history), arrays or structs."""
    params, pools, slots, options, history = state
    whole = replicated(model.mesh) if model.mesh else None

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    ints = partial(struct, jnp.int32)

    def step(shape: StepShape) -> Any:
        packed = ints(shape.packed_size)
        return forward.lower(params, pools, slots, packed, model=model, shape=shape)

    def sampled(rows: int) -> tuple[Any, ...]:
        logits = struct(jnp.float32, rows, model.config.vocab_size)
        return logits, SampleRows(ints(rows), struct(jnp.bool_, rows)), slots, options

    def without(rows: int) -> Any:
        return forbid.lower(*sampled(rows), ints(rows))

    def choice(rows: int, variant: Variant) -> Any:
        logits, *others = sampled(rows)
        more = (history, logits) if variant == "full" else (None, None)
        how: dict[str, Any] = {"variant": variant, "implementation": model.sampling}
        return sample.lower(logits, *others, *more, **how)

    def scoring(chunk: int) -> Any:
        config = model.config
        hidden = struct(params["embed"].dtype, chunk, config.hidden_size)
        return score.lower(params, hidden, ints(2, SCORED_ROWS), model=model)

    rows = sorted({shape.sample_rows for shape in shapes})
    chunks = sorted({shape.chunk for shape in shapes if shape.chunk})
    widths = tuple(table.shape[1] for table in slots.page_tables)
    admission, upload = ints(MAX_PIECES, admission_size(widths)), ints(2 + HISTORY_CHUNK)
    masks = struct(jnp.uint32, MASK_BATCH, 1 + mask_words(model.config.vocab_size))
    return [
        *(Lowerable(f"forward {s.rows}+{s.chunk}", s, partial(step, s)) for s in shapes),
        *(
            Lowerable(f"sample {variant} {r}", (r, variant), partial(choice, r, variant))
            for r in rows
            for variant in VARIANTS
        ),
        *(Lowerable(f"score {c}", ("score", c), partial(scoring, c)) for c in chunks),
        *(Lowerable(f"forbid {r}", ("forbid", r), partial(without, r)) for r in rows),
        Lowerable("put_masks", "put_masks", lambda: put_masks.lower(options, masks)),
        Lowerable("admit", "admit", lambda: admit.lower(slots, options, admission)),
        Lowerable("load_history", "load_history", lambda: load_history.lower(history, upload)),
        *(_transfers(model, pools, ints(BATCH)) if offload else []),
    ]


def _transfers(model: StepModel, pools: Pools, pages: Any) -> list[Lowerable]:
    """The programs that move pages out of the pools and back."""
    transfers = []
    for i, group in enumerate(model.groups):
        args, data = (pools_of(pools, group), pages), batch_structs(group, model.mesh)
        how: dict[str, Any] = {"axes": group.axes, "mesh": model.mesh}
        read = partial(read_pages.lower, *args, **how)
        write = partial(write_pages.lower, *args, data, **how)
        transfers.append(Lowerable(f"read_pages {i}", ("read_pages", i), read))
        transfers.append(Lowerable(f"write_pages {i}", ("write_pages", i), write))
    return transfers


def compile_programs(
    programs: list[Lowerable],
    table: Programs,
    progress: Progress | None = None,
    store: ProgramStore | None = None,
) -> None:
    """Compile programs into the table, in threads, or load what `store` has of them.

    Those that the table has stay. `progress` hears of 0 programs done first, if there are any to
    compile.
    """
    programs = [program for program in programs if program.name not in table.names]
    done = itertools.count(1)
    options = COMPILER_OPTIONS.get(jax.default_backend())
    missing = sum(1 for p in programs if store is None or not store.has(p.name))
    if progress and missing:
        what = f"compiling {missing} programs, one to two minutes the first time"
        progress(what, 0, len(programs))

    def build(program: Lowerable) -> Any:
        def compile_program() -> Any:
            return program.lower().compile(compiler_options=options)

        executable = (
            store.get_or_compile(program.name, compile_program) if store else compile_program()
        )
        if progress:
            progress(f"compile {program.name}", next(done), len(programs))
        return executable

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for program, executable in zip(programs, pool.map(build, programs)):
            table.enter(program, executable)
