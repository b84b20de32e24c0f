"""The ladder: static against continuous batching, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_bench_scheduling import fake_engine, prompt

from jaxinfer.bench.drive import drive_feed
from jaxinfer.bench.feeds import Waves
from jaxinfer.bench.ladder import LADDER, Runs, _batching, ladder, rungs_named, static_bound
from jaxinfer.bench.no_device import engine_without_device
from jaxinfer.bench.variants import StepNote, running_as
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy


def test_the_bound_by_hand():
    # Batches of two: (4 + 4) + (3 + 3) + the last alone, which keeps two slots: 2 * 5.
    assert static_bound([4, 1, 2, 3, 5], 2) == pytest.approx((8 + 6 + 10) / 15)
    assert static_bound([7, 7, 7, 7], 2) == 1.0


def test_rungs_by_name():
    assert [r.name for r in rungs_named(["kv-fp8", "chunked", "w8a8", "one"])] == [
        "one", "chunked", "kv-fp8", "w8a8",
    ]  # fmt: skip
    pages, weights, both = rungs_named(["kv-fp8", "w8a8-hl", "int8+kv-int8"])
    assert pages.changes == {"kv_dtype": "float8_e4m3fn"} and pages.title == "+ KV float8_e4m3fn"
    assert weights.changes == {"quantization": "w8a8-hl"}
    assert both.changes == {"quantization": "int8", "kv_dtype": "int8"}
    assert both.title == "+ weights int8, KV int8" and both.policy == LADDER[-1].policy


@pytest.mark.parametrize("name", ["w8", "kv-int4", "kv-auto", "kv-", "w8a8+int8", "kv-int8+w8a8"])
def test_other_rungs_are_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"choose among one, .* w8a8, .* both as KIND\+kv-"):
        rungs_named([name])


def test_a_rung_of_another_engine_is_run_by_it():
    engine, other = fake_engine(), fake_engine()
    rungs = rungs_named(["prefix", "w8a8"])
    items = [WorkItem(tuple(prompt(4, n)), 3) for n in range(4)]
    result = ladder(engine, items, rungs, 2, others={"w8a8": other})
    assert [rung["rung"] for rung in result["rungs"]] == ["prefix", "w8a8"]
    assert engine.counters.finished == other.counters.finished == 3 * len(items)


@pytest.fixture(scope="module")
def climbed() -> dict:
    engine = fake_engine()
    shared = prompt(12, 1)
    items = [
        WorkItem((*shared, *prompt(4 + n, 2 + n)), length)
        for n, length in enumerate([9, 3, 5, 2, 8, 1, 4, 6, 2, 3])
    ]
    scheduler, runner = engine.scheduler, engine.runner
    result = ladder(engine, items, LADDER, 2)
    assert (engine.scheduler, engine.runner) == (scheduler, runner)
    return {rung["rung"]: rung for rung in result["rungs"]} | {"result": result}


def test_every_rung_runs_the_whole_load(climbed):
    assert climbed["result"]["output_tokens"] == 43
    assert [len(climbed[rung.name]["rates"]) for rung in LADDER] == [2] * 5
    assert climbed["one"]["ratio_to_first"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_decode_steps_of_the_rungs_by_hand(climbed):
    # Alone, each of the 43 tokens but the 10 first ones takes a step.
    assert climbed["one"]["decode_steps"] == 33
    # In batches of 4 the longest counts, a little more while later prompts are computed.
    assert 8 + 7 + 2 <= climbed["static"]["decode_steps"] <= 8 + 7 + 2 + 4
    assert climbed["continuous"]["decode_steps"] < climbed["static"]["decode_steps"]
    found = climbed["result"]["batching"]
    assert found["bound"] == pytest.approx(4 * (8 + 7 + 2) / 33)
    assert found["decode_steps_ratio"] == pytest.approx(
        climbed["static"]["decode_steps"] / climbed["continuous"]["decode_steps"]
    )
    assert found["decode_steps_fraction"] == pytest.approx(
        found["decode_steps_ratio"] / found["bound"]
    )


def test_only_the_last_rung_shares_prompts(climbed):
    total = climbed["result"]["prompt_tokens"]
    for name in ("one", "static", "continuous", "chunked"):
        assert climbed[name]["prefill_tokens"] == total
    assert climbed["prefix"]["prefill_tokens"] == total - 9 * 12


def test_continuous_batching_reaches_its_bound_on_a_long_load():
    limits = SchedulerLimits(8, 512, 64, (2000,))
    engine = engine_without_device(limits, SchedulerPolicy(), 4096)
    items = make_workload("sharegpt", 256, 0, 0, 1000, 4096, scale=0.25)
    found = ladder(engine, items, rungs_named(["static", "continuous"]), 1)["batching"]
    assert found["bound"] > 2
    assert found["decode_steps_fraction"] >= 0.9


def test_the_bound_in_seconds_is_that_of_steps_with_all_slots_alive():
    """By hand: 2 slots, 6 output tokens besides the first ones; full steps take 2 s, others 1 s."""

    def steps(*alive: int) -> SimpleNamespace:
        notes = [StepNote(n, 0, 2.0 if n == 2 else 1.0) for n in alive]
        return SimpleNamespace(decode_steps=notes, prompt_steps=[], prefill_tokens=0)

    timeline = SimpleNamespace(output_tokens=8, elapsed=9.0, ttfts=lambda **_: [], tpots=[])
    static, continuous = Runs(), Runs()
    static.add(timeline, steps(2, 1, 2, 1), 0)
    continuous.add(timeline, steps(2, 2, 1, 1), 0)
    found = _batching({"static": static, "continuous": continuous}, [1, 2, 1, 2], 2)
    assert found["bound_seconds"] == pytest.approx(6 / (3 * 2))
    assert found["decode_seconds_fraction"] == pytest.approx(3 * 2 / 6)


def test_continuous_and_static_answer_alike():
    items = [WorkItem(prompt(5 + n, n), 1 + n % 4) for n in range(9)]
    outputs = []
    for rung in LADDER:
        engine = fake_engine()
        with running_as(engine, rung.policy, rung.full_batch):
            run = drive_feed(engine, Waves(items, rung.wave_size(9, 4)), 4)
        outputs.append(run.outputs)
    assert all(output == outputs[0] for output in outputs)
