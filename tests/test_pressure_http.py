"""What `test_service_pressure` and its neighbours show over gRPC, over HTTP."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import sys

import httpx2 as httpx
import pytest
from fake_engine import LONG, ScriptedEngine, balanced, echo, forever, limits, says
from fakes import POISON
from serving import PATIENCE_S, in_loop, serving, until
from test_http import http
from test_service_pressure import FakeEngine, answer
from test_service_pressure import balanced as all_counted

from jaxinfer.request import FinishReason

PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def served(engine, **config):
    """(server, HTTP client)"""
    async with serving(engine, http_port=0, **config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        bounds = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=bounds) as plain:
            yield server, plain


def asked(prompt, tokens: int, **more) -> dict:
    """A greedy completion of token ids that shows its own."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    } | more


def tokens_of(response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@in_loop
async def test_a_prompt_larger_than_the_pool_is_refused_and_holds_nobody_up():
    async with served(FakeEngine()) as (_, plain):
        large = asyncio.create_task(plain.post(PATH, json=asked([1] * 200, 5)))
        small = [plain.post(PATH, json=asked([i], 3)) for i in range(8)]
        assert [tokens_of(a) for a in await asyncio.gather(*small)] == [
            answer([i], 3) for i in range(8)
        ]
        error = (await large).json()["error"]
        assert (await large).status_code == 400 and error["param"] == "prompt"
        for said in ("200 tokens", "128 tokens", "--kv-cache-memory"):
            assert said in error["message"]


@in_loop
async def test_a_stalled_engine_is_503_until_it_moves():
    engine = ScriptedEngine(echo)
    async with served(engine, stall_limit=1.0) as (_, plain):
        engine.gate.clear()
        held = await plain.post(PATH, json={"prompt": "x"})
        assert held.status_code == 503 and "stalls" in held.json()["error"]["message"]
        assert held.headers["retry-after"]
        for path in ("/ready", "/health"):
            assert (await plain.get(path)).status_code == 503
        engine.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            while (await plain.get("/ready")).status_code == 503:
                await asyncio.sleep(0.02)
        assert (await plain.post(PATH, json={"prompt": "x"})).json()["choices"][0]["text"] == "x"


IDS = (257, -1, 2**63, 2**64)  # of a vocabulary of 257


@pytest.mark.parametrize(
    ("body", "param"),
    [({"stop_token_ids": [each]}, "stop_token_ids[0]") for each in IDS]
    + [({"logit_bias": {str(each): 1}}, f"logit_bias[{each}]") for each in (257, 2**63)]
    + [({"logit_bias": {"-1": 1}}, "logit_bias")]
    + [({"allowed_token_ids": [each]}, "allowed_token_ids[0]") for each in IDS]
    + [({"max_tokens": each}, "max_tokens") for each in (0, -1, 64, 2**63)]
    + [({"temperature": 1e-30}, "temperature"), ({"top_p": 0}, "top_p"), ({"min_p": 2}, "min_p")]
    + [({name: float(value)}, None) for name in ("temperature", "top_p", "min_p", "seed")
       for value in ("nan", "inf")]
    + [({"prompt": [65] * 64}, "prompt")],
)  # fmt: skip
def test_what_is_out_of_range_is_named_and_the_engine_goes_on(body, param):
    @in_loop
    async def ask():
        engine = ScriptedEngine(echo)
        async with served(engine) as (_, plain):
            sent = json.dumps({"prompt": "x"} | body)  # NaN and Infinity too, which are no JSON
            headers = {"content-type": "application/json"}
            response = await plain.post(PATH, content=sent, headers=headers)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert param is None or error["param"] == param, error
            assert engine.counters.received == 0
            assert (await plain.post(PATH, json={"prompt": "ok"})).status_code == 200

    ask()


@in_loop
async def test_defined_results_at_the_edges_of_sampling_and_of_lengths():
    async with served(ScriptedEngine(echo)) as (_, plain):
        for more in (
            {"temperature": 0, "top_p": 0.5, "min_p": 0.5},
            {"top_k": 100_000},
            {"top_k": -1},
            {"temperature": 100},
            {"temperature": 1e-9},
        ):
            response = await plain.post(PATH, json={"prompt": "x"} | more)
            assert response.json()["choices"][0]["text"] == "x", response.text
        longest = await plain.post(PATH, json={"prompt": [65] * 63})  # max_model_len - 1
        (choice,) = longest.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("A", "length")
        one = await plain.post(PATH, json={"prompt": [65]})
        assert one.json()["choices"][0]["finish_reason"] == "stop"


STORY = "日本語の文章 😀👩‍👩‍👧 naïve 🇯🇵終わり more"


@pytest.mark.parametrize("stop", ["終わり", "😀", "👩‍👧", "aï", "ve 🇯", "nowhere"])
def test_streamed_text_is_unary_text_up_to_a_stop_string(stop):
    """Tokens are bytes, so every character comes in pieces."""

    @in_loop
    async def ask():
        engine = ScriptedEngine(says(STORY), LONG)
        async with served(engine) as (_, plain):
            body = {"prompt": "x", "max_tokens": 500, "stop": stop}
            whole = (await plain.post(PATH, json=body)).json()["choices"][0]
            assert whole["text"] == STORY.partition(stop)[0]
            parts = []
            async with plain.stream("POST", PATH, json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        parts += [c["text"] for c in json.loads(line[6:])["choices"]]
            assert "".join(parts) == whole["text"]
            assert not any("\ufffd" in part for part in parts)

    ask()


@in_loop
async def test_all_slots_held_by_low_ones_and_an_urgent_one_comes():
    engine = FakeEngine(slots=2, step_seconds=0.03)
    async with served(engine) as (server, plain):
        low = [
            asyncio.create_task(plain.post(PATH, json=asked([i, 1], 60, priority=5)))
            for i in range(3)
        ]
        await until(lambda: engine.load().running == 2)
        urgent = await plain.post(PATH, json=asked([9, 9], 3, priority=-1))
        assert tokens_of(urgent) == answer([9, 9], 3) and not any(task.done() for task in low)
        for i, task in enumerate(low):
            assert tokens_of(await task) == answer([i, 1], 60), "unchanged by preemption"
        assert engine.counters.preemptions >= 1
        assert all_counted(server._service.served.frontend.counters, engine)


@in_loop
async def test_four_hundred_requests_at_once_and_a_queue_of_twenty():
    engine, outcomes = FakeEngine(queue=20, step_seconds=0.2), collections.Counter()
    async with served(engine) as (server, plain):

        async def one(i: int) -> None:
            response = await plain.post(PATH, json=asked([i % 50, 2], 4))
            outcomes[response.status_code] += 1
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "queue_full"
            else:
                assert tokens_of(response) == answer([i % 50, 2], 4)
            if outcomes[429] > 150:
                engine.runner.seconds = 0.0

        await asyncio.gather(*(one(i) for i in range(400)))
        counters = server._service.served.frontend.counters
        assert outcomes.total() == 400 == outcomes[200] + outcomes[429]
        assert outcomes[200] >= 20 and outcomes[429] > 150
        assert (counters.finished, counters.refused) == (outcomes[200], outcomes[429])
        assert all_counted(counters, engine) and engine.load().pages[2] == 0


@in_loop
async def test_aborted_expired_refused_failed_and_finished_ones_balance():
    engine = FakeEngine(slots=1)
    async with served(engine) as (server, plain):
        counters = lambda: server._service.served.frontend.counters  # noqa: E731
        assert (await plain.post(PATH, json=asked([1], 5))).status_code == 200  # finished
        assert (await plain.post(PATH, json=asked([POISON + 7], 5))).status_code == 400
        assert (await plain.post(PATH, json=asked([POISON], 5))).status_code == 500  # not finite
        engine.runner.seconds = 0.05
        body = asked([2], 100, stream=True)
        async with plain.stream("POST", PATH, json=body) as response:
            await anext(response.aiter_lines())  # left, n samples too
        await until(lambda: counters().aborted == 2)
        async with plain.stream("POST", PATH, json=body | {"n": 2}) as response:
            await anext(response.aiter_lines())
        await until(lambda: counters().aborted == 4)
        late = await plain.post(PATH, json=asked([3], 100, timeout=0.2))
        assert late.status_code == 504
        await until(lambda: not engine.has_work)
        total = counters()
        assert (total.received, total.finished, total.refused) == (7, 1, 1)
        assert total.aborted == 5 and all_counted(total, engine)
        assert total.prompt_tokens == 6 and engine.load().pages[2] == 0
        engine.scheduler.check_invariants()


@in_loop
async def test_draining_with_50_running_and_20_waiting():
    engine = ScriptedEngine(says("a" * 15), limits(max_num_seqs=50, max_queued_requests=100), 0.05)
    async with served(engine, drain_timeout=PATIENCE_S) as (server, plain):
        engine.gate.clear()
        calls = [asyncio.create_task(plain.post(PATH, json={"prompt": "x"})) for _ in range(70)]
        frontend = server._service.served.frontend
        await until(lambda: len(frontend._streams) == 70)
        engine.gate.set()
        await until(lambda: sum(s.started for s in frontend._streams.values()) == 50)
        server.shut_down()
        await until(lambda: frontend.unavailable())
        assert (await plain.get("/ready")).status_code == 503
        assert (await plain.post(PATH, json={"prompt": "x"})).status_code == 503
        answers = await asyncio.gather(*calls)
    codes = collections.Counter(response.status_code for response in answers)
    assert codes == {200: 50, 503: 20}
    ended = [r.json()["choices"][0]["text"] for r in answers if r.status_code == 200]
    assert ended == ["a" * 15] * 50
    assert balanced(frontend.counters, engine) and not engine.has_work


@in_loop
async def test_a_client_that_is_killed_frees_its_slot():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with http(engine) as (plain, _):
        script = (
            "import json, sys, urllib.request\n"
            "body = json.dumps({'prompt': 'x', 'stream': True, 'max_tokens': 10000}).encode()\n"
            f"asked = urllib.request.Request('{plain.base_url.copy_with(path=PATH)}', body,\n"
            "    {'content-type': 'application/json'})\n"
            "with urllib.request.urlopen(asked) as answer:\n"
            "    for line in answer:\n"
            "        print('line', flush=True)\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", script, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        assert await process.stdout.readline() == b"line\n"
        process.kill()
        await process.communicate()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]
