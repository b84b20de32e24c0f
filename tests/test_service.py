"""The service over gRPC: every call, every refusal, cancel, deadline, overload, drain, failure."""

from __future__ import annotations

import asyncio
import os
import sys

import grpc
import pytest
from fake_engine import EOS, ScriptedEngine, balanced, echo, forever, limits, says
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from jaxinfer_service.client import AsyncClient, generate_request, violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.server import Server, ServerConfig
from jaxinfer_service.servicer import SERVICE_NAME
from serving import in_loop, opened, serving, until

from jaxinfer.request import FinishReason

LONG = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
Code = grpc.StatusCode


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def raw(client, method, data, kind=None):
    """A call with these bytes as its message."""
    call = client.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
    if method == "GenerateStream":
        return [c async for c in client.channel.unary_stream(f"/{SERVICE_NAME}/{method}")(data)]
    return await call(data)


# -- answers -------------------------------------------------------------------------------------


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
    }  # fmt: skip
    assert set(given) == set(pb.Sampling.DESCRIPTOR.fields_by_name)
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


# -- refusals ------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BAD = [
    ("", {}, "prompt"),
    ([], {}, "prompt"),
    ("x" * 64, {}, "prompt"),
    ([256, 257], {}, "prompt[1]"),
    ([-1], {}, "prompt[0]"),
    ([2**63 - 1], {}, "prompt[0]"),
    ("x", {"max_new_tokens": 64}, "sampling.max_new_tokens"),
    ("x", {"max_new_tokens": -1}, "sampling.max_new_tokens"),
    ("x", {"temperature": NAN}, "sampling.temperature"),
    ("x", {"temperature": INF}, "sampling.temperature"),
    ("x", {"top_p": 0}, "sampling.top_p"),
    ("x", {"min_p": NAN}, "sampling.min_p"),
    ("x", {"repetition_penalty": 0}, "sampling.repetition_penalty"),
    ("x", {"stop_token_ids": [257]}, "sampling.stop_token_ids[0]"),
    ("x", {"stop_token_ids": [2**63 - 1]}, "sampling.stop_token_ids[0]"),
    ("x", {"logit_bias": {-1: 1}}, "sampling.logit_bias[0]"),
    ("x", {"logit_bias": {257: 1}}, "sampling.logit_bias[0]"),
    ("x", {"logit_bias": {5: INF}}, "sampling.logit_bias[5]"),
    ("x", {"logprobs": 21}, "sampling.logprobs"),
    ("x", {"stop": [""]}, "sampling.stop[0]"),
    ("x", {"seed": -1}, "sampling.seed"),
    ([{"role": "", "content": "c"}], {}, "prompt"),
]


@in_loop
async def test_bad_input_is_named_and_the_engine_goes_on():
    engine = ScriptedEngine(echo)
    async with serving(engine) as (_, client):
        for prompt, sampling, field in BAD:
            error = await refused(client.generate(prompt, **sampling))
            assert error.code() is Code.INVALID_ARGUMENT, (sampling, error)
            assert list(violations(error)) == [field], error.details()
            assert field.removeprefix("sampling.") in error.details()
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


# -- leaving, deadlines, overload ----------------------------------------------------------------


@in_loop
async def test_a_client_that_cancels_frees_its_slot():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, client):
        call = client.stream("x", max_new_tokens=10_000)
        await anext(aiter(call))
        call.cancel()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]
        unary = asyncio.create_task(client.generate("x", max_new_tokens=10_000))
        await until(lambda: engine.running)
        unary.cancel()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED] * 2
        assert balanced(server._service.served.frontend.counters, engine)


@in_loop
async def test_a_client_that_dies_frees_its_slot():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, _):
        script = (
            "import sys; from jaxinfer_service.client import Client\n"
            f"for chunk in Client('127.0.0.1:{server.port}').stream('x', max_new_tokens=10_000):\n"
            "    print('chunk', flush=True)"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert await process.stdout.readline() == b"chunk\n"
        process.kill()
        await process.communicate()
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]


@in_loop
async def test_pings_through_a_long_silence_are_no_offence():
    """A server with gRPC's own settings says GOAWAY (too many pings) here, at the fourth ping."""
    engine = ScriptedEngine(echo)
    options = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with serving(engine) as (server, _):
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            call = channel.unary_unary(
                f"/{SERVICE_NAME}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            engine.gate.clear()
            waiting = asyncio.ensure_future(call(generate_request("patience")))
            await asyncio.sleep(5.5)  # a client pings once a second at most
            assert not waiting.done()
            engine.gate.set()
            assert (await waiting).text == "patience"


@in_loop
async def test_the_deadline_of_a_call_ends_its_request():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (_, client):
        error = await refused(client.generate("x", timeout=0.2))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.DEADLINE]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.stream("x", timeout=0.2):
                pass
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not engine.has_work)
        assert [*engine.ended.values()] == [FinishReason.DEADLINE] * 2


@in_loop
async def test_a_slow_reader_slows_itself_only():
    engine = ScriptedEngine(says("a" * 40))
    async with serving(engine) as (_, client):
        slow = aiter(client.stream("x"))
        await anext(slow)
        fast = await client.generate("x")
        await until(lambda: not engine.has_work)
        rest = [chunk async for chunk in slow]
        assert fast.text == "a" * 40 and rest[-1].usage.generated_tokens == 41


