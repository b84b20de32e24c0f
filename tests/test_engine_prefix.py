"""Prefixes found in the cache, on the real device programs: nothing in the answers shows it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_engine import OPTIONS, SPLIT, TIGHT, WHOLE
from tiny_engine import VOCAB, Output, check, drive, engine_for, request

from jaxinfer.request import FlushPrefixes, Submit
from jaxinfer.tally import Tally

PAGE = SPLIT.page_size
UNCACHED = dataclasses.replace(SPLIT, prefix_cache=False)


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("setup", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_cold_and_then_with_a_hit(setup, length):
    """Prefixes of a page less one, a page, and one more, alone and with more after them."""
    rng = np.random.default_rng(length)
    prefix, engine = tokens(rng, length), engine_for(setup)
    for i, prompt in enumerate([prefix, prefix, [*prefix, 5], prefix + tokens(rng, 20)]):
        r = request(f"{i}", prompt, 12)
        hits = engine.counters.prefix_hits
        check(r, drive_more(engine, r))
        full = (min(length, len(prompt) - 1)) // PAGE * PAGE
        assert engine.counters.prefix_hits - hits == (full if i else 0)


def drive_more(engine, r):
    """`drive` counts from zero: a fresh engine's counters for each request."""
    engine._tally = Tally()
    return drive(engine, [r])[r.id]


@pytest.mark.parametrize("name", ["draw", "all penalties", "logprobs", "bias"])
def test_options_after_a_hit(name):
    """Penalties count tokens that this sequence never computed."""
    rng = np.random.default_rng(3)
    prefix = tokens(rng, 50)
    requests = [request(f"{i}", [*prefix, i], 30, OPTIONS[name], seed=i) for i in range(12)]
    engine = engine_for(SPLIT)
    outputs = drive(engine, requests, arrivals=3)
    assert engine.counters.prefix_hits >= 11 * 48
    for r in requests:
        check(r, outputs[r.id])


def test_a_conversation_goes_on_from_its_cached_answers():
    rng = np.random.default_rng(8)
    engine, history, hits = engine_for(SPLIT), tokens(rng, 10), 0
    for turn in range(5):
        r = request(f"{turn}", history, 12)
        output = drive_more(engine, r)
        check(r, output)
        history = [*history, *output.tokens, *tokens(rng, 5)]
        assert engine.scheduler.prefix_hits >= hits
        hits = engine.scheduler.prefix_hits
    assert hits > 100


def test_after_a_flush_nothing_is_found_and_who_runs_goes_on():
    rng = np.random.default_rng(9)
    engine, prompt = engine_for(SPLIT), tokens(rng, 3 * PAGE + 1)
    runs, same = request("runs", prompt, 40), request("same", prompt, 12)
    engine.execute(Submit(runs), 0.0)
    events = [event for _ in range(6) for event in engine.step(0.0)]
    engine.execute(FlushPrefixes(), 0.0)
    engine.scheduler.check_invariants()
    engine.execute(Submit(same), 0.0)
    while engine.has_work:
        events += engine.step(0.0)
    for r in (runs, same):
        mine = [event for event in events if event.request_id == r.id]
        output = Output(tokens=[token for event in mine for token in event.tokens])
        output.finish = mine[-1].finish
        check(r, output)
    assert engine.counters.prefix_hits == 0
    drive_more(engine, request("again", prompt, 12))
    assert engine.counters.prefix_hits == 3 * PAGE


def test_pressure_evicts_and_preempts_and_changes_nothing():
    """Families of prompts with common beginnings in a pool that is far too small for them."""
    rng = np.random.default_rng(5)
    families = [tokens(rng, 40) for _ in range(4)]
    requests = [
        request(f"{i}", families[i % 4][: int(rng.integers(10, 41))] + tokens(rng, 3), 40)
        for i in range(60)
    ]
    for setup in (TIGHT, dataclasses.replace(TIGHT, host_pages=40)):
        for overlap in (True, False):
            engine = engine_for(setup, overlap)
            outputs = drive(engine, requests, arrivals=5)
            assert engine.counters.preemptions > 0 and engine.counters.prefix_hits > 0
            for r in requests:
                check(r, outputs[r.id])


def test_the_cache_only_saves_work():
    rng = np.random.default_rng(6)
    prefix = tokens(rng, 80)
    requests = [request(f"{i}", [*prefix, i, i], 8) for i in range(10)]
    work = {}
    for setup in (SPLIT, UNCACHED):
        engine = engine_for(setup)
        outputs = drive(engine, requests)
        work[setup] = sum(record.chunk_tokens for record in engine.records)
        for r in requests:
            check(r, outputs[r.id])
    assert work[UNCACHED] == 10 * 82 and work[SPLIT] == 82 + 9 * 2
