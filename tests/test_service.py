"""The service over gRPC: what it answers, and that every field reaches the engine."""

from __future__ import annotations

import grpc
from fake_engine import EOS, ScriptedEngine, echo, says
from jaxinfer_service.client import violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import in_loop, refused, serving

Code = grpc.StatusCode


@in_loop
async def test_generate_answers_text_ids_and_chat():
    async with serving(ScriptedEngine(echo)) as (_, client):
        answer = await client.generate("hi 你好", temperature=0)
        assert answer.text == "hi 你好" and answer.model == "fake" and answer.request_id
        assert list(answer.token_ids) == [*"hi 你好".encode(), EOS]
        assert answer.finish == pb.Finish(reason=pb.FINISH_REASON_EOS, stop_token_id=EOS)
        assert answer.usage == pb.Usage(prompt_tokens=9, generated_tokens=10)
        assert 0 <= answer.timing.queued <= answer.timing.first_token <= answer.timing.total
        assert (await client.generate([104, 105])).text == "hi"
        chat = await client.generate([{"role": "user", "content": "a"}], model="fake")
        assert chat.text == "user: a\nassistant:"


@in_loop
async def test_a_stream_is_the_unary_answer_in_pieces():
    async with serving(ScriptedEngine(says("你好 😀 one two"))) as (_, client):
        for stop in ([], ["two"], ["😀"], ["zzz"]):
            whole = await client.generate("x", stop=stop, logprobs=1)
            chunks = [chunk async for chunk in client.stream("x", stop=stop, logprobs=1)]
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert "\ufffd" not in "".join(chunk.text for chunk in chunks)
            assert [i for chunk in chunks for i in chunk.token_ids] == list(whole.token_ids)
            assert [p for chunk in chunks for p in chunk.logprobs] == list(whole.logprobs)
            assert (chunks[-1].finish, chunks[-1].usage) == (whole.finish, whole.usage)
            assert [c for c in chunks[:-1] if c.HasField("finish")] == []
            assert chunks[0].request_id and not any(c.request_id for c in chunks[1:])


@in_loop
async def test_each_way_to_end_is_typed():
    async with serving(ScriptedEngine(says("one two"))) as (_, client):
        cases = [
            ({}, pb.Finish(reason=pb.FINISH_REASON_EOS, stop_token_id=EOS)),
            ({"max_new_tokens": 3}, pb.Finish(reason=pb.FINISH_REASON_LENGTH)),
            ({"stop": ["tw"]}, pb.Finish(reason=pb.FINISH_REASON_STOP_STRING, stop_string="tw")),
            (
                {"stop_token_ids": [ord("t")]},
                pb.Finish(reason=pb.FINISH_REASON_STOP_ID, stop_token_id=ord("t")),
            ),
        ]
        for sampling, finish in cases:
            assert (await client.generate("x", **sampling)).finish == finish


@in_loop
async def test_logprobs_of_chosen_and_top():
    async with serving(ScriptedEngine(says("a"))) as (_, client):
        answer = await client.generate("x", logprobs=2, max_new_tokens=1)
        (entry,) = answer.logprobs
        assert (entry.chosen.token_id, entry.chosen.logprob) == (97, -97.0)
        assert [(t.token_id, t.logprob) for t in entry.top] == [(0, 0.0), (1, -1.0)]
        assert len((await client.generate("x", max_new_tokens=1)).logprobs) == 0


@in_loop
async def test_tokenize_and_detokenize():
    async with serving(ScriptedEngine()) as (_, client):
        assert await client.tokenize("hé") == [*"hé".encode()]
        chat = await client.tokenize([{"role": "user", "content": "<eos>"}])
        assert chat == [*b"user: <eos>\nassistant:"]  # what a user writes is text
        assert await client.detokenize([*"hé".encode(), EOS]) == "hé"
        assert await client.detokenize([104, EOS], skip_special_tokens=False) == "h<eos>"
        error = await refused(client.detokenize([104, 257]))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "from 0 to 256" in violations(error)["token_ids[1]"]
        error = await refused(
            client.tokenize([{"role": "u", "content": "c"}], add_special_tokens=False)
        )
        assert "add_special_tokens" in violations(error)


@in_loop
async def test_every_sampling_field_reaches_the_engine():
    seen = []

    def script(request):
        seen.append(request)
        return [EOS] * 20

    given = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -0.5, "frequency_penalty": 0.75, "logit_bias": {5: 1.5, 3: -100.0},
        "seed": 2**63 - 1, "max_new_tokens": 11, "stop": ["s", "t"], "stop_token_ids": [9, 8],
        "include_stop": True, "ignore_eos": True, "logprobs": 3, "skip_special_tokens": False,
        "n": 1, "prompt_logprobs": 2, "truncate_prompt_tokens": 5,
    }  # fmt: skip
    rules = {"min_tokens", "allowed_token_ids", "bad_words", "structured"}  # test_rules_wire
    assert set(given) | rules == set(pb.Sampling.DESCRIPTOR.fields_by_name)
    async with serving(ScriptedEngine(script)) as (_, client):
        await client.generate("x", **given, timeout=20)
        await client.generate("x")
    params = seen[0].params
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        got = dict(params.logit_bias) if name == "logit_bias" else getattr(params, name)
        assert got == expected, name
    assert seen[0].stop_ids == (9, 8) and seen[0].seed == 2**63 - 1
    assert 15 < seen[0].deadline - seen[0].arrival < 21  # gRPC rounds timeouts up
    default = seen[1].params
    assert (default.temperature, default.top_p, default.skip_special_tokens) == (1.0, 1.0, True)
    assert seen[1].deadline is None


@in_loop
async def test_an_explicit_zero_is_not_the_default():
    seen = []
    engine = ScriptedEngine(lambda request: [seen.append(request.params.temperature) or EOS])
    async with serving(engine) as (_, client):
        await client.generate("x", temperature=0)
        await client.generate("x", temperature=1e-9)
        error = await refused(client.generate("x", max_new_tokens=0))
        assert "at least 1" in violations(error)["sampling.max_new_tokens"]
    assert seen == [0.0, 1e-9]
