"""The real model over gRPC: the oracle's tokens alone, in company, streamed, unary and offline."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
from demo_model import demo_path
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.server import OpenedModel
from serving import in_loop, serving_model, until

from jaxinfer.config import EngineConfig
from jaxinfer.engine_thread import EngineThread
from jaxinfer.llm import LLM, open_engine
from jaxinfer.request import SamplingParams
from jaxinfer.text import TextProcessor

FRANCE = "The capital of France is"
ANSWER = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33,
    34, 42, 33, 34, 42, 37, 35, 30, 2,
]  # fmt: skip
JAPAN = [{"role": "user", "content": "What is the capital of Japan? Answer in one short sentence."}]
TOKYO = "The capital of Japan is Tokyo."
SLOTS = 16


@functools.cache
def demo():
    """(model, engine): chunks of 4 tokens split the text's 5 and the chat's 43."""
    config = EngineConfig(
        max_num_seqs=SLOTS, max_model_len=512, max_num_batched_tokens=4, kv_pool_bytes=400 << 20
    )
    return open_engine(str(demo_path()), config, "float32")


def opened():
    model, engine = demo()
    return OpenedModel(
        names=("demo",),
        text=TextProcessor(model.tokenizer, model.generation.eos_ids, engine.limits),
        connect=lambda events, stop: EngineThread(engine, events, stop),
    )


async def nothing_is_held(engine):
    """Wait until the engine is idle; then all slots and pages must be back."""
    await until(lambda: not engine.has_work, 30)
    engine.scheduler.check_invariants()
    assert all(allocator.num_used == 0 for allocator in engine.scheduler.allocators)


@in_loop
async def test_oracle_tokens_alone_in_company_streamed_and_unary():
    model, engine = demo()
    llm = LLM.over(engine, model.tokenizer, model.generation.eos_ids)
    offline = llm.generate([FRANCE, JAPAN], SamplingParams(temperature=0, max_new_tokens=40))
    assert [offline[0].token_ids, offline[1].text] == [ANSWER, TOKYO]
    async with serving_model(opened) as (_, client):
        for _ in range(2):
            alone = await client.generate(FRANCE, temperature=0)
            assert list(alone.token_ids) == ANSWER and alone.text == offline[0].text
        chat = await client.generate(JAPAN, temperature=0)
        assert chat.text == TOKYO and chat.usage.prompt_tokens == 43
        assert chat.finish == pb.Finish(reason=pb.FINISH_REASON_EOS, stop_token_id=2)
        ids = await client.tokenize(FRANCE)
        assert ids == [504, 3575, 282, 4649, 314]

        async def streamed(prompt):
            chunks = [c async for c in client.stream(prompt, temperature=0)]
            return [i for c in chunks for i in c.token_ids], "".join(c.text for c in chunks)

        neighbours = [
            client.generate("word " * (7 * i + 1), seed=i, temperature=1.0, max_new_tokens=40)
            for i in range(SLOTS - 3)
        ]
        results = await asyncio.gather(
            client.generate(ids, temperature=0),
            streamed(FRANCE),
            streamed(JAPAN),
            *neighbours,
        )
        assert list(results[0].token_ids) == ANSWER
        assert results[1] == (ANSWER, offline[0].text)
        assert results[2][1] == TOKYO
        await nothing_is_held(engine)
    assert engine.compiles.compiles_after_ready == 0


@in_loop
async def test_streamed_text_is_unary_text_whatever_the_bytes():
    """At temperature 2 the model emits fragments of characters of every script."""
    _, engine = demo()
    async with serving_model(opened) as (_, client):

        async def both(seed):
            options = {"seed": seed, "temperature": 2.0, "max_new_tokens": 40, "stop": ["e ", "你"]}
            chunks = [c async for c in client.stream("Emoji: 😀 你好", **options)]
            whole = await client.generate("Emoji: 😀 你好", **options)
            assert [i for c in chunks for i in c.token_ids] == list(whole.token_ids)
            assert "".join(c.text for c in chunks) == whole.text
            assert chunks[-1].finish == whole.finish
            if whole.finish.reason == pb.FINISH_REASON_STOP_STRING:
                full = await client.detokenize(whole.token_ids)
                assert full.startswith(whole.text + whole.finish.stop_string)
                assert not any(stop in whole.text for stop in options["stop"])
            elif whole.finish.reason == pb.FINISH_REASON_LENGTH:
                assert await client.detokenize(whole.token_ids) == whole.text
            return whole.finish.reason

        reasons = [await both(seed) for seed in range(8)]  # one at a time: the same programs
        assert pb.FINISH_REASON_STOP_STRING in reasons and len(set(reasons)) > 1
        await nothing_is_held(engine)


@in_loop
async def test_leaving_clients_give_everything_back():
    _, engine = demo()
    before = engine.counters.aborted
    rng = random.Random(1)
    async with serving_model(opened) as (server, client):

        async def leaves_early():
            call = client.stream("Tell me a story.", max_new_tokens=400, ignore_eos=True)
            async for _ in call:
                if rng.random() < 0.2:
                    call.cancel()
                    return

        await asyncio.gather(*(leaves_early() for _ in range(2 * SLOTS)))
        await nothing_is_held(engine)
        assert engine.counters.aborted - before == 2 * SLOTS
        counters = server._service.served.frontend.counters
        assert counters.received == counters.finished + counters.aborted + counters.refused


@in_loop
async def test_defined_results_at_the_edges_of_sampling():
    _, engine = demo()
    async with serving_model(opened) as (_, client):
        for options in (
            {"temperature": 0, "top_p": 0.1, "min_p": 0.9, "top_k": 1},
            {"temperature": 1e-9},
            {"temperature": 1e-9, "top_k": 10**9, "seed": 3},
            {"temperature": 1e-12, "top_p": 1e-9},
            {"temperature": 100.0, "min_p": 1.0},
        ):
            answer = await client.generate(FRANCE, max_new_tokens=8, logprobs=1, **options)
            assert list(answer.token_ids) == ANSWER[:8], options
            assert all(-20 < entry.chosen.logprob <= 0 for entry in answer.logprobs)
        with pytest.raises(Exception, match="max_new_tokens"):
            await client.generate(FRANCE, max_new_tokens=508)
        longest = await client.generate([504] * 511, temperature=0)
        assert longest.usage.generated_tokens == 1
    assert engine.compiles.compiles_after_ready == 0
