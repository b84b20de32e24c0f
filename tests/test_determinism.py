"""The same request has the same bits, whatever its company; and the check at start is honest."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from demo_model import demo_path
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import SOAK, soak_requests
from tiny_engine import MAX_MODEL_LEN, TINY, VOCAB, Setup, built, drive, engine_for, fresh, request

from jaxinfer.checkpoints import load_model
from jaxinfer.config import EngineConfig
from jaxinfer.determinism import Probe
from jaxinfer.kv_pool import kv_groups
from jaxinfer.request import SamplingParams
from jaxinfer.startup import build_engine

ROOT = Path(__file__).resolve().parent.parent
FOUND = Setup(deterministic=True, pages=60)  # the way that holds on this machine
FIXED = dataclasses.replace(FOUND, differs=True)
WAYS = pytest.mark.parametrize("setup", [FOUND, FIXED], ids=["as found", "fixed"])

OPTIONS = [
    SamplingParams(temperature=0, logprobs=20),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, logprobs=3),
    SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, logprobs=0),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=5),
    SamplingParams(temperature=0, logit_bias=((7, 2.5), (8, -3.0)), logprobs=1),
]


def requests(seed: int, count: int, shared: int = 0):
    """Random prompts with `shared` tokens in common, and every option in turn."""
    rng = np.random.default_rng(seed)
    prefix, made = rng.integers(0, VOCAB, shared).tolist(), []
    for i in range(count):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 90 - shared))).tolist()
        new = int(rng.integers(2, 36))
        made.append(request(f"{i}", prefix + own, new, OPTIONS[i % len(OPTIONS)], seed=i))
    return made


def alone(setup: Setup, these):
    """What each request brings on an engine that has served nothing."""
    return {r.id: drive(engine_for(setup), [r])[r.id] for r in these}


def same(outputs, expected) -> None:
    for name, output in outputs.items():
        assert output.tokens == expected[name].tokens, name
        assert output.logprobs == expected[name].logprobs, name  # floats, to the last bit


@WAYS
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
def test_alone_and_in_company_all_bits_are_the_same(setup, overlap):
    these = requests(1, 40)
    expected = alone(setup, these)
    for arrivals in (1, 40):
        same(drive(engine_for(setup, overlap), these, arrivals), expected)
    same(drive(engine_for(setup, overlap), these[::-1], 3), expected)


@WAYS
def test_after_a_prefix_hit(setup):
    these = requests(2, 24, shared=50)
    expected = alone(setup, these)
    engine = engine_for(setup)
    outputs = drive(engine, these, arrivals=2)
    assert engine.counters.prefix_hits > 500
    same(outputs, expected)


@WAYS
@pytest.mark.parametrize("host_pages", [0, 40], ids=["recomputed", "offloaded"])
def test_after_preemption(setup, host_pages):
    tight = dataclasses.replace(setup, pages=14, host_pages=host_pages)
    these = [dataclasses.replace(r, max_new_tokens=36) for r in requests(3, 24)]
    expected = alone(tight, these)
    engine = engine_for(tight)
    outputs = drive(engine, these, arrivals=4)
    assert engine.counters.preemptions > 5
    same(outputs, expected)


def test_in_a_fixed_way_prompts_and_outputs_have_a_program_each():
    engine = built(FIXED)
    assert engine.scheduler.policy.separate_phases
    shapes = list(engine.runner.programs.forward)
    assert [(shape.rows, shape.chunk) for shape in shapes] == [(8, 0), (0, 32)]
    assert engine.scheduler.limits.chunk_tokens == 32
    assert {rows for rows, _ in engine.runner.programs.sample} >= {8}


@functools.cache
def demo_engine(pages: int):
    """A small engine of the real model, whose matrix products are of the usual size."""
    model = load_model(demo_path())
    page_bytes = kv_groups(model.config, 1, 16, "float32")[0].page_bytes
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=160,
        max_num_batched_tokens=64,
        page_size=16,
        kv_pool_bytes=pages * page_bytes,
        deterministic=True,
    )
    engine = build_engine(model, config)
    engine.compiles.close()
    return engine


def test_a_real_model_says_the_same_alone_in_company_and_after_preemption():
    rng, made = np.random.default_rng(9), []
    prefix = rng.integers(0, 49152, 40).tolist()
    for i in range(6):
        prompt = prefix * (i % 2) + rng.integers(0, 49152, 30 + int(rng.integers(0, 15))).tolist()
        made.append(request(f"{i}", prompt, 18, OPTIONS[i % 3], seed=i))
    expected = {}
    for r in made[:3]:
        expected |= drive(fresh(demo_engine(14)), [r])
    engine = fresh(demo_engine(14))
    outputs = drive(engine, made, arrivals=1)
    assert engine.counters.preemptions > 0 and engine.counters.prefix_hits > 0
    same({name: outputs[name] for name in expected}, expected)


# -- what a program promises -----------------------------------------------------------------------


@functools.cache
def fixed_probe():
    """A probe of the way "fixed", its two programs, and what they say with nobody beside it."""
    runner = engine_for(FIXED).runner
    groups = kv_groups(TINY, runner.pools[0][0].shape[0], FIXED.page_size, FIXED.dtype)
    probe = Probe(runner, groups, MAX_MODEL_LEN, VOCAB)
    decode, chunk = probe.runner.programs.forward
    probe.say(chunk, decode)
    return probe, decode, chunk


@settings(max_examples=60)
@given(data=st.data())
def test_in_one_program_a_token_depends_on_its_own_history_alone(data):
    """Not on its row, its company, how its prompt was cut or what went before it in the chunk."""
    probe, decode, chunk = fixed_probe()
    length = probe.prompt_len + probe.outputs
    start, ahead = 0, data.draw(st.integers(0, 20))
    while start < probe.prompt_len:
        size = data.draw(st.integers(1, min(chunk.chunk - ahead, probe.prompt_len - start)))
        piece = (probe.here, start, size)
        _, bits = probe.step(chunk, piece=piece, ahead=ahead)
        start += size
    np.testing.assert_array_equal(bits, probe.said[0])
    for position in range(probe.prompt_len, length):
        company = data.draw(st.integers(0, decode.rows - 1))
        bits = probe.decode(decode, probe.here, position, company)
        np.testing.assert_array_equal(bits, probe.said[1 + position - probe.prompt_len])


# -- the check at start ----------------------------------------------------------------------------


@WAYS
def test_the_check_leaves_no_trace(setup):
    """All slots are free, the pages it wrote are nobody's, and no request is counted."""
    engine = built.__wrapped__(
        setup
    )  # as it started, not as other tests left it; nothing is compiled
    runner = engine.runner
    assert np.asarray(runner.slots.done).all()
    assert not any(np.asarray(table).any() for table in runner.slots.page_tables)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(runner.pools))
    assert any(np.asarray(leaf)[1:].any() for leaf in jax.tree.leaves(runner.pools)), "it ran"
    assert engine.counters.received == 0 and not engine.has_work
    engine.scheduler.check_invariants()


