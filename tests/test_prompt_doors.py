"""What is said of prompts, and what else is asked of them, over gRPC, over HTTP and offline."""

from __future__ import annotations

import contextlib
import json

import httpx2 as httpx
import openai
import pytest
from fake_engine import EOS, ScriptedEngine, balanced, byte_tokenizer, echo, limits, says
from hypothesis import given
from hypothesis import strategies as st
from jaxinfer_service.client import violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import in_loop, refused, serving

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation import SamplingDefaults
from jaxinfer.request import FinishReason, RequestError
from jaxinfer.text import TextProcessor
from jaxinfer.truncation import truncated

WIDE = {"max_model_len": 4096, "kv_tokens": 4096, "max_queued_tokens": 9000}


@contextlib.asynccontextmanager
async def doors(engine, **config):
    """(gRPC client, httpx client, openai client) of one server."""
    async with serving(engine, http_port=0, **config) as (server, client):
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as plain,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official,
        ):
            yield client, plain, official


async def post(plain, path: str, **body) -> dict:
    answer = await plain.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(prompt: str) -> list[float]:
    """What the scripted engine says of a prompt's tokens."""
    return [-byte / 2 for byte in prompt.encode()[1:]]


@in_loop
async def test_prompt_logprobs_whole_and_streamed_over_grpc():
    async with doors(ScriptedEngine(says("yes"), limits(**WIDE))) as (client, *_):
        whole = await client.generate("abcdef", prompt_logprobs=2, logprobs=1, n=2)
        entries = whole.prompt_logprobs
        assert [entry.chosen.token_id for entry in entries] == [*b"bcdef"]
        assert [entry.chosen.logprob for entry in entries] == said("abcdef")
        assert [entry.rank for entry in entries] == [byte + 1 for byte in b"bcdef"]
        assert {tuple(t.token_id for t in entry.top) for entry in entries} == {(0, 1)}
        assert whole.logprobs[0].rank == ord("y") + 1
        assert whole.text == whole.more[0].text == "yes"
        prompt = "x" * 3000
        parts = [c async for c in client.stream(prompt, prompt_logprobs=0)]
        assert sum(len(chunk.prompt_logprobs) for chunk in parts) == 2999
        assert max(len(chunk.prompt_logprobs) for chunk in parts) <= 1024
        scored = [i for i, chunk in enumerate(parts) if chunk.prompt_logprobs]
        assert scored == [*range(len(scored))] and len(scored) == 4, "before the first token"
        assert parts[0].request_id and not any(chunk.request_id for chunk in parts[1:])
        assert "".join(chunk.text for chunk in parts) == "yes"


@in_loop
async def test_a_prompt_is_scored_and_nothing_generated():
    engine = ScriptedEngine(says("never"))
    async with doors(engine) as (client, plain, _):
        whole = await client.generate("a" * 64, prompt_logprobs=0, max_new_tokens=0)
        assert (whole.text, len(whole.token_ids), len(whole.prompt_logprobs)) == ("", 0, 63)
        assert whole.finish.reason == pb.FINISH_REASON_LENGTH
        assert whole.usage.generated_tokens == 0 and whole.usage.prompt_tokens == 64
        error = await refused(client.generate("a", max_new_tokens=0))
        assert violations(error) == {
            "sampling.max_new_tokens": "is 0; it must be at least 1 (0 needs prompt_logprobs)"
        }
        error = await refused(client.generate("a" * 65, prompt_logprobs=0, max_new_tokens=0))
        assert "at most 64 leave room" in violations(error)["text"]
        answer = await post(
            plain, "/v1/completions", prompt="ab", max_tokens=0, echo=True, logprobs=1
        )
        (choice,) = answer["choices"]
        assert choice["text"] == "ab" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, *said("ab")]
        assert answer["usage"]["completion_tokens"] == 0
        answer = await post(plain, "/v1/completions", prompt="ab", max_tokens=0, echo=True)
        assert answer["choices"][0]["text"] == "ab" and not answer["choices"][0]["logprobs"]
    assert balanced(engine.counters, engine) and engine.counters.generated_tokens == 0


