"""The service over gRPC: bad input is refused by name, and the engine goes on."""

from __future__ import annotations

import grpc
from fake_engine import ScriptedEngine, echo
from jaxinfer_service.client import generate_request, violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.servicer import SERVICE_NAME
from serving import in_loop, refused, serving

Code = grpc.StatusCode


async def raw(client, method, data):
    """A call with these bytes as its message."""
    call = client.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
    if method == "GenerateStream":
        return [c async for c in client.channel.unary_stream(f"/{SERVICE_NAME}/{method}")(data)]
    return await call(data)


NAN, INF = float("nan"), float("inf")
BAD = [
    ("", {}, "text"),
    ([], {}, "token_ids"),
    ("x" * 64, {}, "text"),
    ("x" * 1000, {}, "text"),
    ([65] * 64, {}, "token_ids"),
    ([{"role": "user", "content": "x" * 64}], {}, "chat"),
    ([{"role": "user", "content": "x" * 1000}], {}, "chat"),
    ([256, 257], {}, "token_ids.ids[1]"),
    ([-1], {}, "token_ids.ids[0]"),
    ([2**63 - 1], {}, "token_ids.ids[0]"),
    ("x", {"max_new_tokens": 64}, "sampling.max_new_tokens"),
    ("x", {"max_new_tokens": -1}, "sampling.max_new_tokens"),
    ("x", {"temperature": NAN}, "sampling.temperature"),
    ("x", {"temperature": INF}, "sampling.temperature"),
    ("x", {"top_p": 0}, "sampling.top_p"),
    ("x", {"min_p": NAN}, "sampling.min_p"),
    ("x", {"repetition_penalty": 0}, "sampling.repetition_penalty"),
    ("x", {"stop_token_ids": [257]}, "sampling.stop_token_ids[0]"),
    ("x", {"stop_token_ids": [2**63 - 1]}, "sampling.stop_token_ids[0]"),
    ("x", {"logit_bias": {-1: 1}}, "sampling.logit_bias[-1]"),
    ("x", {"logit_bias": {257: 1}}, "sampling.logit_bias[257]"),
    ("x", {"logit_bias": {5: INF}}, "sampling.logit_bias[5]"),
    ("x", {"logprobs": 21}, "sampling.logprobs"),
    ("x", {"stop": [""]}, "sampling.stop[0]"),
    ("x", {"seed": -1}, "sampling.seed"),
    ([{"role": "", "content": "c"}], {}, "chat.messages[0].role"),
    ([{"role": "u", "content": ""}, {"role": "", "content": "c"}], {}, "chat.messages[1].role"),
]


def is_field(message, path):
    """Whether the message has a field by this path."""
    name, _, rest = path.partition(".")
    field = message.fields_by_name.get(name.partition("[")[0])
    return field is not None and (not rest or is_field(field.message_type, rest))


@in_loop
async def test_what_cannot_be_tokenized_is_named_too():
    async with serving(ScriptedEngine()) as (_, client):
        chat = [{"role": "user", "content": "x" * 1000}]
        for prompt, field in (
            ("x" * 10_000_000, "text"), (chat, "chat"),
            ([{"role": "", "content": "c"}], "chat.messages[0].role"),
        ):  # fmt: skip
            error = await refused(client.tokenize(prompt))
            assert error.code() is Code.INVALID_ARGUMENT
            assert list(violations(error)) == [field] and f"{field}: " in error.details()
            assert is_field(pb.TokenizeRequest.DESCRIPTOR, field)
        error = await refused(client.detokenize([65, 999]))
        assert list(violations(error)) == ["token_ids[1]"]


@in_loop
async def test_bad_input_is_named_and_the_engine_goes_on():
    engine = ScriptedEngine(echo)
    async with serving(engine) as (_, client):
        for prompt, sampling, field in BAD:
            error = await refused(client.generate(prompt, **sampling))
            assert error.code() is Code.INVALID_ARGUMENT, (sampling, error)
            assert list(violations(error)) == [field], error.details()
            assert f"{field}: " in error.details()
            assert is_field(pb.GenerateRequest.DESCRIPTOR, field), field
        assert engine.counters.received == 0
        assert (await client.generate("still here")).text == "still here"


@in_loop
async def test_prompts_at_the_limit():
    async with serving(ScriptedEngine(echo)) as (_, client):
        answer = await client.generate([65] * 63)  # max_model_len - 1
        assert answer.text == "A" and answer.finish.reason == pb.FINISH_REASON_LENGTH
        assert (await client.generate([65])).finish.reason == pb.FINISH_REASON_EOS
        assert (await refused(client.generate([65] * 64))).code() is Code.INVALID_ARGUMENT


@in_loop
async def test_undecodable_bytes_are_invalid_argument_for_every_method():
    async with serving(ScriptedEngine()) as (_, client):
        bad = [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x0a"]  # junk, bad UTF-8, cut short
        for method in ("Generate", "GenerateStream", "Tokenize", "Detokenize"):
            for data in bad:
                if (method, data) == ("Detokenize", bad[1]):
                    continue  # there field 2 holds packed ids
                error = await refused(raw(client, method, data))
                assert error.code() is Code.INVALID_ARGUMENT, (method, data, error)
        assert (await client.generate("ok")).text == "ok"


@in_loop
async def test_a_field_this_server_does_not_know_is_refused_by_name():
    async with serving(ScriptedEngine()) as (_, client):
        known = generate_request("x", temperature=0).SerializeToString()
        field_99 = b"\x98\x06\x01"
        error = await refused(raw(client, "Generate", known + field_99))
        assert list(violations(error)) == ["GenerateRequest.field_99"]
        nested = known + b"\x2a" + bytes([len(field_99)]) + field_99  # within sampling
        error = await refused(raw(client, "Generate", nested))
        assert list(violations(error)) == ["Sampling.field_99"]


@in_loop
async def test_a_request_without_prompt_and_another_model():
    async with serving(ScriptedEngine()) as (_, client):
        error = await refused(client.stub.Generate(pb.GenerateRequest()))
        assert error.code() is Code.INVALID_ARGUMENT and "prompt" in violations(error)
        error = await refused(client.stub.Generate(pb.GenerateRequest(chat=pb.Chat())))
        assert "chat" in violations(error)
        for call in (client.generate("x", model="other"), client.tokenize("x", model="other")):
            error = await refused(call)
            assert error.code() is Code.NOT_FOUND
            assert "other" in error.details() and "fake" in error.details()


@in_loop
async def test_many_long_violations_fit_into_the_trailers():
    async with serving(ScriptedEngine()) as (_, client):
        error = await refused(client.generate("x", stop=[""] * 64, stop_token_ids=[999]))
        assert error.code() is Code.INVALID_ARGUMENT and len(violations(error)) > 5
        error = await refused(client.generate("x", model="名" * 5000))
        assert error.code() is Code.NOT_FOUND