@in_loop
async def test_a_full_queue_says_when_to_retry():
    engine = ScriptedEngine(echo, limits(max_queued_requests=2))
    async with serving(engine) as (server, client):
        engine.gate.clear()
        first = asyncio.create_task(client.generate("warm"))
        await until(lambda: engine.running or engine.waiting)
        calls = [asyncio.create_task(client.generate("abc")) for _ in range(20)]
        done, pending = await asyncio.wait(calls, timeout=2)
        errors = [task.exception() for task in done]
        assert errors and all(e.code() is Code.RESOURCE_EXHAUSTED for e in errors)
        assert int(errors[0].trailing_metadata()["grpc-retry-pushback-ms"]) >= 1000
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(errors[0]).details[0].Unpack(retry)
        assert retry.retry_delay.seconds >= 1
        engine.gate.set()
        assert {(await task).text for task in pending} == {"abc"}
        assert (await first).text == "warm"
        counters = server._service.served.frontend.counters
        assert counters.refused == len(errors) and balanced(counters, engine)


@in_loop
async def test_counters_balance_over_all_ways_to_end():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)
    async with serving(engine) as (server, client):
        await client.generate("a", max_new_tokens=5)
        await client.generate("a", stop=["%"])  # the fifth token
        await refused(client.generate("a", temperature=-1))
        await refused(client.generate("a", timeout=0.1))
        call = client.stream("a")
        await anext(aiter(call))
        call.cancel()
        await until(lambda: not engine.has_work)
        await asyncio.sleep(0.05)
        counters = server._service.served.frontend.counters
        assert (counters.received, counters.finished, counters.aborted, counters.refused) == (
            5, 2, 2, 1,
        )  # fmt: skip
        assert counters.prompt_tokens == 4
        assert engine.ended["r2"] is FinishReason.STOP_STRING


# -- life ----------------------------------------------------------------------------------------


@in_loop
async def test_health_reflection_and_calls_while_loading():
    loaded = asyncio.Event()
    loop = asyncio.get_running_loop()
    engine = ScriptedEngine()

    def slow_open():
        asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result()
        return opened(engine)

    server = Server(ServerConfig(port=0), slow_open)
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        assert not await client.is_serving(5)
        error = await refused(client.generate("x"))
        assert error.code() is Code.UNAVAILABLE and "loading" in error.details()
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            services = [s.name for s in answer.list_services_response.service]
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(services)
        loaded.set()
        await client.wait_ready(5)
        assert (await client.generate("x")).text == "x"
    server.shut_down()
    assert await task is True


@in_loop
async def test_a_model_that_fails_to_load_leaves_nothing_running():
    def broken():
        raise ValueError("tensor x is missing")

    server = Server(ServerConfig(port=0), broken)
    with pytest.raises(ValueError, match="tensor x is missing"):
        await server.run(on_signals=False)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)


@in_loop
async def test_draining_with_50_running_and_20_waiting():
    engine = ScriptedEngine(says("a" * 40), limits(max_num_seqs=50, max_queued_requests=100), 0.02)
    async with serving(engine, drain_timeout=20) as (server, client):
        streams = [client.stream("x") for _ in range(70)]

        async def consume(stream):
            return "".join([chunk.text async for chunk in stream])

        tasks = [asyncio.create_task(consume(stream)) for stream in streams]
        frontend = server._service.served.frontend
        await until(lambda: sum(s.started for s in frontend._streams.values()) == 50)
        await until(lambda: len(frontend._streams) == 70)
        server.shut_down()
        await asyncio.sleep(0)
        results = asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine.waiting)
        assert not await client.is_serving()
        late = await refused(client.generate("x"))
        assert late.code() is Code.UNAVAILABLE
        answers = await results
    ended = [a for a in answers if a == "a" * 40]
    refused_ones = [a for a in answers if isinstance(a, grpc.aio.AioRpcError)]
    assert len(ended) == 50 and len(refused_ones) == 20
    assert {e.code() for e in refused_ones} == {Code.UNAVAILABLE}
    assert balanced(frontend.counters, engine) and not engine.has_work


@in_loop
async def test_a_dead_engine_is_unavailable_and_unhealthy_and_says_why():
    engine = ScriptedEngine(forever, LONG)
    async with serving(engine) as (_, client):
        engine.gate.clear()
        call = asyncio.create_task(client.generate("x"))
        await until(lambda: engine.has_work)
        engine.fail_with = MemoryError("the device is gone")
        engine.gate.set()
        error = await refused(call)
        assert error.code() is Code.UNAVAILABLE and "the device is gone" in error.details()
        assert "the device is gone" in (await refused(client.generate("x"))).details()
        await asyncio.sleep(0.4)
        assert not await client.is_serving()


@in_loop
async def test_a_stalled_engine_is_unhealthy_until_it_moves():
    engine = ScriptedEngine(echo)
    async with serving(engine, stall_limit=0.3) as (_, client):
        engine.gate.clear()
        error = await refused(client.generate("x"))
        assert error.code() is Code.UNAVAILABLE and "stalls" in error.details()
        assert not await client.is_serving()
        engine.gate.set()
        await client.wait_ready(5)
        assert (await client.generate("x")).text == "x"
