"""The closed set of programs: every plan has one, state is updated in place, and the store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import TINY, VOCAB, Setup, built, tiny_params

from jaxinfer.kv_pool import abstract_pools, kv_groups
from jaxinfer.program_store import KEPT_FOLDERS, ProgramStore, describe_arrays
from jaxinfer.programs import (
    VARIANTS,
    chunk_rungs,
    program_set,
    row_rungs,
    smallest_shape,
    step_shapes,
)
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import MAX_PIECES, TILE_ROWS, StepShape
from pallas_kernels.paged_attention import TILE_ROWS as KERNEL_TILE_ROWS

ROOT = Path(__file__).resolve().parent.parent
SLOTS, PAGE_SIZE, PAGES, WIDTH = 8, 16, 8192, 64


@given(max_num_seqs=st.integers(1, 300), max_chunk=st.integers(1, 3000))
def test_rungs_are_few_and_reach_the_limit(max_num_seqs, max_chunk):
    rows, chunks = row_rungs(max_num_seqs), chunk_rungs(max_chunk)
    assert list(rows) == sorted(set(rows)) and rows[0] == 1 and rows[-1] == max_num_seqs
    assert list(chunks) == sorted(set(chunks)) and chunks[-1] == max_chunk
    assert len(rows) <= 9 and len(chunks) <= 7


@given(
    max_num_seqs=st.integers(1, 100),
    max_chunk=st.integers(1, 600),
    data=st.data(),
)
def test_every_step_has_a_program_and_it_is_no_larger_than_need_be(max_num_seqs, max_chunk, data):
    shapes = step_shapes(max_num_seqs, max_chunk, 16, 1)
    assert len(set(shapes)) == len(shapes)
    rows = data.draw(st.integers(0, max_num_seqs))
    chunk = data.draw(st.integers(0 if rows else 1, max_chunk))
    shape = smallest_shape(shapes, rows, chunk)
    assert shape.rows >= rows and shape.chunk >= chunk and bool(shape.chunk) == bool(chunk)
    for other in shapes:
        if other.rows >= rows and other.chunk >= chunk and bool(other.chunk) == bool(chunk):
            assert (shape.chunk, shape.rows) <= (other.chunk, other.rows)


def test_host_and_kernel_agree_on_the_size_of_a_tile():
    assert TILE_ROWS == KERNEL_TILE_ROWS


def program_state(pages: int):
    """Structs of a state whose pool is large beside everything else."""
    groups = kv_groups(TINY, pages, PAGE_SIZE, "float32")
    slots, options = empty_slots(SLOTS, (WIDTH,)), empty_options(SLOTS, VOCAB)
    state = (tiny_params(), abstract_pools(groups), slots, options, empty_history(SLOTS, VOCAB))
    return groups, state


def lowered(pages: int = PAGES):
    groups, state = program_state(pages)
    shapes = step_shapes(SLOTS, 128, PAGE_SIZE, 1)
    return program_set(StepModel(TINY, groups, "reference"), shapes, state), shapes, state


def test_the_set_is_closed():
    """A sampler of every variant for the rows of every forward, and what forbids tokens there, what
    scores prompts for every size of chunk, each program once."""
    programs, shapes, _ = lowered()
    keys = [program.key for program in programs]
    assert len(set(keys)) == len(keys) == len({program.name for program in programs})
    samplers = {(shape.sample_rows, variant) for shape in shapes for variant in VARIANTS}
    forbids = {("forbid", shape.sample_rows) for shape in shapes}
    scores = {("score", shape.chunk) for shape in shapes if shape.chunk}
    others = {"admit", "load_history", "put_masks"}
    assert set(keys) == {*shapes, *samplers, *forbids, *scores, *others}


@pytest.mark.parametrize("shape", [StepShape(1, 0, 16), StepShape(8, 0, 16), StepShape(8, 128, 16)])
def test_forward_updates_the_pool_in_place(shape):
    """All of the pool is aliased, and nothing near its size is copied or made on the way."""
    programs, _, (_, pools, slots, *_) = lowered()
    program = next(program for program in programs if program.key == shape)
    compiled = program.lower().compile()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    slot_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(slots))
    assert pool_bytes == 2 * 2 * PAGES * 2 * 16 * 16 * 4 == 64 << 20
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes + slot_bytes
    assert memory.temp_size_in_bytes < 8 << 20
    pool_shape = re.escape(f"f32[{PAGES},2,16,16]")
    assert re.search(pool_shape, compiled.as_text())
    assert not re.findall(rf"= {pool_shape}\S* copy\(", compiled.as_text())


def test_temporaries_do_not_grow_with_the_pool():
    sizes = []
    for pages in (PAGES, 4 * PAGES):
        programs, *_ = lowered(pages)
        program = next(p for p in programs if p.key == StepShape(8, 128, 16))
        sizes.append(program.lower().compile().memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("key", [(8, "greedy"), (8 + MAX_PIECES, "full"), "admit", "load_history"])
def test_slot_state_is_updated_in_place(key):
    programs, _, (_, _, slots, options, history) = lowered()
    compiled = next(program for program in programs if program.key == key).lower().compile()
    donated = {"greedy": (slots,), "full": (slots, history)}.get(key[1])
    donated = donated or {"admit": (slots, options), "load_history": (history,)}[key]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(donated))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def test_the_workspace_that_was_planned_covers_every_program():
    for setup in (Setup(), Setup(chunk=128)):
        engine = built(setup)
        programs = engine.runner.programs
        every = [*programs.forward.values(), *programs.sample.values()]
        every += [*programs.score.values(), *programs.forbid.values()]
        most = max(program.memory_analysis().temp_size_in_bytes for program in every)
        assert programs.temp_bytes >= most
        logits = 2 * 4 * VOCAB * max(s.sample_rows for s in programs.forward)
        hidden = 4 * TINY.hidden_size * setup.chunk
        assert programs.handed_bytes(TINY, 4) == logits + 2 * hidden
        assert programs.temp_bytes + programs.handed_bytes(TINY, 4) <= engine.memory.workspace_bytes


STORE = """
import json, pathlib, sys
import jax, jax.numpy as jnp
from jaxinfer.program_store import ProgramStore

