"""What the model thought of a prompt, on the real device programs, against the naive loop."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import SPLIT, TIGHT
from tiny_engine import (
    GREEDY,
    MAX_MODEL_LEN,
    TOLERANCE,
    VOCAB,
    Setup,
    check,
    drive,
    engine_for,
    request,
    tiny_params,
)

from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer.step_plan import SCORED_ROWS, Piece, StepPlan, pack_scored
from jaxinfer.tally import Tally

PAGE = SPLIT.page_size
SCORED = SamplingParams(temperature=0, prompt_logprobs=3)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def drive_more(engine, *requests):
    engine._tally = Tally()
    return drive(engine, list(requests))


@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_of_all_lengths_side_by_side(overlap):
    """In one chunk and over several, with and without other options, scored or not."""
    lengths = [1, 2, SPLIT.chunk, SPLIT.chunk + 1, 100, MAX_MODEL_LEN - 1, 17, 64, 5]
    params = [
        dataclasses.replace(SCORED, prompt_logprobs=None if i % 4 == 3 else (0, 20, 5)[i % 3])
        for i in range(len(lengths))
    ]
    params[4] = dataclasses.replace(params[4], logprobs=4, repetition_penalty=1.3)
    requests = [
        request(f"{i}", tokens(i, length), min(6, MAX_MODEL_LEN - length), params[i])
        for i, length in enumerate(lengths)
    ]
    outputs = drive(engine_for(SPLIT, overlap), requests, arrivals=2)
    for r in requests:
        check(r, outputs[r.id])


@pytest.mark.parametrize("length", [1, 2, PAGE, 3 * PAGE, 3 * PAGE + 1, MAX_MODEL_LEN])
def test_nothing_is_generated_where_nothing_is_asked_for(length):
    """Not even room for a token is needed, and what was computed is found by others."""
    engine, prompt = engine_for(SPLIT), tokens(length, length)
    r = request("r", prompt, 0, SCORED)
    output = drive(engine, [r])["r"]
    check(r, output)
    assert output.tokens == [] and output.finish is FinishReason.LENGTH
    if length < MAX_MODEL_LEN:
        after = request("after", prompt, 1)
        check(after, drive_more(engine, after)["after"])
        assert engine.counters.prefix_hits == (length - 1) // PAGE * PAGE


def test_a_prompt_in_the_cache_is_computed_again():
    engine, prompt = engine_for(SPLIT), tokens(1, 70)
    first, *others = [request(f"{i}", prompt, 2, SCORED) for i in range(3)]
    check(first, drive(engine, [first])["0"])
    outputs = drive_more(engine, *others, request("plain", prompt, 2))
    for r in others:
        check(r, outputs[r.id])
    assert outputs["1"].prompt_logprobs == outputs["2"].prompt_logprobs
    assert engine.counters.prefix_hits == 64, "who does not ask has its hit"


def test_preempted_in_the_middle():
    """Pages for two of eight; nothing is said twice, and nothing is left out."""
    requests = [request(f"{i}", tokens(i, 60), 40, SCORED) for i in range(8)]
    engine = engine_for(TIGHT)
    outputs = drive(engine, requests)
    assert engine.counters.preemptions > 0
    for r in requests:
        check(r, outputs[r.id])


def test_a_prompt_preempted_in_the_middle_goes_on_from_what_it_published():
    engine, r = engine_for(SPLIT), request("r", tokens(2, 120), 2, SCORED)
    watched, preempt = engine.scheduler, engine.scheduler._preempt
    chunks: list[tuple[int, int]] = []

    def plan(now, step=watched.plan):
        for sequence in list(watched.running):
            if sequence.num_scored == 2 * SPLIT.chunk and len(chunks) == 2:
                preempt(sequence, now)
        made = step(now)
        chunks.extend((p.start, len(p.scored)) for p in (made.pieces if made else ()))
        return made

    watched.plan = plan
    check(r, drive(engine, [r])["r"])
    assert chunks == [(0, 32), (32, 32), (64, 32), (96, 23)]


@settings(max_examples=8)
@given(data=st.data())
def test_what_is_said_of_a_prompt_is_what_was_said_of_an_output(data):
    """To the bit where all programs agree to the bit, whatever company both have."""
    setup = Setup(deterministic=True, pages=60)
    seed, length = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 60))
    company = [
        request(f"c{i}", tokens(seed + i, data.draw(st.integers(1, 50))), 5, SCORED)
        for i in range(data.draw(st.integers(0, 6)))
    ]
    params = SamplingParams(temperature=1.0, logprobs=20)
    engine, r = engine_for(setup), request("r", tokens(seed, length), 40, params, seed=seed)
    output = drive(engine, [*company, r])["r"]
    scored = request("s", [*r.prompt, *output.tokens], 0, SamplingParams(prompt_logprobs=20))
    said = drive_more(engine, scored, *company)["s"].prompt_logprobs
    if not engine.scheduler.policy.separate_phases:
        assert said[length - 1 :] == output.logprobs
    for entry, before in zip(said[length - 1 :], output.logprobs, strict=True):
        assert abs(entry.logprob - before.logprob) <= TOLERANCE
    alone = drive(engine_for(setup), [scored])["s"].prompt_logprobs
    assert alone == said


@pytest.mark.parametrize("differs", [False, True])
def test_the_same_bits_in_any_company_and_after_a_preemption(differs):
    setup = Setup(deterministic=True, pages=60, differs=differs)
    requests = [request(f"{i}", tokens(i, 20 + 9 * i), 30, SCORED) for i in range(8)]
    together = drive(engine_for(setup), requests)
    tight = drive(engine_for(setup, overlap=False), requests, arrivals=1)
    for r in requests:
        alone = drive(engine_for(setup), [r])[r.id]
        assert together[r.id] == alone == tight[r.id]
        check(r, alone)


def test_a_model_that_is_no_number_fails_the_prompt():
    params = jax.tree.map(lambda x: x * np.float32(np.nan), tiny_params())
    r = request("r", tokens(0, 50), 0, SCORED)
    output = drive(engine_for(SPLIT, params=params), [r])["r"]
    assert output.finish is FinishReason.ERROR and "not finite" in output.error
    assert not output.prompt_logprobs


def test_prompts_that_nobody_asks_about_are_not_scored():
    """The program is there, and is not run."""
    engine = engine_for(SPLIT)
    engine.runner.programs = dataclasses.replace(engine.runner.programs, score={})
    r = request("r", tokens(0, 50), 3, dataclasses.replace(GREEDY, logprobs=3))
    check(r, drive(engine, [r])["r"])
    with pytest.raises(KeyError):
        drive_more(engine, request("s", tokens(0, 50), 3, SCORED))


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 200), st.floats(0, 1), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    )
)
def test_blocks_name_the_rows_of_the_chunk_and_what_follows_them(parts):
    plan, expected, first = StepPlan(0), [], 0
    for number, (start, length, low, high) in enumerate(parts):
        sequence = type("S", (), {"tokens": [1000 * number + i for i in range(300)]})()
        low, high = sorted((start + int(low * length), start + int(high * length)))
        plan.pieces.append(Piece(sequence, start, length, True, range(low, high)))
        expected += [(first + p - start, 1000 * number + p + 1) for p in range(low, high)]
        first += length
    blocks = pack_scored(plan)
    assert all(block.shape == (2, SCORED_ROWS) and block.dtype == np.int32 for block in blocks)
    assert len(blocks) == -(-len(expected) // SCORED_ROWS)
    found = [tuple(column) for block in blocks for column in block.T.tolist()]
    assert found[: plan.num_scored] == expected
    assert set(found[plan.num_scored :]) <= {(0, 0)}


@given(st.integers(0, 20), st.lists(st.integers(1, 9), min_size=1), st.integers(1, 7))
def test_entries_stay_what_they_are_however_they_are_joined_and_cut(top, sizes, most):
    rng = np.random.default_rng(top)
    blocks = [rng.integers(-9, 9, (size, 42)).astype(np.int32) for size in sizes]
    for block in blocks:
        block[:, 0] = rng.normal(size=len(block)).astype(np.float32).view(np.int32)
        block[:, 22:] = rng.normal(size=(len(block), 20)).astype(np.float32).view(np.int32)
    joined = PromptLogprobs.of_columns(blocks[0], top)
    for block in blocks[1:]:
        joined = joined.then(PromptLogprobs.of_columns(block, top))
    lines = np.concatenate(blocks)
    assert len(joined) == sum(sizes) and joined.finite
    for said, line in zip(joined, lines, strict=True):
        floats = line.view(np.float32).tolist()
        assert (said.logprob, said.rank) == (floats[0], line[1])
        assert said.top == tuple(zip(line[2 : 2 + top].tolist(), floats[22 : 22 + top]))
    parts = list(joined.parts(most))
    assert [entry for part in parts for entry in part] == [*joined]
    assert all(len(part) <= most for part in parts)
    lines[0, 0] = np.float32(np.inf).view(np.int32)
    assert not PromptLogprobs(lines).finite
