"""The asyncio front over a scripted engine: streams, stops, leaving, deadlines, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from fake_engine import (
    EOS,
    ScriptedEngine,
    balanced,
    byte_tokenizer,
    echo,
    forever,
    limits,
    says,
)
from serving import PATIENCE_S, until

from jaxinfer.engine_thread import EngineThread
from jaxinfer.frontend import LONG_TEXT, Frontend
from jaxinfer.request import (
    EngineStoppedError,
    FinishReason,
    QueueFullError,
    RequestError,
    SamplingParams,
)
from jaxinfer.text import TextProcessor

TOKENIZER = byte_tokenizer()
GREEDY = SamplingParams(temperature=0)


@contextlib.asynccontextmanager
async def running(engine, **options):
    """A front whose engine is running."""
    text = TextProcessor(TOKENIZER, TOKENIZER.eos_ids, engine.limits)
    front = Frontend(text, lambda events, stop: EngineThread(engine, events, stop), **options)
    front.start()
    try:
        yield front
    finally:
        engine.gate.set()
        front.stop()


async def whole(front, prompt, params=GREEDY, **kwargs):
    async with await front.submit(prompt, params, **kwargs) as stream:
        (only,) = await stream.collect()
        return only


def run(test):
    """Make a coroutine function a test."""

    def wrapper():
        asyncio.run(test())

    wrapper.__name__ = test.__name__
    return wrapper


@run
async def test_text_ids_and_chat_are_answered():
    async with running(ScriptedEngine(echo)) as front:
        for prompt in ("hi 你好", [*"hi 你好".encode()]):
            out = await whole(front, prompt)
            assert out.text == "hi 你好"
            assert out.token_ids == [*"hi 你好".encode(), EOS]
            assert out.finish.reason is FinishReason.EOS and out.finish.stop == EOS
            assert 0 <= out.timing.queued <= out.timing.first_token <= out.timing.total
        chat = await whole(front, [{"role": "user", "content": "a"}])
        assert chat.text == "user: a\nassistant:"


@run
async def test_streamed_text_is_the_unary_text_and_no_character_is_split():
    text = "你好, 😀 straße"
    async with running(ScriptedEngine(says(text))) as front:
        pieces = []
        async with await front.submit("x", GREEDY) as stream:
            async for delta in stream:
                pieces.append(delta.text)
        assert "".join(pieces) == text == (await whole(front, "x")).text
        assert "\ufffd" not in "".join(pieces)


@run
async def test_a_stop_string_ends_at_once_and_counts_as_finished():
    engine = ScriptedEngine(says("one two three"))
    async with running(engine) as front:
        for include, text in ((False, "one t"), (True, "one two")):
            out = await whole(front, "x", SamplingParams(stop=("zzz", "wo"), include_stop=include))
            assert out.text == text
            assert out.finish.reason is FinishReason.STOP_STRING and out.finish.stop == "wo"
            assert bytes(out.token_ids) == b"one two"  # what follows is discarded
        await until(lambda: not engine.has_work)
        await asyncio.sleep(0.05)
        assert front.counters.finished == 2 and front.counters.aborted == 0
        assert front.counters.generated_tokens == 2 * len(b"one two")
        assert balanced(front.counters, engine)


@run
async def test_a_held_back_prefix_comes_out_when_the_output_ends_otherwise():
    async with running(ScriptedEngine(says("abc"))) as front:
        out = await whole(front, "x", SamplingParams(stop=("bcd",)))
        assert (out.text, out.finish.reason) == ("abc", FinishReason.EOS)
        cut = await whole(front, "x", SamplingParams(stop=("bcd",), max_new_tokens=2))
        assert (cut.text, cut.finish.reason) == ("ab", FinishReason.LENGTH)


@run
async def test_a_stop_id_ends_and_its_text_is_kept_only_if_asked():
    stop = SamplingParams(stop_token_ids=(ord("t"),))
    async with running(ScriptedEngine(says("one two"))) as front:
        out = await whole(front, "x", stop)
        assert out.text == "one " and bytes(out.token_ids) == b"one t"
        assert (out.finish.reason, out.finish.stop) == (FinishReason.STOP_ID, ord("t"))
        kept = SamplingParams(stop_token_ids=(ord("t"),), include_stop=True)
        assert (await whole(front, "x", kept)).text == "one t"


@run
async def test_logprobs_go_with_their_tokens():
    async with running(ScriptedEngine(says("ab.c"))) as front:
        out = await whole(front, "x", SamplingParams(logprobs=2, stop=(".",)))
        assert [lp.logprob for lp in out.logprobs] == [-97.0, -98.0, -46.0]
        assert out.logprobs[0].top == ((0, 0.0), (1, -1.0))
        assert (await whole(front, "x")).logprobs == []


@run
async def test_leaving_early_aborts_in_the_engine():
    engine = ScriptedEngine(forever, limits(max_model_len=1 << 15, kv_tokens=1 << 15))
    async with running(engine) as front:
        async with await front.submit("x", GREEDY) as stream:
            await anext(stream)
        await until(lambda: not engine.has_work)
        assert list(engine.ended.values()) == [FinishReason.CANCELLED]
        assert balanced(front.counters, engine)


@run
async def test_a_cancelled_task_aborts_in_the_engine():
    engine = ScriptedEngine(forever, limits(max_model_len=1 << 15, kv_tokens=1 << 15))
    async with running(engine) as front:
        task = asyncio.create_task(whole(front, "x"))
        await until(lambda: engine.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.has_work)
        assert list(engine.ended.values()) == [FinishReason.CANCELLED]


@run
async def test_a_deadline_ends_the_stream_even_if_the_engine_hangs():
    engine = ScriptedEngine(forever)
    async with running(engine) as front:
        engine.gate.clear()
        out = await whole(front, "x", timeout=0.05)
        assert out.finish.reason is FinishReason.DEADLINE
        engine.gate.set()
        await until(lambda: engine.aborted and not engine.has_work)
        assert [a.reason for a in engine.aborted] == [FinishReason.DEADLINE]


@run
async def test_a_slow_reader_gets_everything_joined():
    async with running(ScriptedEngine(says("a" * 50))) as front:
        async with await front.submit("x", GREEDY) as slow:
            fast = await whole(front, "x")  # the other reader is not held up
            await until(lambda: not front._streams)
            deltas = [delta async for delta in slow]
        assert len(deltas) == 1
        assert deltas[0].text == fast.text == "a" * 50


@run
async def test_bad_requests_start_nothing_and_are_counted():
    engine = ScriptedEngine()
    async with running(engine) as front:
        bad = [("", GREEDY), ("x" * 64, GREEDY), ([300], GREEDY), ("\ud800", GREEDY)]
        bad += [([{"role": "user"}], GREEDY), ("x", SamplingParams(temperature=float("nan")))]
        for prompt, params in bad:
            with pytest.raises(RequestError):
                await front.submit(prompt, params)
        assert engine.counters.received == 0
        assert front.counters.refused == front.counters.received == len(bad)


@run
async def test_a_full_queue_refuses_and_what_was_accepted_finishes():
    """10,000 at once, of which 100 may wait: memory does not grow with the rest."""
    engine = ScriptedEngine(limits=limits(max_queued_requests=100))
    async with running(engine) as front:
        engine.gate.clear()
        accepted = [await front.submit("abc", GREEDY) for _ in range(100)]
        tracemalloc.start()
        for _ in range(9_900):
            with pytest.raises(QueueFullError):
                await front.submit("abc", GREEDY)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 200_000, kept
        engine.gate.set()
        for stream in accepted:
            async with stream:
                assert (await stream.collect())[0].text == "abc"
        assert front.counters.refused == 9_900 and front.counters.finished == 100
        assert balanced(front.counters, engine)


@run
async def test_a_long_text_is_encoded_off_the_loop():
    async with running(
        ScriptedEngine(
            limits=limits(max_model_len=20_000, kv_tokens=20_000, max_queued_tokens=20_000)
        )
    ) as front:
        text = "long " * 2000
        assert await front.encode(text) == [*text.encode()]
        assert (await whole(front, text, SamplingParams(max_new_tokens=3))).text == "lon"
        assert await front.decode([*text.encode()]) == text


@run
async def test_nothing_long_keeps_the_loop_from_other_requests():
    """Whatever may be long is worked on in a thread: long texts, any chat, ids to decode."""
    async with running(ScriptedEngine(limits=limits(max_model_len=1 << 16))) as front:
        threads = []
        for name in ("encode", "decode"):
            original = getattr(front.text, name)

            def watched(*args, original=original):
                threads.append(threading.current_thread())
                return original(*args)

            setattr(front.text, name, watched)
        long = "x" * LONG_TEXT
        await front.encode(long)
        await front.encode([{"role": "user", "content": "short"}])
        await front.decode([65] * LONG_TEXT)
        assert len(threads) == 3 and threading.main_thread() not in threads
        await front.encode("x")
        await front.encode([65] * LONG_TEXT)  # ids are what they are
        assert threads[3:] == [threading.main_thread()] * 2


@run
async def test_text_that_cannot_fit_is_refused_before_it_is_encoded():
    """64 tokens of at most 5 bytes (<eos>): whatever is longer costs no encoding."""
    async with running(ScriptedEngine()) as front:
        encoded = []
        front.text.tokenizer = SimpleNamespace(
            longest_token=TOKENIZER.longest_token,
            encode=lambda *args, **kwargs: encoded.append(args) or [65],
            apply_chat_template=lambda *args: encoded.append(args) or [65],
        )
        limit = 64 * TOKENIZER.longest_token
        assert limit == 320
        too_long = [
            "x" * (limit + 1),
            "é" * (limit // 2 + 1),
            "x" * 10_000_000,
            [{"role": "user", "content": "x" * limit}],
            [{"role": "user", "content": "x" * 100}] * 4,
            [{"role": "x" * 10_000_000, "content": ""}],
            [{"role": "u", "content": ""}] * 65,
        ]
        for prompt in too_long:
            for call in (front.encode(prompt), front.submit(prompt, GREEDY)):
                with pytest.raises(RequestError) as caught:
                    await call
                (violation,) = caught.value.violations
                assert violation.field == "prompt" and "at most" in violation.message
                assert "max_model_len" in violation.message
        assert not encoded
        for prompt in ("x" * limit, [{"role": "user", "content": "x" * (limit - 4)}]):
            assert await front.encode(prompt) == [65]
        assert len(encoded) == 2
        with pytest.raises(RequestError, match=r"has 10000000 bytes of text; at most 320"):
            await front.encode("x" * 10_000_000)


@run
async def test_draining_ends_the_waiting_and_lets_the_running_finish():
    engine = ScriptedEngine(says("a" * 30), step_seconds=0.01)  # two slots
    async with running(engine) as front:
        streams = [await front.submit("x", GREEDY) for _ in range(4)]
        await anext(streams[0]), await anext(streams[1])
        draining = asyncio.create_task(front.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await front.submit("x", GREEDY)
        for stream in streams[:2]:
            assert (await stream.collect())[0].finish.reason is FinishReason.EOS
        for stream in streams[2:]:
            with pytest.raises(EngineStoppedError, match="shutting down"):
                await stream.collect()
        await draining


@run
async def test_draining_ends_what_outlives_the_grace():
    engine = ScriptedEngine(forever, limits(max_model_len=1 << 15, kv_tokens=1 << 15), 0.001)
    async with running(engine) as front:
        stream = await front.submit("x", GREEDY)
        await anext(stream)
        await front.drain(0.05)
        with pytest.raises(EngineStoppedError, match=r"within 0\.05 s"):
            await stream.collect()


@run
async def test_a_failed_engine_ends_all_streams_and_says_why():
    engine = ScriptedEngine(forever)
    async with running(engine) as front:
        engine.gate.clear()
        streams = [await front.submit("x", GREEDY) for _ in range(3)]
        engine.fail_with = MemoryError("the device is gone")
        engine.gate.set()
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="the device is gone"):
                await stream.collect()
        with pytest.raises(EngineStoppedError, match="the device is gone"):
            await front.submit("x", GREEDY)


@run
async def test_an_engine_that_dies_while_draining_ends_the_streams_at_once():
    engine = ScriptedEngine(forever, limits(max_model_len=1 << 15, kv_tokens=1 << 15), 0.001)
    async with running(engine) as front:
        stream = await front.submit("x", GREEDY)
        await anext(stream)
        draining = asyncio.create_task(front.drain(10 * PATIENCE_S))
        await asyncio.sleep(0)
        engine.fail_with = MemoryError("the device is gone")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineStoppedError, match="the device is gone"):
                await stream.collect()
            await draining


@run
async def test_a_fault_in_one_output_ends_that_request_alone():
    """Two requests run, and every step's events come to both: the other one misses none."""
    engine = ScriptedEngine(says("a" * 30), step_seconds=0.01)
    async with running(engine) as front:
        engine.gate.clear()
        broken, sound = [await front.submit("x", GREEDY) for _ in range(2)]
        broken.samples[0].output._detokenizer = None
        engine.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            (failed,) = await broken.collect()
        assert failed.finish.reason is FinishReason.ERROR
        assert "cannot be decoded" in failed.finish.error and failed.timing.total >= 0
        assert (await sound.collect())[0].text == "a" * 30
        await until(lambda: not engine.has_work)
        assert engine.ended == {"r1": FinishReason.ERROR, "r2": FinishReason.EOS}
        assert balanced(front.counters, engine)


@run
async def test_a_stall_is_seen_and_passes():
    engine = ScriptedEngine(echo)
    later = 0.0
    async with running(engine, stall_limit=1000.0, clock=lambda: time.monotonic() + later) as front:
        later += 2000.0
        assert front.check() == ""  # idle is no stall
        engine.gate.clear()
        stream = await front.submit("x", GREEDY)
        assert front.check() == ""
        later += 2000.0
        assert "stalls" in front.check()
        with pytest.raises(EngineStoppedError, match="stalls"):
            await stream.collect()
        engine.gate.set()
        await until(lambda: front.check() == "")
        later = 0.0
        assert (await whole(front, "again")).text == "again"