store, compiles = ProgramStore(pathlib.Path(sys.argv[1]), "ingredient"), []

def compile_program():
    compiles.append(1)
    form = lambda x: jnp.where(x > 0, jnp.exp(x) @ x.T, jnp.sin(x) @ x.T).sum(0)
    return jax.jit(form).lower(jnp.ones((64, 64))).compile()

program = store.get_or_compile("a program", compile_program)
total = float(program(jnp.ones((64, 64))).sum())
files = [path.name for path in store.folder.glob("*")] if store.folder.exists() else []
print(json.dumps([len(compiles), total, files]))
"""


def in_a_process(folder: Path, **environment: str) -> list:
    """(compiles, result, stored files) of a start on four CPU devices."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", STORE, str(folder)],
        env={"PYTHONPATH": str(ROOT), "HOME": str(folder), **flags, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stored_program_runs_in_a_later_process(tmp_path):
    first = in_a_process(tmp_path)
    assert first[0] == 1 and first[2] == ["a-program.bin"]
    assert in_a_process(tmp_path) == [0, *first[1:]]
    (file,) = tmp_path.rglob("a-program.bin")
    file.write_bytes(file.read_bytes()[:1000])  # half written, say
    assert in_a_process(tmp_path) == first, "compiled again and stored again"
    assert in_a_process(tmp_path) == [0, *first[1:]]


def test_nothing_is_stored_that_another_cache_may_have_loaded(tmp_path):
    """Such a file would load and then fail when it is run."""
    jax_cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    runs = [in_a_process(tmp_path / "store", **jax_cache) for _ in range(3)]
    assert any((tmp_path / "jax").iterdir())
    assert runs[0] == runs[1] == runs[2] and runs[0][2] == []


def test_a_store_is_for_one_setting_of_jax_and_number_of_cpus(tmp_path, monkeypatch):
    folders = {ProgramStore(tmp_path).folder}
    with jax.default_matmul_precision("highest"):
        folders.add(ProgramStore(tmp_path).folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(99)), raising=False)
    folders.add(ProgramStore(tmp_path).folder)
    assert len(folders) == 3


def test_folders_that_were_not_used_lately_go(tmp_path):
    folders = [ProgramStore(tmp_path, number).folder for number in range(KEPT_FOLDERS)]
    for age, folder in enumerate(folders):
        os.utime(folder, (age, age))
    ProgramStore(tmp_path, 0)  # used again, so the next oldest goes
    newest = ProgramStore(tmp_path, "new").folder
    assert {*tmp_path.iterdir()} == {newest, *folders} - {folders[1]}


def test_a_program_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    store = ProgramStore(tmp_path)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        store._write(store.folder / "program.bin", b"data")
    assert list(store.folder.iterdir()) == []


def test_a_store_is_for_one_state_alone(tmp_path):
    one, other = jnp.zeros((2, 3)), jnp.zeros((3, 2))
    folders = {
        ProgramStore(tmp_path, describe_arrays(tree)).folder
        for tree in ([one], [other], {"a": one}, [one, one], [one.astype(jnp.bfloat16)])
    }
    assert len(folders) == 5
    assert ProgramStore(tmp_path, describe_arrays([one])).folder in folders