def test_prompt_logprobs_offline():
    engine = ScriptedEngine(says("yes"))
    llm = LLM.over(engine, byte_tokenizer(), (EOS,))
    params = SamplingParams(prompt_logprobs=1, n=2, logprobs=0)
    (whole,) = llm.generate(["abc"], params)
    assert [entry.logprob for entry in whole.prompt_logprobs] == said("abc")
    assert whole.more[0].prompt_logprobs is None and whole.logprobs[0].rank == ord("y") + 1
    deltas = list(llm.stream("abcd", SamplingParams(prompt_logprobs=0, max_new_tokens=0)))
    found = [entry.logprob for delta in deltas for entry in delta.prompt_logprobs or ()]
    assert found == said("abcd") and deltas[-1].finish.reason is FinishReason.LENGTH
    (whole,) = llm.generate(["abc"], {"truncate_prompt_tokens": 2})
    assert whole.prompt_token_ids == [*b"bc"]
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate(["abc"], {"prompt_logprobs": 21})
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        llm.generate(["abc"], {"truncate_prompt_tokens": 0})


@in_loop
async def test_the_shape_that_lm_evaluation_harness_sends_and_reads():
    """Several prompts of token ids, of which it adds up the logprobs of each one's end."""
    prompts, context = [[*b"the cat"], [*b"a dog sat"]], [4, 6]
    async with doors(ScriptedEngine(says("!"))) as (_, plain, _):
        answer = await post(
            plain, "/v1/completions", model="fake", prompt=prompts, temperature=0, max_tokens=1,
            logprobs=1, seed=1234, echo=True,
        )  # fmt: skip
    for choice, prompt, length in zip(answer["choices"], prompts, context, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][length:-1] == [-byte / 2 for byte in prompt[length:]]
        for value, top in zip(
            logprobs["token_logprobs"][length:-1], logprobs["top_logprobs"][length:-1]
        ):
            assert value == min(top.values()) and max(top.values()) == 0, "not greedy"
        assert choice["text"] == bytes(prompt).decode() + "!"
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + 1
        assert logprobs["top_logprobs"][0] is None and logprobs["tokens"][-1] == "!"


