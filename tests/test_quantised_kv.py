"""KV pools in 8 bits through the engine: names, sizes, placement, and the promises of others."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from test_determinism import alone, requests, same
from test_engine import mixed_requests
from test_families import family_folder, oracle
from test_family_engine import continuations
from test_programs import PAGE_SIZE, SLOTS, WIDTH
from tiny_checkpoint import dense_logits
from tiny_engine import TINY, VOCAB, Setup, built, check, drive, engine_for, tiny_params

from jaxinfer import programs, startup
from jaxinfer.checkpoints import load_model
from jaxinfer.checkpoints.device_fit import device_fit
from jaxinfer.config import EngineConfig
from jaxinfer.kv_pool import KVGroup, abstract_pools, empty_pools, kv_groups, on_platform
from jaxinfer.programs import program_set
from jaxinfer.request import SamplingParams
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import StepShape

DTYPES = ("int8", "float8_e4m3fn")


@pytest.fixture
def few_programs(monkeypatch):
    """Those that take part in greedy requests and all slots."""
    monkeypatch.setattr(programs, "VARIANTS", ("greedy", "full"))
    monkeypatch.setattr(programs, "row_rungs", lambda rows: (rows,))


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        (None, "bfloat16"),
        ("auto", "bfloat16"),
        ("float32", "float32"),
        ("int8", "int8"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
    ],
)
def test_names_of_pages(name, pages):
    assert EngineConfig(dtype="bfloat16", kv_dtype=name).pages == pages


@pytest.mark.parametrize("name", ["int4", "fp8_e5m2", "uint8", ""])
def test_other_names_are_refused_with_those_there_are(name):
    known = "auto, float32, bfloat16, float16, int8, fp8"
    with pytest.raises(ValueError, match=f"kv_dtype is '{name}'; choose one of {known}"):
        EngineConfig(kv_dtype=name)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_page_are_those_of_its_arrays(dtype, platform):
    (group,) = on_platform(kv_groups(TINY, 10, 16, dtype), platform)
    pools = empty_pools((group,))
    assert len(pools) == TINY.num_layers
    assert sum(array.nbytes for layer in pools for array in layer) == 10 * group.page_bytes
    a_token = 2 * TINY.num_kv_heads * (TINY.head_dim + 4)  # keys and values, each with its scale
    assert group.page_bytes == TINY.num_layers * 16 * a_token


def test_latent_pages_are_refused_by_name():
    with pytest.raises(ValueError, match="kv_dtype is int8, but latent attention's pages"):
        KVGroup((0,), 10, 16, 1, 24, "int8", value_dim=16)


@pytest.mark.parametrize(("dtype", "stored"), [("int8", "s8"), ("float8_e4m3fn", "u8")])
def test_pages_and_scales_are_updated_in_place(dtype, stored):
    """All of both is aliased, and nothing near their size is copied or made on the way."""
    pages = 8192
    groups = on_platform(kv_groups(TINY, pages, PAGE_SIZE, dtype), "cpu")
    slots, options = empty_slots(SLOTS, (WIDTH,)), empty_options(SLOTS, VOCAB)
    state = (tiny_params(), abstract_pools(groups), slots, options, empty_history(SLOTS, VOCAB))
    shape = StepShape(8, 128, PAGE_SIZE)
    (program,) = [
        program
        for program in program_set(StepModel(TINY, groups, "reference"), (shape,), state)
        if program.key == shape
    ]
    compiled = program.lower().compile()
    pool_bytes = pages * groups[0].page_bytes
    slot_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(slots))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= pool_bytes + slot_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    for array in (f"{stored}[8192,2,16,16]", "f32[8192,2,16]"):
        assert array in text and not re.findall(rf"= {re.escape(array)}\S* copy\(", text)
    assert set(re.findall(r"\w+(?=\[8192,2,16,16\])", text)) == {stored}, "the pool as numbers"


@pytest.mark.parametrize(
    ("quantization", "host_pages"), [("none", 0), ("w8a8-hl", 40)], ids=["recomputed", "offloaded"]
)
def test_bits_are_the_same_alone_in_company_after_hits_and_preemptions(quantization, host_pages):
    """The way is "fixed" also where weights and activations are not rounded."""
    rounded = {"kv_dtype": "int8", "quantization": quantization}
    setup = Setup(deterministic=True, pages=14, host_pages=host_pages, **rounded)
    shared = requests(2, 12, shared=50)
    tight = [dataclasses.replace(r, id=f"t{r.id}", max_new_tokens=36) for r in requests(3, 16)]
    these = [*shared, *tight]
    expected = alone(setup, these)
    engine = engine_for(setup)
    assert engine.scheduler.policy.separate_phases
    outputs = drive(engine, these, arrivals=3)
    assert engine.counters.preemptions > 2 and engine.counters.prefix_hits > 100
    same(outputs, expected)


@pytest.mark.usefixtures("quick_compiler", "few_programs")
def test_heads_are_divided_over_two_devices_with_their_scales():
    setup = Setup(slots=4, kv_dtype="int8", devices=2)
    params = SamplingParams(temperature=0, logprobs=5)
    mixed = mixed_requests(seed=21, count=8)
    engine, these = built(setup), [dataclasses.replace(r, params=params) for r in mixed]
    for layer in engine.runner.pools:
        assert [array.ndim for array in layer] == [4, 4, 3, 3]
        for array in layer:
            assert array.sharding.shard_shape(array.shape)[1] == TINY.num_kv_heads // 2
    outputs = drive(engine_for(setup), these, arrivals=3)
    for r in these:
        check(r, outputs[r.id], tolerance=0.2)


@pytest.mark.usefixtures("quick_compiler", "few_programs")
def test_windows_have_quantised_pages_too(tmp_path):
    """Two groups, prompts split and found again; logprobs stay near those of the dense loop."""
    model = load_model(family_folder(tmp_path, "gemma3_text"), dtype="float32")
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=4,
        kv_pool_bytes=1 << 20,
        kv_dtype="int8",
    )
    engine = startup.build_engine(model, config)
    engine.compiles.close()
    assert len(engine.scheduler.allocators) == 2
    prompt = oracle("gemma3_text")[0][:40].tolist()
    exact = dense_logits(model.config, model.params, np.array(prompt))[-1].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    for _ in range(2):
        ((said, logprobs),) = continuations(engine, [prompt], 6)
        assert 1e-6 < abs(logprobs[0].logprob - exact[said[0]]) < 0.1
    assert engine.counters.prefix_hits > 0


def test_what_pages_buy_is_said():
    fit = device_fit(TINY, "float32", 1 << 30, kv_dtype="int8")
    plain = device_fit(TINY, "float32", 1 << 30)
    assert plain.saved is None and fit.saved is not None
    per_token = TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4
    text = "\n".join(fit.lines())
    assert fit.saved.token_bytes == per_token * (16 + 4) // 64
    assert fit.saved.plain_token_bytes == per_token
    assert f"KV pages int8: {fit.saved.token_bytes} B a token instead of {per_token} B" in text
    assert "without int8 pages" in text and "quantization" not in text
    said = fit.to_json()["savings"]
    before, after = said["full_length_sequences"]
    assert after == pytest.approx(before * 64 / 20, rel=1e-3) and said["kv_dtype"] == "int8"
    both = device_fit(TINY, "float32", 1 << 30, "w8a8", kv_dtype="fp8")
    assert "without quantization and float8_e4m3fn pages" in "\n".join(both.lines())
