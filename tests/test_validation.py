"""Every bad field is named with its value and limit; what is accepted can be run as it stands."""

from __future__ import annotations

import math

import pytest

from jaxinfer.request import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_IDS,
    RequestError,
    SamplingParams,
    Scheduling,
)
from jaxinfer.validation import EngineLimits, build_request

LIMITS = EngineLimits(
    vocab_size=100,
    max_model_len=16,
    max_num_seqs=2,
    kv_tokens=1000,
    max_queued_requests=4,
    max_queued_tokens=1000,
)
EOS = (2, 3)


def build(prompt=(1,), limits=LIMITS, timeout=None, **params):
    return build_request(prompt, SamplingParams(**params), limits, EOS, "r1", 10.0, timeout)


def violations(prompt=(1,), limits=LIMITS, **params):
    with pytest.raises(RequestError) as caught:
        build(prompt, limits, **params)
    return {v.field: v.message for v in caught.value.violations}


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-0.1, 100.1, NAN, INF, -INF, 1e-13, 5e-324, "hot", True, None],
        "top_p": [0, -0.5, 1.0001, NAN, INF, "1"],
        "min_p": [-0.1, 1.1, NAN, INF],
        "top_k": [-2, 1.5, "5", -(2**70)],
        "repetition_penalty": [0, -1, 1e-300, 101, NAN, INF],
        "presence_penalty": [-2.1, 2.1, NAN, INF],
        "frequency_penalty": [-2.1, 2.1, NAN, -INF],
        "seed": [-1, MAX_SEED + 1, 0.5],
        "max_new_tokens": [0, -1, 1.5, 16, 2**63],
        "logprobs": [-1, 21, 0.5],
        "n": [0, -1, 65, 1.5, True, None],
    }.items(),
)
def test_values_out_of_range_are_refused_by_name(field, values):
    for value in values:
        found = violations(**{field: value})
        assert set(found) == {field}, value
        assert str(value) in found[field]


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [0, 0.0, 1e-9, 1e-12, 100],
        "top_p": [1e-6, 1],
        "min_p": [0, 1],
        "top_k": [-1, 0, 1, 99],
        "repetition_penalty": [0.01, 1, 2, 100],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "seed": [0, MAX_SEED],
        "max_new_tokens": [1, 15],
        "logprobs": [0, 20],
        "n": [1, 4],
        "logit_bias": [(), ((0, -100.0), (99, 100))],
        "stop": [("a",), tuple("abcdefgh"), ("x" * 1024,)],
        "stop_token_ids": [(0, 99), tuple(range(4, 4 + MAX_STOP_IDS - len(EOS)))],
    }.items(),
)
def test_values_at_the_limits_are_taken(field, values):
    for value in values:
        assert build(**{field: value}).params is not None


@pytest.mark.parametrize("bad", [100, -1, 2**63, 2**31, 1.0, "7"])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_ids_outside_of_the_vocabulary_are_named(field, bad):
    if field == "prompt":
        found = violations(prompt=[5, bad])
    elif field == "logit_bias":
        found = violations(logit_bias=((5, 1.0), (bad, 1.0)))
    else:
        found = violations(stop_token_ids=(5, bad))
    name = f"logit_bias[{bad}]" if field == "logit_bias" else f"{field}[1]"  # as of a mapping
    assert next(iter(found)) == name
    assert repr(bad) in found[name] and "from 0 to 99" in found[name]


def test_logit_bias_values_duplicates_and_count():
    assert set(violations(logit_bias=((5, NAN), (6, 101), (7, 1)))) == {
        "logit_bias[5]",
        "logit_bias[6]",
    }
    assert "twice" in violations(logit_bias=((5, 1.0), (5, 2.0)))["logit_bias"]
    many = tuple((i, 0.0) for i in range(MAX_LOGIT_BIAS + 1))
    assert str(MAX_LOGIT_BIAS) in violations(logit_bias=many)["logit_bias"]