@in_loop
async def test_echo_with_logprobs_streams_each_prompt_before_its_text():
    prompts = ["abcdef", "z", "xy"]
    async with doors(ScriptedEngine(echo, limits(max_queued_requests=6))) as (*_, official):
        stream = await official.completions.create(
            model="fake", prompt=prompts, echo=True, logprobs=1, stream=True, n=2, max_tokens=40,
            stream_options={"include_usage": True},
        )  # fmt: skip
        texts, logprobs = [""] * 6, [[] for _ in range(6)]
        async for chunk in stream:
            for choice in chunk.choices:
                first = not texts[choice.index]
                texts[choice.index] += choice.text
                logprobs[choice.index] += choice.logprobs.token_logprobs
                if first:
                    assert choice.text == prompts[choice.index // 2]
        assert texts == [2 * prompts[i // 2] for i in range(6)]
        for i, found in enumerate(logprobs):
            prompt = prompts[i // 2]
            assert found == [None, *said(prompt), *(-float(b) for b in [*prompt.encode(), EOS])]
        whole = await official.completions.create(
            model="fake", prompt=prompts, echo=True, logprobs=1, n=2, max_tokens=40
        )
        assert [choice.text for choice in whole.choices] == texts
        assert [choice.logprobs.token_logprobs for choice in whole.choices] == logprobs


@in_loop
async def test_vllms_extensions_over_http():
    async with doors(ScriptedEngine(says("yes"))) as (_, plain, _):
        answer = await post(
            plain, "/v1/completions", prompt="abc", prompt_logprobs=1, return_token_ids=True,
            logprobs=2, return_tokens_as_token_ids=True,
        )  # fmt: skip
        (choice,) = answer["choices"]
        first, second, third = choice["prompt_logprobs"]
        assert first is None and second["98"] == {"logprob": -49, "rank": 99, "decoded_token": "b"}
        assert set(third) == {"0", "99"}
        assert choice["prompt_token_ids"] == [*b"abc"] and choice["token_ids"] == [*b"yes", EOS]
        assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in [*b"yes", EOS]]
        assert choice["text"] == "yes"
        answer = await post(
            plain, "/v1/chat/completions", prompt_logprobs=0, tools=[],
            messages=[{"role": "user", "content": "hi"}],
        )  # fmt: skip
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        async with plain.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "abc", "stream": True, "return_token_ids": True, "stop": ["yesno"]},
        ) as streamed:
            lines = [line[6:] async for line in streamed.aiter_lines() if "{" in line]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert choices[0]["prompt_token_ids"] == [*b"abc"]
        assert [i for choice in choices for i in choice["token_ids"]] == [*b"yes", EOS]
        neutral = {
            "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False,
            "spaces_between_special_tokens": True, "suffix": "", "detokenize": True, "store": False,
            "truncation_side": "left", "service_tier": "auto", "vllm_xargs": {}, "metadata": {},
            "stream_interval": 1, "add_special_tokens": False, "prompt_logprobs": None,
        }  # fmt: skip
        await post(plain, "/v1/completions", prompt="abc", **neutral)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("use_beam_search", True, "beam search is not computed here"),
        ("best_of", 3, "ask for n samples"),
        ("length_penalty", 0.5, "beam search"),
        ("truncation_side", "right", "last tokens"),
        ("spaces_between_special_tokens", False, "as the tokenizer has them"),
        ("request_id", "mine", "x-request-id"),
        ("suffix", "end", "is not known to this server"),
        ("logprob_token_ids", [3], "is not known to this server"),
        ("prompt_embeds", "AAAA", "is not known to this server"),
        ("kv_transfer_params", {"a": 1}, "is not known to this server"),
        ("prompt_logprobs", -1, "from 0 to 20"),
        ("truncate_prompt_tokens", -2, "from 1 to 64, or -1"),
        ("truncate_prompt_tokens", 65, "from 1 to 64, or -1"),
    ],
)
def test_fields_that_are_not_honoured_are_refused_by_name(field, value, why):
    @in_loop
    async def ask():
        async with doors(ScriptedEngine(echo)) as (_, plain, _):
            answer = await plain.post("/v1/completions", json={"prompt": "abc", field: value})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == field
            assert why in error["message"]

    ask()


@in_loop
async def test_combinations_that_mean_nothing_are_refused():
    async with doors(ScriptedEngine(echo)) as (client, plain, _):
        for body, why in (
            ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "stream is true"),
            ({"prompt": "a", "return_tokens_as_token_ids": True}, "logprobs is not"),
            ({"prompt": [1, 2], "add_special_tokens": True}, "token ids"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
            ({"prompt": "a", "echo": True, "logprobs": 21}, "from 0 to 20"),
        ):
            answer = await plain.post("/v1/completions", json=body)
            assert answer.status_code == 400 and why in answer.text, answer.text
        for prompt in ([1, 2], [{"role": "user", "content": "x"}]):
            error = await refused(client.generate(prompt, add_special_tokens=False))
            assert "add_special_tokens" in violations(error)


@in_loop
async def test_prompts_that_never_fit_the_queue_together_are_refused_with_the_limit():
    engine = ScriptedEngine(echo, limits(max_queued_tokens=100, max_queued_requests=9))
    async with doors(engine) as (_, plain, _):
        prompts = ["x" * 60, "y" * 41]
        answer = await plain.post("/v1/completions", json={"prompt": prompts})
        assert answer.status_code == 400
        assert "101 tokens" in answer.text and "takes 100 (--max-queued-tokens)" in answer.text
        body = {"prompt": ["x" * 20, "y" * 20], "n": 3}
        answer = await plain.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "120 tokens in all, for 3 samples" in answer.text
        answer = await post(plain, "/v1/completions", prompt=["x" * 60, "y" * 40])
        assert len(answer["choices"]) == 2
    assert balanced(engine.counters, engine)


