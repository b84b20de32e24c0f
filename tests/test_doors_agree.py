"""One real engine behind both doors: whichever it is asked by, cold or with a prefix hit, alone or
in company, whole or streamed, set aside for its reader at every token, an answer is the same to the
last bit. Nothing compiles for it.
"""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import numpy as np
from fake_engine import byte_tokenizer
from jaxinfer_service.model import OpenedModel
from serving import PATIENCE_S, in_loop, serving_model
from tiny_engine import Setup, engine_for

from jaxinfer.engine_thread import EngineThread
from jaxinfer.text import TextProcessor

SETUP = Setup(slots=4, chunk=32, page_size=16, pages=24, deterministic=True)
PROMPTS = {length: [(7 * i) % 250 for i in range(length)] for length in (15, 16, 17, 33)}
ASKS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "biased": {"temperature": 0.0, "logit_bias": {65: 5.0}},
}
OURS = {"max_new_tokens": 12, "logprobs": 3, "ignore_eos": True}
THEIRS = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True, "return_token_ids": True}


def opened() -> OpenedModel:
    engine, tokenizer = engine_for(SETUP), byte_tokenizer()
    return OpenedModel(
        names=("tiny",),
        text=TextProcessor(tokenizer, tokenizer.eos_ids, engine.limits),
        connect=lambda on_events, on_stop: EngineThread(engine, on_events, on_stop),
    )


Found = list[tuple[int, float]]  # token, its logprob


async def over_grpc(client, prompt, how) -> Found:
    answer = await client.generate(prompt, **OURS, **how)
    return [(each.chosen.token_id, each.chosen.logprob) for each in answer.logprobs]


async def streamed(client, prompt, how) -> Found:
    chunks = [chunk async for chunk in client.stream(prompt, **OURS, **how)]
    lines = [line for chunk in chunks for line in chunk.logprobs]
    return [(each.chosen.token_id, each.chosen.logprob) for each in lines]


async def over_http(plain, prompt, how) -> Found:
    if bias := how.get("logit_bias"):
        how = how | {"logit_bias": {str(token): value for token, value in bias.items()}}
    answer = await plain.post("/v1/completions", json={"prompt": prompt} | THEIRS | how)
    (choice,) = answer.json()["choices"]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def same(found: Found, expected: Found) -> bool:
    """The same tokens, and float32 logprobs of the same bits, which JSON writes in more digits."""
    return [(t, np.float32(p)) for t, p in found] == [(t, np.float32(p)) for t, p in expected]


@in_loop
async def test_both_doors_give_the_same_bits_in_any_company(monkeypatch):
    async with serving_model(opened, http_port=0) as (server, client):
        url = f"http://127.0.0.1:{server.http_port}"
        engine = server._service.served.frontend.engine
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as plain:
            alone = {}
            for length, prompt in PROMPTS.items():
                for name, how in ASKS.items():
                    alone[length, name] = await over_grpc(client, prompt, how)  # cold, or a hit
                    assert same(await over_http(plain, prompt, how), alone[length, name])
            calls = {
                (length, name, number): door(caller, prompt, how)
                for length, prompt in PROMPTS.items()
                for name, how in ASKS.items()
                for number, (door, caller) in enumerate(
                    ((over_grpc, client), (over_http, plain), (streamed, client))
                )
            }
            answers = await asyncio.gather(*calls.values())
            for (length, name, _), found in zip(calls, answers):
                assert same(found, alone[length, name]), (length, name)
            holds, hold = [], engine.scheduler.hold
            engine.scheduler.hold = lambda *how: [holds.append(how), hold(*how)]
            monkeypatch.setattr("jaxinfer.stream.MOST_UNREAD", 1)
            slow = [streamed(client, PROMPTS[17], how) for how in ASKS.values()]
            for name, found in zip(ASKS, await asyncio.gather(*slow)):
                assert same(found, alone[17, name]), name
            assert sum(held for _, held, _ in holds) > 20
            forms = [
                client.generate("x", max_new_tokens=8, n=2, structured={"choice": ["ab", "cd"]}),
                plain.post(
                    "/v1/completions", json={"prompt": "x", "guided_regex": "[a-c]{3}", "n": 2}
                ),
            ]
            grammar, regex = await asyncio.gather(*forms)
            assert {grammar.text, grammar.more[0].text} <= {"ab", "cd"}
            assert all(set(c["text"]) <= set("abc") for c in regex.json()["choices"])
        assert server._service.served.frontend.load().counters.prefix_hits > 0
        assert engine.compiles_after_ready == 0
