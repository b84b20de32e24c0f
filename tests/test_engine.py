"""The engine on the real device programs: whatever the company, it equals the naive loop."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import (
    MAX_MODEL_LEN,
    TINY,
    VOCAB,
    Setup,
    built,
    check,
    drive,
    engine_for,
    naive_logits,
    naive_logprobs,
    request,
    tiny_params,
)

from jaxinfer.compile_watch import CompiledAfterReadyError, CompileWatch
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer.startup import build_engine

SPLIT = Setup()  # chunks of 32 split prompts; room for all
WHOLE = Setup(chunk=128)  # chunks hold several prompts or one whole
TIGHT = Setup(pages=12)  # little more than one full sequence: preempts
SETUPS = {"split": SPLIT, "whole": WHOLE, "tight": TIGHT}
GREEDY = SamplingParams(temperature=0)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, MAX_MODEL_LEN - 1)

OPTIONS = {
    "greedy": GREEDY,
    "draw": SamplingParams(temperature=0.9),
    "cold": SamplingParams(temperature=1e-9),
    "top_k": SamplingParams(temperature=1.2, top_k=7),
    "top_k over the vocabulary": SamplingParams(temperature=1.2, top_k=10 * VOCAB),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=2.0, min_p=0.2),
    "all filters": SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01),
    "bias": SamplingParams(temperature=0, logit_bias=((5, 3.0), (299, 2.5), (0, 2.0))),
    "logprobs": SamplingParams(temperature=0, logprobs=5),
    "chosen logprob": SamplingParams(temperature=1.0, logprobs=0),
    "most logprobs": SamplingParams(temperature=0, logprobs=20),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.5),
    "presence": SamplingParams(temperature=0.7, presence_penalty=1.0),
    "frequency": SamplingParams(temperature=0, frequency_penalty=0.8),
    "all penalties": SamplingParams(
        temperature=1.0,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.4,
        logprobs=2,
        top_p=0.9,
    ),
}


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB, length).tolist()


def mixed_requests(seed: int, count: int, longest: int = MAX_MODEL_LEN):
    """Random lengths; every option in turn, so one batch mixes them all."""
    rng, names, requests = np.random.default_rng(seed), list(OPTIONS), []
    for i in range(count):
        length = int(rng.integers(1, longest - 1))
        new = int(rng.integers(1, min(40, longest - length) + 1))
        stops = tuple(rng.integers(0, VOCAB, 3).tolist()) if i % 3 == 0 else ()
        params = OPTIONS[names[i % len(names)]]
        if i % 6 == 0:
            params = dataclasses.replace(params, stop_token_ids=stops[:1])
        requests.append(
            request(f"{i} {names[i % len(names)]}", prompt(rng, length), new, params, i, stops)
        )
    return requests


@pytest.mark.parametrize("setup", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("length", LENGTHS)
def test_alone_it_equals_the_naive_loop(setup, length):
    """Up to a prompt of max_model_len - 1 tokens, which answers exactly one."""
    r = request("r", prompt(np.random.default_rng(length), length), min(20, MAX_MODEL_LEN - length))
    check(r, drive(engine_for(setup), [r])["r"])


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("name", SETUPS)
def test_in_company_with_every_option_mixed_it_equals_the_naive_loop(name, overlap):
    """Other lengths, other options, chunks that split prompts, preemption: nothing shows."""
    requests = mixed_requests(seed=1, count=64)
    engine = engine_for(SETUPS[name], overlap)
    outputs = drive(engine, requests, arrivals=3)
    assert (engine.counters.preemptions > 5) == (name == "tight")
    for r in requests:
        check(r, outputs[r.id])
    ends = {output.finish for output in outputs.values()}
    assert ends >= {FinishReason.LENGTH, FinishReason.EOS}


def test_alone_and_among_up_to_seven_others_it_says_the_same():
    rng = np.random.default_rng(4)
    r = request("it", prompt(rng, 40), 30)
    alone = drive(engine_for(SPLIT), [r])["it"].tokens
    logits = naive_logits([*r.prompt, *alone])[len(r.prompt) - 1 :]
    best = np.sort(logits, axis=-1)
    assert (best[:, -1] - best[:, -2])[:-1].min() > 1e-3, "the prompt must leave no near tie"
    for others in range(1, 8):
        company = [
            request(f"{i}", prompt(rng, int(rng.integers(1, 90))), 30) for i in range(others)
        ]
        at = int(rng.integers(0, others + 1))
        outputs = drive(engine_for(SPLIT), [*company[:at], r, *company[at:]], arrivals=2)
        assert outputs["it"].tokens == alone


@pytest.mark.parametrize(
    "name", [n for n in OPTIONS if "penalt" in n or n in ("repetition", "frequency")]
)
def test_penalties_survive_preemption(name):
    """The history is rebuilt from the tokens, prompt and output told apart."""
    rng = np.random.default_rng(9)
    requests = [request(f"{i}", prompt(rng, 5 + i), 100, OPTIONS[name], seed=i) for i in range(4)]
    engine = engine_for(TIGHT)
    outputs = drive(engine, requests)
    assert engine.counters.preemptions > 0
    roomy = drive(engine_for(SPLIT), requests)
    for r in requests:
        check(r, outputs[r.id])
        check(r, roomy[r.id])


SOAK = Setup(slots=64, chunk=64, pages=112)


def soak_requests(count: int):
    rng, requests, cancels = np.random.default_rng(57), [], {}
    names = list(OPTIONS)
    for i in range(count):
        length, new = int(rng.integers(1, 21)), int(rng.geometric(0.06))
        params = OPTIONS[names[i % len(names)]] if i % 4 == 0 else GREEDY
        r = request(f"{i}", prompt(rng, length), min(new, 90), params, seed=i)
        requests.append(r)
        if rng.random() < 0.1:
            cancels[r.id] = int(rng.integers(1, 20))
    return requests, cancels


def test_soak_of_2000_requests_overlapped_equals_synchronous():
    """Concurrency 64, chunks, pressure and cancels: all outputs equal but for near ties."""
    requests, cancels = soak_requests(2000)
    runs = []
    for overlap in (True, False):
        engine = engine_for(SOAK, overlap)
        runs.append(drive(engine, requests, arrivals=8, cancel_after=cancels))
        assert engine.counters.aborted > 50 and engine.counters.preemptions > 0
    ties = 0
    for i, r in enumerate(requests):
        overlapped, synchronous = (outputs[r.id] for outputs in runs)
        common = min(len(overlapped.tokens), len(synchronous.tokens))
        same = overlapped.tokens[:common] == synchronous.tokens[:common]
        if overlapped.finish is not FinishReason.CANCELLED and same:
            assert len(overlapped.tokens) == len(synchronous.tokens)
        ties += not same
        if i % 25 == 0 or not same:  # each of two that differ equals the naive loop: a near tie
            check(r, overlapped)
            check(r, synchronous)
    assert ties <= 4


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_use_of_an_option_compiles_nothing(name):
    """`drive` raises on the first trace or compile, on an engine that has served nothing."""
    rng = np.random.default_rng(0)
    r = request("r", prompt(rng, 50), 6, OPTIONS[name], seed=11)
    check(r, drive(engine_for(SPLIT), [r])["r"])


def test_the_guard_counts_and_raises():
    watch, loud = CompileWatch(), CompileWatch(guard=True)
    try:
        jax.jit(lambda x: x + 41)(jnp.zeros(3))  # before ready: nobody minds
        watch.ready()
        loud.ready()
        with pytest.raises(CompiledAfterReadyError, match="after ready"):
            jax.jit(lambda x: x + 42)(jnp.zeros(3))
        assert watch.compiles_after_ready > 0
        before = watch.compiles_after_ready
        assert loud.compiles_after_ready == 1
        loud.close()
        jax.jit(lambda x: x + 43)(jnp.zeros(3))
        assert watch.compiles_after_ready >= before + 2, "tracing and compiling"
        assert loud.compiles_after_ready == 1, "closed"
    finally:
        watch.close()


def test_an_engine_from_the_start_counts_its_own_compiles():
    model = types.SimpleNamespace(config=TINY, params=tiny_params(), tokenizer=None)
    engine = build_engine(model, SPLIT.config(), guard_compiles=True)
    try:
        assert engine.compiles.compiles_after_ready == 0
        with pytest.raises(CompiledAfterReadyError):
            jax.jit(lambda x: x * 44)(jnp.zeros(3))
    finally:
        engine.compiles.close()


BAD = 77  # a token whose embedding is NaN


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("setup", [SPLIT, WHOLE, TIGHT], ids=SETUPS)
def test_nan_in_one_request_fails_it_alone(setup, overlap):
    """Slots and pages that it used serve others afterwards, untouched by what it left there."""
    params = dict(tiny_params())
    params["embed"] = params["embed"].at[BAD].set(jnp.nan)
    rng = np.random.default_rng(2)
    requests, poisoned = [], set()
    for i in range(40):
        tokens = [t if t != BAD else 0 for t in prompt(rng, int(rng.integers(3, 90)))]
        if i % 3 == 1:
            tokens[int(rng.integers(0, len(tokens)))] = BAD
            poisoned.add(f"{i}")
        # Nobody else says the bad token, which would be a fault of its own.
        ban = SamplingParams(temperature=0, logit_bias=((BAD, -100.0),))
        requests.append(request(f"{i}", tokens, 12, ban))
    outputs = drive(engine_for(setup, overlap, params), requests, arrivals=4)
    for r in requests:
        if r.id in poisoned:
            assert outputs[r.id].finish is FinishReason.ERROR
            assert outputs[r.id].tokens == [] and "not finite" in outputs[r.id].error
        else:
            check(r, outputs[r.id], params)


def test_nan_that_comes_while_decoding_ends_the_request_after_its_good_tokens():
    params = dict(tiny_params())
    r = request("r", [3, 1, 4], 20)
    said = drive(engine_for(SPLIT), [r])["r"].tokens
    params["embed"] = params["embed"].at[said[5]].set(jnp.nan)
    first = said.index(said[5])
    outputs = drive(engine_for(SPLIT, params=params), [r, request("other", [9], 1)])
    assert outputs["r"].tokens == said[: first + 1]
    assert outputs["r"].finish is FinishReason.ERROR
    assert outputs["other"].finish is FinishReason.LENGTH


def test_padding_tokens_that_are_nan_harm_nobody():
    """Padding computes token 0: its keys and values go to the null page, which all tables name."""
    params = dict(tiny_params())
    params["embed"] = params["embed"].at[0].set(jnp.nan)
    ban = SamplingParams(temperature=0, logit_bias=((0, -100.0),))
    rng = np.random.default_rng(6)
    requests = [
        request(f"{i}", rng.integers(1, VOCAB, 5 + 7 * i).tolist(), 15, ban) for i in range(12)
    ]
    outputs = drive(engine_for(SPLIT, params=params), requests, arrivals=2)
    for r in requests:
        check(r, outputs[r.id], params)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(page_size=32, pages=25),
        Setup(page_size=64, pages=13),
        Setup(attention="reference_static"),
    ],
    ids=["pages of 32", "pages of 64", "attention as on GPUs"],
)
def test_other_geometries_say_the_same(setup):
    requests = mixed_requests(seed=setup.page_size, count=16)
    outputs = drive(engine_for(setup), requests, arrivals=3)
    for r in requests:
        check(r, outputs[r.id])


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        (Setup(kv_dtype="bfloat16"), 0.006),
        (Setup(dtype="bfloat16"), 0.02),
        (Setup(kv_dtype="float16", chunk=64), 0.001),
        (Setup(kv_dtype="int8"), 0.02),
        (Setup(kv_dtype="float8_e4m3fn"), 0.08),
    ],
    ids=["bfloat16 pool", "bfloat16 model", "float16 pool", "int8 pool", "float8 pool"],
)
def test_narrower_dtypes_lose_precision_only(setup, error):
    """`error` is the root mean square of logprobs; a dense loop in bfloat16 has 0.013."""
    params = SamplingParams(temperature=0, logprobs=5)
    requests = [dataclasses.replace(r, params=params) for r in mixed_requests(seed=3, count=16)]
    outputs = drive(engine_for(setup), requests, arrivals=3)
    squares = []
    for r in requests:
        output = outputs[r.id]
        check(r, output, tiny_params(), tolerance=10 * error)
        exact = naive_logprobs([*r.prompt, *output.tokens])[len(r.prompt) - 1 :]
        for token, said, line in zip(output.tokens, output.logprobs, exact):
            squares.append((said.logprob - line[token]) ** 2)
    assert np.mean(squares) ** 0.5 < error


def test_sharded_over_two_devices_it_says_the_same():
    """Parameters, pools and heads are divided; nothing compiles after the start here either."""
    setup = Setup(devices=2)
    engine, requests = built(setup), mixed_requests(seed=21, count=24)
    for (k, _), whole in zip(engine.runner.pools, built(SPLIT).runner.pools):
        assert len(k.sharding.device_set) == 2
        assert k.sharding.shard_shape(k.shape)[1] == whole[0].shape[1] // 2
    outputs = drive(engine, requests, arrivals=3)
    for r in requests:
        check(r, outputs[r.id])


def test_one_slot_and_a_chunk_of_one_token():
    setup = Setup(slots=1, chunk=1, pages=9)
    requests = mixed_requests(seed=8, count=4, longest=30)
    outputs = drive(engine_for(setup), requests)
    for r in requests:
        check(r, outputs[r.id])


def test_limits_and_memory_are_those_of_what_was_built():
    engine = built(SPLIT)
    assert engine.limits.max_model_len == MAX_MODEL_LEN
    assert engine.limits.kv_tokens == (SPLIT.pages - 1) * SPLIT.page_size
    pools, params = engine.runner.pools, engine.runner.params
    assert engine.memory.pool_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    assert engine.memory.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