# -- a restart -------------------------------------------------------------------------------------

RESTART = """
import json
from test_engine import SOAK, soak_requests
from tiny_engine import Setup, built, drive, request
from jaxinfer.request import SamplingParams

params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=20)
engine = built(Setup(slots=2, chunk=8, deterministic=True))
output = drive(engine, [request("r", range(30, 100), 20, params)])["r"]
print(json.dumps([output.tokens, [(said.logprob, said.top) for said in output.logprobs]]))
"""


def test_a_restart_keeps_the_bits(tmp_path):
    """The same stored programs run in a later process."""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {
        "JAXINFER_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    runs, stored = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RESTART],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
        stored.append({file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.bin")})
    assert len(runs[0][0]) == 20 and runs[0] == runs[1]
    assert stored[0] and stored[0] == stored[1], "nothing was compiled the second time"


def test_soak_of_2000_requests_overlapped_equals_synchronous():
    """Concurrency 64, chunks, pressure and cancels: token for token, and every bit of logprobs."""
    setup = dataclasses.replace(SOAK, deterministic=True)
    these, cancels = soak_requests(2000)
    runs = []
    for overlap in (True, False):
        engine = engine_for(setup, overlap)
        runs.append(drive(engine, these, arrivals=8, cancel_after=cancels))
        assert engine.counters.aborted > 50 and engine.counters.preemptions > 0
    for r in these:
        overlapped, synchronous = (outputs[r.id] for outputs in runs)
        both = min(len(overlapped.tokens), len(synchronous.tokens))
        assert overlapped.tokens[:both] == synchronous.tokens[:both]
        assert overlapped.logprobs[:both] == synchronous.logprobs[:both]
        if r.id not in cancels:  # a cancel may come a token earlier or later
            assert overlapped == synchronous
