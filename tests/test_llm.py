"""The offline API over a scripted engine."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from fake_engine import EOS, ScriptedEngine, balanced, byte_tokenizer, echo, forever, limits, says
from jaxinfer_service.cli.serve import serve

from jaxinfer import LLM, FinishReason, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.llm_arguments import FLAGS
from jaxinfer.presets import PRESETS
from jaxinfer.request import RequestError

TOKENIZER = byte_tokenizer()
GREEDY = SamplingParams(temperature=0)


def llm_over(engine):
    return LLM.over(engine, TOKENIZER, TOKENIZER.eos_ids)


def test_texts_ids_and_chats_are_answered_in_order():
    engine = ScriptedEngine(echo)
    llm = llm_over(engine)
    prompts = ["one", [*b"two"], "你好", [{"role": "user", "content": "c"}]]
    answers = llm.generate(prompts, GREEDY)
    assert [a.text for a in answers] == ["one", "two", "你好", "user: c\nassistant:"]
    assert answers[0].token_ids == [*b"one", EOS] and answers[0].prompt_token_ids == [*b"one"]
    assert (answers[0].finish_reason, answers[0].stop) == (FinishReason.EOS, EOS)
    assert 0 <= answers[0].timing.queued <= answers[0].timing.first_token
    assert balanced(engine.counters, engine) and engine.counters.finished == 4


def test_a_bare_prompt_is_one_prompt():
    llm = llm_over(ScriptedEngine(echo))
    for bare in ("ab", [97, 98]):
        assert [a.text for a in llm.generate(bare, GREEDY)] == ["ab"]
    message = {"role": "user", "content": "x"}
    assert len(llm.chat([message])) == 1
    assert len(llm.chat([[message], [message]])) == 2
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_the_engine_queues():
    engine = ScriptedEngine(echo)  # two slots
    most = 0
    step = engine.step

    def watched(now):
        nonlocal most
        most = max(most, len(engine.waiting) + len(engine.running))
        return step(now)

    engine.step = watched
    answers = llm_over(engine).generate([f"p{i}" for i in range(300)], GREEDY)
    assert [a.text for a in answers] == [f"p{i}" for i in range(300)]
    assert most <= 4


def test_parameters_for_each_prompt():
    llm = llm_over(ScriptedEngine(says("one two")))
    each = [SamplingParams(max_new_tokens=2), SamplingParams(stop=(" t",), logprobs=0)]
    short, stopped = llm.generate(["a", "b"], each)
    assert (short.text, short.finish_reason, short.logprobs) == ("on", FinishReason.LENGTH, [])
    assert (stopped.text, stopped.stop) == ("one", " t")
    assert bytes(stopped.token_ids) == b"one t" and len(stopped.logprobs) == 5
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_bad_prompt_starts_nothing_and_is_named():
    engine = ScriptedEngine(echo)
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt: is empty"):
        llm_over(engine).generate(["fine", ""], GREEDY)
    assert engine.counters.received == 0
    with pytest.raises(RequestError, match=r"^top_p: is 2"):
        llm_over(engine).generate("fine", SamplingParams(top_p=2))


def test_streams_give_pieces_and_may_be_left():
    engine = ScriptedEngine(forever, limits(max_model_len=1000, kv_tokens=1000))
    llm = llm_over(engine)
    stream = llm.stream("x", GREEDY)
    assert next(stream).text == "!" and next(stream).text == '"'
    beside = llm.generate("y", SamplingParams(max_new_tokens=3))  # in the middle of it
    assert beside[0].text == '!"#'
    stream.close()
    assert not engine.has_work and engine.counters.aborted == 1
    deltas = [*llm.stream("x", SamplingParams(max_new_tokens=5))]
    assert "".join(d.text for d in deltas) == '!"#$%'
    assert deltas[-1].finish.reason is FinishReason.LENGTH


def test_an_interrupt_leaves_the_engine_empty():
    engine = ScriptedEngine(forever, limits(max_model_len=1000, kv_tokens=1000))
    llm = llm_over(engine)
    step, count = engine.step, iter(range(5))

    def interrupted(now):
        if next(count, None) is None:
            engine.step = step
            raise KeyboardInterrupt
        return step(now)

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    assert not engine.has_work and engine.counters.aborted == 3


def test_a_preset_is_below_what_is_given(monkeypatch):
    seen = []

    def open_engine(model, config, *rest):
        seen.append(config)
        raise InterruptedError

    monkeypatch.setattr("jaxinfer.llm.open_engine", open_engine)
    for options in ({"preset": "batch", "max_num_seqs": 3}, {"max_num_seqs": 3}):
        with pytest.raises(InterruptedError):
            LLM("m", **options)
    assert seen[1] == EngineConfig(max_num_seqs=3)
    assert seen[0] == EngineConfig(**{**PRESETS["batch"], "max_num_seqs": 3})
    with pytest.raises(ValueError, match="choose one of online, batch, mixed"):
        LLM("m", preset="fast")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kv_cache_memory", "kv_pool_bytes"),
        ("kv_cache_dtype", "kv_dtype"),
        ("gpu_memory_utilization", "memory_utilization"),
        ("no_overlap", "overlap"),
        ("max_num_seq", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_option_is_named_with_what_was_meant(name, meant):
    with pytest.raises(TypeError) as caught:
        LLM("/nowhere", **{"max_num_seqs": 1, name: 1})
    message = str(caught.value)
    assert repr(name) in message
    assert (f"did you mean {meant}" in message) if meant else "did you mean" not in message
    listed = message.rpartition("it has: ")[2].split(", ")
    assert listed == sorted(field.name for field in dataclasses.fields(EngineConfig))


def test_every_flag_of_the_command_line_is_an_option_or_leads_to_one():
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(FLAGS.values()) <= fields and not set(FLAGS) & fields
    engine_flags = set(inspect.signature(serve).parameters) & (fields | set(FLAGS))
    assert {FLAGS.get(flag, flag) for flag in engine_flags} >= fields


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"tenant_weights": {"a": 2.0}}, "give .tenant, share. pairs"),
        ({"tenant_weights": (("a", 0.0),)}, "must be from 0.001 to 1000"),
        ({"batch_priority": 5000}, "from -1000 to 1001"),
    ],
)
def test_options_that_nothing_could_be_served_with_are_refused(option, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**option)