def test_stop_strings_and_ids_are_bounded():
    assert set(violations(stop=("", "a", "x" * 1025))) == {"stop[0]", "stop[2]"}
    assert "65" in violations(stop=("a",) * 65)["stop"]
    assert "tuple" in violations(stop="abc")["stop"]
    too_many = tuple(range(4, 4 + MAX_STOP_IDS - 1))
    assert str(MAX_STOP_IDS) in violations(stop_token_ids=too_many)["stop_token_ids"]
    build(stop_token_ids=too_many, ignore_eos=True)


def scheduled(**fields):
    scheduling = Scheduling(**fields)
    return build_request([1], SamplingParams(), LIMITS, EOS, "r1", 0.0, scheduling=scheduling)


@pytest.mark.parametrize(
    ("field", "bad", "words"),
    [
        ("priority", -1001, "from -1000 to 1000"),
        ("priority", 1001, "from -1000 to 1000"),
        ("priority", 0.5, "must be an integer"),
        ("tenant", "x" * 257, "at most 256"),
        ("tenant", None, "must be a string"),
        ("cache_salt", "x" * 257, "at most 256"),
        ("cache_salt", "a\ud800", "surrogate"),
    ],
)
def test_scheduling_out_of_range_is_refused_by_name(field, bad, words):
    with pytest.raises(RequestError) as caught:
        scheduled(**{field: bad})
    (violation,) = caught.value.violations
    assert violation.field == field and words in violation.message


def test_scheduling_at_the_limits_is_taken():
    for fields in ({"priority": -1000}, {"priority": 1000}, {"tenant": "\U0001f600" * 256}):
        assert scheduled(**fields).scheduling == Scheduling(**fields)


def test_all_violations_come_at_once():
    found = violations(prompt=[], temperature=-1, top_p=2, stop=("",))
    assert set(found) == {"prompt", "temperature", "top_p", "stop[0]"}


@pytest.mark.parametrize(("length", "room"), [(1, 15), (14, 2), (15, 1)])
def test_absent_max_new_tokens_is_up_to_the_limit(length, room):
    assert build(prompt=[1] * length).max_new_tokens == room
    assert build(prompt=[1] * length, max_new_tokens=room).max_new_tokens == room
    message = violations(prompt=[1] * length, max_new_tokens=room + 1)["max_new_tokens"]
    assert "max_model_len is 16" in message and f"at most {room}" in message


@pytest.mark.parametrize("length", [0, 16, 17, 500])
def test_prompts_without_room_are_refused(length):
    assert set(violations(prompt=[1] * length)) == {"prompt"}


def test_a_small_kv_pool_is_named_with_its_numbers():
    small = EngineLimits(100, 64, 2, 32, 4, 1000)
    assert "32 tokens" in violations(prompt=[1] * 32, limits=small)["prompt"]
    message = violations(limits=small, max_new_tokens=40)["max_new_tokens"]
    assert "41" in message and "32 tokens" in message and "at most 31" in message
    assert build(limits=small).max_new_tokens == 31  # absent: what fits


def test_a_prompt_that_the_queue_could_never_hold_is_refused():
    queue = EngineLimits(100, 64, 2, 64, 4, 20)
    assert "20 tokens" in violations(prompt=[1] * 21, limits=queue)["prompt"]
    build(prompt=[1] * 20, limits=queue)


def test_the_request_is_complete():
    request = build(prompt=[5, 6], stop_token_ids=(7, 2), timeout=2.5, top_k=100)
    assert request.prompt == (5, 6)
    assert request.stop_ids == (2, 3, 7)
    assert (request.arrival, request.deadline) == (10.0, 12.5)
    assert request.params.top_k == 0  # the whole vocabulary
    assert build(top_k=-1).params.top_k == 0
    assert build(ignore_eos=True, stop_token_ids=(7,)).stop_ids == (7,)
    assert build(seed=5).seed == 5
    seeds = {build().seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= s <= MAX_SEED for s in seeds)


def test_a_message_says_field_value_limit():
    with pytest.raises(RequestError, match=r"top_p: is 2; it must be above 0 and at most 1"):
        build(top_p=2)
