"""Rules about tokens and structures through the real engine: what comes is what was asked for, and
it is the same alone, in a batch, without overlap, after preemption, and when masks are late."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import numpy as np
import pytest
from fake_engine import EOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import Output, Setup, built, drive, engine_for, naive_logprobs

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.request import Abort, FinishReason, Request, RequestError, SamplingParams, Submit
from jaxinfer.structured import StructuredOutput as S
from jaxinfer.text import TextProcessor
from jaxinfer.token_masks import FollowedGrammar

ROOMY, TIGHT = Setup(), Setup(pages=12)  # as in test_engine, whose programs these are
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    **COMPACT,
}


def asks(given: dict[str, tuple[list[int], dict]]) -> list[Request]:
    """The requests of prompts and parameters by name."""
    text = TextProcessor(byte_tokenizer(), [EOS], built(ROOMY).limits)
    found = []
    for name, (prompt, params) in given.items():
        usual = {"max_new_tokens": 60, "temperature": 1.0, "seed": len(name)}
        found += text.requests(prompt, SamplingParams(**(usual | params)), name, 0.0)
    return found


def said(output: Output) -> str:
    return bytes(t for t in output.tokens if t < 256).decode("utf-8", "replace")


MIXED = {
    "schema": ([1, 2, 3], {"structured": S.json_schema(SCHEMA)}),
    "greedy": ([3] * 30, {"structured": S.json_schema(SCHEMA), "temperature": 0.0}),
    "samples": ([6], {"structured": S.json_schema(SCHEMA), "n": 3, "top_k": 5, "seed": 3}),
    "full": ([7] * 20, {"structured": S.regex("[a-f]{8}!"), "logprobs": 3, "frequency_penalty": 1.0,
                        "repetition_penalty": 1.2, "logit_bias": ((97, 5.0),)}),
    "choice": ([8], {"structured": S.choice(["yes", "no", "née"]), "min_p": 0.01}),
    "grammar": ([9, 9], {"structured": S.grammar('start: "<" item+ ">"\nitem: "a" | "b"'),
                         "stop": ("bb",)}),
    "cut": ([4], {"structured": S.json_schema(SCHEMA), "max_new_tokens": 5}),
    "least": ([5] * 9, {"structured": S.regex("z*"), "min_tokens": 7, "temperature": 0.0}),
    "ids": ([5] * 40, {"allowed_token_ids": (65, 66, 67, EOS), "temperature": 2.0}),
    "words": ([1, 7], {"bad_words": ("a", "bc", "\xa3"), "logprobs": 0}),
    "early": ([2] * 17, {"min_tokens": 20, "stop_token_ids": tuple(range(200, 255)),
                         "max_new_tokens": 30}),
    "free": ([9] * 33, {}),
    "free full": ([9] * 12, {"logprobs": 2, "presence_penalty": 0.5}),
}  # fmt: skip


@pytest.fixture(scope="module")
def together() -> dict[str, Output]:
    """All of them in one batch, which preempts none."""
    return drive(engine_for(ROOMY), asks(MIXED))


def test_every_output_is_what_was_asked_for(together):
    for name in ("schema", "greedy", "samples", "samples.1", "samples.2"):
        output = together[name]
        assert output.finish is FinishReason.EOS and output.tokens[-1] == EOS, output
        value = json.loads(said(output))
        assert set(value) == {"a", "b", "c"} and 0 <= value["a"] <= 99
        assert value["b"] in ("x", "yy", None) and 1 <= len(value["c"]) <= 2
    assert len({said(together[n]) for n in ("samples", "samples.1", "samples.2")}) > 1
    assert re.fullmatch("[a-f]{8}!", said(together["full"]))
    assert together["choice"].finish is FinishReason.EOS
    assert said(together["choice"]) in ("yes", "no", "née")
    assert re.match("<[ab]+>?", said(together["grammar"]))
    assert together["cut"].finish is FinishReason.LENGTH and len(together["cut"].tokens) == 5
    assert said(together["cut"]) == '{"a":'
    assert together["least"].tokens[:7] == [ord("z")] * 7
    assert set(together["ids"].tokens) <= {65, 66, 67, EOS}
    words = bytes(t for t in together["words"].tokens if t < 256)
    assert b"a" not in words and b"bc" not in words and "\xa3".encode() not in words
    early = together["early"].tokens
    assert not set(early[:20]) & {EOS, *range(200, 255)} and len(early) >= 20


def test_logprobs_are_the_models_own(together):
    """Of what it would have said, not of what was left of it."""
    (request,) = (r for r in asks(MIXED) if r.id == "full")
    output = together["full"]
    exact = naive_logprobs([*request.prompt, *output.tokens])[len(request.prompt) - 1 :]
    for token, entry, line in zip(output.tokens, output.logprobs, exact):
        assert abs(entry.logprob - line[token]) < 1e-4
        np.testing.assert_allclose([v for _, v in entry.top], -np.sort(-line)[:3], atol=1e-4)
    assert any(t not in dict(e.top) for t, e in zip(output.tokens, output.logprobs))


def the_same(outputs: dict[str, Output], others: dict[str, Output]) -> None:
    assert outputs.keys() == others.keys()
    for name, output in outputs.items():
        assert (output.tokens, output.finish) == (others[name].tokens, others[name].finish), name


def test_the_same_without_overlap_and_alone(together):
    the_same(together, drive(engine_for(ROOMY, overlap=False), asks(MIXED), arrivals=2))
    for name in ("schema", "full", "words", "free"):
        alone = drive(engine_for(ROOMY), asks({name: MIXED[name]}))
        the_same(alone, {name: together[name]})


@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_after_preemption(together, overlap):
    engine = engine_for(TIGHT, overlap)
    the_same(together, drive(engine, asks(MIXED)))
    assert engine.counters.preemptions > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_when_masks_are_late(together, monkeypatch, overlap):
    """Rows whose mask is not known sit steps out, at any moment, also the last one of an output."""
    known, rng, held = FollowedGrammar.wait, random.Random(5), []

    def late(self, timeout):
        done = known(self, timeout)
        if self.settling and rng.random() < 0.6:
            held.append(self)
            return False
        return done

    settle = Engine._settle

    def settling(self, plan, *rest):
        FollowedGrammar.settling = True
        try:
            settle(self, plan, *rest)
        finally:
            FollowedGrammar.settling = False

    monkeypatch.setattr(FollowedGrammar, "settling", False, raising=False)
    monkeypatch.setattr(FollowedGrammar, "wait", late)
    monkeypatch.setattr(Engine, "_settle", settling)
    monkeypatch.setattr("jaxinfer.engine.wait_for", lambda *args: None)
    the_same(together, drive(engine_for(ROOMY, overlap), asks(MIXED), arrivals=3))
    the_same(together, drive(engine_for(TIGHT, overlap), asks(MIXED)))
    assert len(held) > 100


def test_rules_that_leave_no_token_end_their_request_alone(together):
    broken = {
        "both": ([3], {"structured": S.regex("[a-c]{4}"), "allowed_token_ids": (97, 98)}),
        "never": ([4], {"structured": S.regex("q"), "bad_words": ("q",)}),
        "longer": ([5], {"structured": S.choice(["ab"]), "min_tokens": 5}),
    }
    engine = engine_for(ROOMY)
    outputs = drive(engine, asks(MIXED | broken), cancel_after={"samples": 3})
    for name, left in (("both", 4), ("never", 0), ("longer", 2)):
        assert outputs[name].finish is FinishReason.RULES and len(outputs[name].tokens) == left
        assert f"no token may follow the first {left}: " in outputs[name].error
        assert "structured" in outputs[name].error
        del outputs[name]
    assert outputs.pop("samples").finish is FinishReason.CANCELLED
    the_same(outputs, {name: o for name, o in together.items() if name != "samples"})


def test_nobody_waits_behind_a_grammar_that_is_being_read(monkeypatch):
    """It has no slot, and can be left or run out of time like any that waits."""
    monkeypatch.setattr(FollowedGrammar, "wait", lambda self, timeout: False)
    engine = engine_for(ROOMY)
    form = {"structured": S.regex("a{3}"), "max_new_tokens": 5}
    given = asks({f"slow{i}": ([1, 2], form) for i in range(12)} | {"free": MIXED["free"]})
    given[1] = dataclasses.replace(given[1], deadline=5.0)
    for each in given:
        engine.execute(Submit(each), 0.0)
    with pytest.raises(ValueError, match="already in use"):
        engine.execute(Submit(given[0]), 0.0)
    ends = {}
    while "free" not in ends:
        ends |= {e.request_id: e.finish for e in engine.step(1.0) if e.finish}
    assert ends == {"free": FinishReason.LENGTH}
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 12, 24) and engine.has_work
    engine.execute(Abort("slow0"), 2.0)
    ends |= {e.request_id: e.finish for e in engine.step(5.0) if e.finish}
    assert ends["slow0"] is FinishReason.CANCELLED and ends["slow1"] is FinishReason.DEADLINE
    monkeypatch.undo()
    while engine.has_work:
        ends |= {e.request_id: e.finish for e in engine.step(6.0) if e.finish}
    assert [ends[f"slow{i}"] for i in range(2, 12)] == [FinishReason.EOS] * 10
    counters = engine.counters
    assert (counters.received, counters.finished, counters.aborted) == (13, 11, 2)
    engine.scheduler.check_invariants()


def values(depth: int = 2):
    """Schemas whose values are short, with what makes a value one of them."""
    plain = st.sampled_from(
        [
            ({"type": "boolean"}, lambda v: isinstance(v, bool)),
            ({"type": "null"}, lambda v: v is None),
            ({"type": "integer", "minimum": -3, "maximum": 12}, lambda v: -3 <= v <= 12),
            ({"type": "string", "maxLength": 3}, lambda v: isinstance(v, str) and len(v) <= 3),
            (
                {"type": "string", "pattern": "^[x-z]{1,2}$"},
                lambda v: re.fullmatch("[x-z]{1,2}", v),
            ),
            ({"enum": ["é", 7, None]}, lambda v: v in ("é", 7, None)),
            ({"const": {"k": [1]}}, lambda v: v == {"k": [1]}),
        ]
    )
    if not depth:
        return plain
    inner = values(depth - 1)
    return plain | st.lists(inner, min_size=1, max_size=2).map(_object) | inner.map(_array)


def _object(parts):
    names = [f"p{i}" for i in range(len(parts))]
    schema = {
        "type": "object",
        "properties": {name: part[0] for name, part in zip(names, parts)},
        "required": names,
        "additionalProperties": False,
    }

    def fits(value):
        return list(value) == names and all(p[1](value[n]) for n, p in zip(names, parts))

    return schema, fits


def _array(part):
    schema = {"type": "array", "items": part[0], "minItems": 1, "maxItems": 2}
    return schema, lambda v: 1 <= len(v) <= 2 and all(part[1](entry) for entry in v)


@settings(max_examples=6)
@given(st.lists(values(), min_size=6, max_size=6), st.integers(0, 1000))
def test_what_comes_is_a_value_of_its_schema(schemas, seed):
    given = {
        str(i): ([i + 1], {"structured": S.json_schema({**schema, **COMPACT}), "seed": seed,
                           "temperature": 1.5, "max_new_tokens": 100})
        for i, (schema, _) in enumerate(schemas)
    }  # fmt: skip
    outputs = drive(engine_for(ROOMY), asks(given))
    for name, (schema, fits) in zip(given, schemas):
        output = outputs[name]
        if output.finish is FinishReason.LENGTH:
            continue  # it had no room to end
        assert output.finish is FinishReason.EOS, output
        assert fits(json.loads(said(output))), (schema, said(output))


def test_masks_are_uploaded_when_they_change_only():
    """A rule that says the same at every step costs no upload there."""
    engine = engine_for(ROOMY)
    put, uploads = engine.runner.programs.put_masks, []
    engine.runner.programs = dataclasses.replace(
        engine.runner.programs, put_masks=lambda *args: uploads.append(1) or put(*args)
    )
    drive(engine, asks({"ids": MIXED["ids"], "early": MIXED["early"]}))
    assert 1 <= len(uploads) <= 2  # both together at first, and where one's ends come in


def test_requests_without_rules_run_no_program_for_them(monkeypatch):
    engine = engine_for(ROOMY)
    engine.runner.programs = dataclasses.replace(engine.runner.programs, forbid={}, put_masks=None)
    outputs = drive(engine, asks({name: MIXED[name] for name in ("free", "free full")}))
    assert outputs["free"].finish is FinishReason.LENGTH


def test_the_set_has_what_masks_need():
    assert EngineConfig().overlap  # which all of this is about
    programs = built(ROOMY).runner.programs
    assert set(programs.forbid) == {rows for rows, _ in programs.sample}


def test_one_structure_needs_an_end():
    text = TextProcessor(byte_tokenizer(), [], built(ROOMY).limits)
    with pytest.raises(RequestError, match="stop_token_ids"):
        text.requests([1], SamplingParams(structured=S.json_object()), "r", 0.0)
    given = SamplingParams(structured=S.choice(["ab"]), stop_token_ids=(9,), max_new_tokens=9)
    (output,) = drive(engine_for(ROOMY), text.requests([1], given, "r", 0.0)).values()
    assert (output.tokens, output.finish) == ([97, 98, 9], FinishReason.STOP_ID)