@in_loop
async def test_the_usual_length_is_cut_near_the_full_one_and_what_is_asked_for_is_not():
    async with doors(ScriptedEngine(lambda request: [65] * 99)) as (_, plain, _):
        for length, generated in ((10, 16), (48, 16), (49, 15), (63, 1)):
            answer = await post(plain, "/v1/completions", prompt="x" * length)
            assert answer["usage"]["completion_tokens"] == generated
            assert answer["choices"][0]["finish_reason"] == "length"
        answer = await plain.post("/v1/completions", json={"prompt": "x" * 63, "max_tokens": 16})
        assert answer.status_code == 400 and "ask for at most 1" in answer.text
        assert (await plain.post("/v1/completions", json={"prompt": "x" * 64})).status_code == 400
        answer = await post(
            plain, "/v1/completions", prompt="x" * 70, truncate_prompt_tokens=-1, echo=True
        )
        assert answer["usage"] | {"prompt_tokens_details": 0} == {
            "prompt_tokens": 48, "completion_tokens": 16, "total_tokens": 64,
            "prompt_tokens_details": 0,
        }  # fmt: skip
        assert answer["choices"][0]["text"] == "x" * 48 + "A" * 16


@given(
    count=st.integers(1, 300),
    keep=st.one_of(st.none(), st.integers(-5, 300)),
    asked=st.one_of(st.none(), st.integers(0, 300)),
    whole=st.booleans(),
)
def test_truncation_keeps_the_last_tokens_and_leaves_room(count, keep, asked, whole):
    bounds, prompt = limits(max_model_len=100, kv_tokens=80), list(range(count))
    given = {"truncate_prompt_tokens": keep, "max_new_tokens": asked}
    params = SamplingParams(**given) if whole else {k: v for k, v in given.items() if v is not None}
    if keep is not None and keep != -1 and not 1 <= keep <= 80:
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            truncated(prompt, params, bounds)
        return
    kept = truncated(prompt, params, bounds)
    assert list(kept) == prompt[count - len(kept) :] and len(kept) >= 1
    if keep is None:
        assert len(kept) == count
    elif keep > 0:
        assert len(kept) == min(keep, count)
    elif asked is None or asked < 80:
        assert len(kept) == min(count, 80 - (1 if asked is None else asked))


def test_lengths_are_counted_after_truncation():
    text = TextProcessor(byte_tokenizer(), (EOS,), limits(), SamplingDefaults())
    (request,) = text.requests([7] * 500, {"truncate_prompt_tokens": -1}, "r", 0.0)
    assert len(request.prompt) == 63 and request.max_new_tokens == 1
    (request,) = text.requests(
        [7] * 500, {"truncate_prompt_tokens": -1, "max_new_tokens": 30}, "r", 0.0
    )
    assert len(request.prompt) == 34 and request.max_new_tokens == 30


@in_loop
async def test_no_answer_is_larger_than_it_may_be():
    """The same prompt is streamed over gRPC; and what is long is written beside the event loop."""
    bounds = limits(
        max_model_len=30_000, kv_tokens=30_000, max_queued_tokens=90_000, max_queued_requests=5
    )
    engine = ScriptedEngine(says("yes"), bounds)
    async with doors(engine) as (client, plain, _):
        prompt = [65] * 20_000
        error = await refused(client.generate(prompt, prompt_logprobs=20, max_new_tokens=0))
        assert "419979 logprobs" in violations(error)["sampling.prompt_logprobs"]
        for body in ({"prompt_logprobs": 20}, {"logprobs": 5, "echo": True, "n": 3}):
            answer = await plain.post("/v1/completions", json={"prompt": prompt, **body})
            assert answer.status_code == 400 and "stream them over gRPC" in answer.text
        count = 0
        async for chunk in client.stream(prompt[:13_000], prompt_logprobs=20, max_new_tokens=0):
            count += len(chunk.prompt_logprobs)
        assert count == 12_999
        answer = await post(
            plain, "/v1/completions", prompt=prompt, prompt_logprobs=0, max_tokens=0
        )
        assert len(answer["choices"][0]["prompt_logprobs"]) == 20_000
        cut = {"prompt_logprobs": 20, "truncate_prompt_tokens": 9, "max_tokens": 0}
        answer = await post(plain, "/v1/completions", prompt=[prompt] * 5, **cut)
        assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [9] * 5
    assert balanced(engine.counters, engine)
