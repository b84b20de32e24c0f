"""Several samples of one prompt: what the engine is asked, what readers get, and leaving early."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from fake_engine import EOS, ScriptedEngine, balanced, byte_tokenizer, forever, limits
from jaxinfer_service.client import violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import in_loop, refused, serving, until

from jaxinfer import LLM, FinishReason, SamplingParams, Scheduling
from jaxinfer.engine_thread import EngineThread
from jaxinfer.frontend import Frontend
from jaxinfer.request import MAX_SEED, EngineStoppedError, QueueFullError, Request, RequestError
from jaxinfer.text import TextProcessor
from jaxinfer.validation import build_request, samples

TOKENIZER = byte_tokenizer()
LONG = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
Code = grpc.StatusCode


def by_seed(request: Request) -> list[int]:
    """The script of a model that says its seed, as many times as the seed."""
    return [*(str(request.seed) * request.seed).encode(), EOS]


def wide(**changes):
    return limits(max_num_seqs=8, max_queued_requests=64, **changes)


@contextlib.asynccontextmanager
async def running(engine):
    text = TextProcessor(TOKENIZER, TOKENIZER.eos_ids, engine.limits)
    front = Frontend(text, lambda events, stop: EngineThread(engine, events, stop))
    front.start()
    try:
        yield front
    finally:
        engine.gate.set()
        front.stop()


# -- the requests ----------------------------------------------------------------------------------


def ask(**params):
    given = SamplingParams(**params)
    scheduling = Scheduling(3, "t", "s")
    return build_request([1, 2], given, wide(), (EOS,), "r7", 1.0, 2.0, scheduling)


def test_each_sample_is_a_request_of_its_own():
    several = samples(ask(n=3, seed=MAX_SEED - 1))
    assert [r.id for r in several] == ["r7", "r7.1", "r7.2"]
    assert [r.seed for r in several] == [MAX_SEED - 1, MAX_SEED, 0]
    for request in several:
        assert (request.group, request.prompt, request.deadline) == ("r7", (1, 2), 3.0)
        assert request.scheduling == Scheduling(3, "t", "s")
    alone = ask(seed=5)
    assert samples(alone) == [alone] and alone.group == ""


def test_what_the_queue_could_never_hold_is_refused_with_the_numbers():
    def violation(n, prompt, bounds):
        with pytest.raises(RequestError) as caught:
            build_request(prompt, SamplingParams(n=n), bounds, (EOS,), "r", 0.0)
        (found,) = caught.value.violations
        assert found.field == "n"
        return found.message

    assert "takes 63 requests" in violation(64, [1], limits(max_queued_requests=63))
    message = violation(5, [1] * 10, limits(max_queued_requests=5, max_queued_tokens=49))
    assert "makes 50" in message and "49 tokens" in message and "at most 4" in message
    enough = limits(max_queued_requests=5, max_queued_tokens=50)
    build_request([1] * 10, SamplingParams(n=5), enough, (EOS,), "r", 0.0)


# -- the front -------------------------------------------------------------------------------------


@in_loop
async def test_all_samples_stream_and_each_ends():
    engine = ScriptedEngine(by_seed, wide())
    async with running(engine) as front:
        async with await front.submit("x", SamplingParams(n=3, seed=1)) as stream:
            deltas = [delta async for delta in stream]
        for index, text in enumerate(("1", "22", "333")):
            mine = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in mine) == text
            assert [delta.finish is not None for delta in mine] == [False] * (len(mine) - 1) + [
                True
            ]
        assert not front._streams and not front._samples
        async with await front.submit("x", SamplingParams(n=2, seed=4)) as stream:
            assert [whole.text for whole in await stream.collect()] == ["4444", "55555"]
        assert front.counters.received == front.counters.finished == 5


@in_loop
async def test_a_reader_that_falls_behind_gets_one_delta_a_sample():
    engine = ScriptedEngine(by_seed, wide())
    async with running(engine) as front:
        stream = await front.submit("x", SamplingParams(n=3, seed=1))
        await until(lambda: not front._streams)
        deltas = [delta async for delta in stream]
        assert sorted((d.index, d.text) for d in deltas) == [(0, "1"), (1, "22"), (2, "333")]


@in_loop
async def test_leaving_early_ends_all_samples():
    engine = ScriptedEngine(forever, LONG)  # two slots: one sample waits
    async with running(engine) as front:
        async with await front.submit("x", SamplingParams(n=3)) as stream:
            await anext(stream)
        await until(lambda: not engine.has_work)
        assert engine.ended == dict.fromkeys(("r1", "r1.1", "r1.2"), FinishReason.CANCELLED)
        assert balanced(front.counters, engine) and not front._streams and not front._samples


@in_loop
async def test_a_stop_string_ends_its_sample_alone():
    engine = ScriptedEngine(by_seed, wide())
    async with running(engine) as front:
        stream = await front.submit("x", SamplingParams(n=3, seed=1, stop=("22",)))
        whole = await stream.collect()
    reasons = [delta.finish.reason for delta in whole]
    assert reasons == [FinishReason.EOS, FinishReason.STOP_STRING, FinishReason.EOS]
    assert [delta.text for delta in whole] == ["1", "", "333"]


@in_loop
async def test_a_queue_that_takes_only_some_refuses_all():
    engine = ScriptedEngine(forever, limits(max_queued_requests=4))
    async with running(engine) as front:
        engine.gate.clear()
        first = await front.submit("x", SamplingParams(n=2))
        with pytest.raises(QueueFullError):
            await front.submit("x", SamplingParams(n=4))
        assert list(front._streams) == ["r1"] and set(front._samples) == {"r1", "r1.1"}
        async with first:
            engine.gate.set()
            await until(lambda: {"r2", "r2.1"} <= set(engine.ended))
        await until(lambda: not engine.has_work)
        counters = front.counters
        assert (counters.received, counters.aborted, counters.refused) == (6, 4, 2)
        assert balanced(counters, engine)


@in_loop
async def test_the_deadline_is_for_all_samples():
    engine = ScriptedEngine(forever, LONG)
    async with running(engine) as front:
        engine.gate.clear()
        async with await front.submit("x", SamplingParams(n=3), timeout=0.05) as stream:
            whole = await stream.collect()
        assert [delta.finish.reason for delta in whole] == [FinishReason.DEADLINE] * 3
        engine.gate.set()
        await until(lambda: not engine.has_work)


@in_loop
async def test_draining_lets_the_waiting_samples_of_a_running_ask_finish():
    engine = ScriptedEngine(by_seed, limits(), step_seconds=0.02)  # two slots
    async with running(engine) as front:
        stream = await front.submit("x", SamplingParams(n=3, seed=5))
        waiting = await front.submit("y", SamplingParams(seed=1))
        await anext(stream)
        draining = asyncio.create_task(front.drain(10))
        with pytest.raises(EngineStoppedError):
            await waiting.collect()
        whole = await stream.collect()
        assert whole[2].text == "7" * 7 and whole[0].finish.reason is FinishReason.EOS
        await draining


@in_loop
async def test_an_abort_from_outside_ends_the_whole_ask():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with running(engine) as front:
        for name in ("r1", "r2.1"):
            async with await front.submit("x", SamplingParams(n=2)) as stream:
                await anext(stream)
                assert front.abort(name) and not front.abort(name)
                whole = await stream.collect()
            assert {delta.finish.reason for delta in whole} == {FinishReason.CANCELLED}
        assert not front.abort("r3") and not front.abort("")
        await until(lambda: not engine.has_work)
        assert engine.counters.aborted == 4 and balanced(front.counters, engine)


@in_loop
async def test_an_ask_is_known_by_its_id_after_its_first_sample_ended():
    engine = ScriptedEngine(lambda r: [EOS] if r.id == "r1" else forever(r), LONG)
    async with running(engine) as front:
        async with await front.submit("x", SamplingParams(n=2)):
            await until(lambda: "r1" in engine.ended)
            await until(lambda: "r1" not in front._samples)
            assert front.abort("r1")
        await until(lambda: not engine.has_work)
        assert engine.ended == {"r1": FinishReason.EOS, "r1.1": FinishReason.CANCELLED}


# -- the wire --------------------------------------------------------------------------------------


@in_loop
async def test_unary_has_the_first_sample_and_the_others():
    engine = ScriptedEngine(by_seed, wide())
    engine.cached = lambda request: 2 if request.id == request.group else 3
    async with serving(engine) as (_, client):
        answer = await client.generate("abc", n=3, seed=1, logprobs=0, max_new_tokens=3)
        assert [answer.text, *(s.text for s in answer.more)] == ["1", "22", "333"]
        assert list(answer.token_ids) == [ord("1"), EOS] and len(answer.logprobs) == 2
        assert [len(s.logprobs) for s in answer.more] == [3, 3]
        assert answer.finish.reason == pb.FINISH_REASON_EOS
        assert [s.finish.reason for s in answer.more] == [
            pb.FINISH_REASON_EOS, pb.FINISH_REASON_LENGTH,
        ]  # fmt: skip
        assert answer.usage == pb.Usage(prompt_tokens=3, generated_tokens=8, cached_tokens=2)
        assert 0 <= answer.timing.queued <= answer.timing.first_token <= answer.timing.total
        assert len((await client.generate("abc", seed=1)).more) == 0


@in_loop
async def test_a_stream_mixes_the_samples_of_the_unary_answer():
    async with serving(ScriptedEngine(by_seed, wide())) as (_, client):
        options = {"n": 3, "seed": 2, "logprobs": 0}
        whole = await client.generate("x", **options)
        chunks = [chunk async for chunk in client.stream("x", **options)]
        for index, sample in enumerate([whole, *whole.more]):
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert "".join(chunk.text for chunk in mine) == sample.text
            assert [i for chunk in mine for i in chunk.token_ids] == list(sample.token_ids)
            assert [p for chunk in mine for p in chunk.logprobs] == list(sample.logprobs)
            assert mine[-1].finish == sample.finish
            assert not any(chunk.HasField("finish") for chunk in mine[:-1])
        assert chunks[-1].usage == whole.usage and chunks[-1].usage.generated_tokens == 12
        assert not any(chunk.HasField("usage") for chunk in chunks[:-1])
        assert chunks[0].request_id and not any(chunk.request_id for chunk in chunks[1:])


@in_loop
async def test_one_sample_that_fails_fails_the_call_at_once():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, client):
        call = asyncio.create_task(client.generate("x", n=2))
        await until(lambda: len(engine.running) == 2)
        frontend = server._service.served.frontend
        frontend._samples["r1.1"].output._detokenizer = None
        error = await refused(call)
        assert error.code() is Code.INTERNAL and "cannot be decoded" in error.details()
        await until(lambda: not engine.has_work)
        assert engine.ended == {"r1": FinishReason.CANCELLED, "r1.1": FinishReason.ERROR}


@in_loop
async def test_a_bad_number_of_samples_is_named():
    async with serving(ScriptedEngine()) as (_, client):
        for n in (0, -1, 65, 2**62):
            error = await refused(client.generate("x", n=n))
            assert error.code() is Code.INVALID_ARGUMENT
            assert "from 1 to 64" in violations(error)["sampling.n"]


# -- offline ---------------------------------------------------------------------------------------


def llm_over(engine):
    return LLM.over(engine, TOKENIZER, TOKENIZER.eos_ids)


def test_a_completion_has_its_further_samples():
    engine = ScriptedEngine(by_seed, limits(max_queued_requests=6))  # two slots
    engine.cached = lambda request: len(request.prompt) - 1
    params = [SamplingParams(n=6, seed=1), SamplingParams(seed=2), SamplingParams(n=2, seed=3)]
    first, second, third = llm_over(engine).generate(["ab", "c", "d"], params)
    assert [s.text for s in first.samples] == [str(i) * i for i in range(1, 7)]
    assert (second.text, second.samples) == ("22", (second,))
    assert [third.text, *(s.text for s in third.more)] == ["333", "4444"]
    assert first.cached_tokens == 1 and second.cached_tokens == 0
    assert balanced(engine.counters, engine) and engine.counters.finished == 9


def test_a_stream_of_samples_has_their_indices_and_may_be_left():
    deltas = [*llm_over(ScriptedEngine(by_seed)).stream("x", SamplingParams(n=3, seed=1))]
    texts = ["".join(d.text for d in deltas if d.index == i) for i in range(3)]
    assert texts == ["1", "22", "333"] and sum(d.finish is not None for d in deltas) == 3
    engine = ScriptedEngine(forever, LONG)
    stream = llm_over(engine).stream("x", SamplingParams(n=3))
    next(stream)
    stream.close()
    assert not engine.has_work and engine.counters.aborted == 3


def test_scheduling_is_for_all_prompts_or_one_each():
    seen = []

    def script(request):
        seen.append(request.scheduling)
        return [EOS]

    llm = llm_over(ScriptedEngine(script))
    one, two = Scheduling(priority=-1, tenant="a"), Scheduling(cache_salt="s")
    llm.generate(["x", "y"], scheduling=one)
    llm.generate(["x", "y"], scheduling=[one, two])
    list(llm.stream("x", scheduling=two))
    llm.chat([{"role": "user", "content": "x"}], scheduling=two)
    llm.generate("x")
    assert seen == [one, one, one, two, two, two, Scheduling()]
    with pytest.raises(ValueError, match="1 scheduling for 2 prompts"):
        llm.generate(["x", "y"], scheduling=[one])
    with pytest.raises(RequestError, match=r"prompts\[1\]: priority: is 1001"):
        llm.generate(["x", "y"], scheduling=[one, Scheduling(priority=1001)])
