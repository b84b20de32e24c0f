"""Readers that stop reading until flow control bites, over both doors.

What waits for such a reader is bounded, its request is set aside, others go on, and once it reads
again it gets every token once. For flow control to bite, much more must be to come than windows and
buffers between the two ends hold: with 20 logprobs a token has more than 1 KB over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import grpc
import pytest
from fake_engine import LONG, ScriptedEngine, balanced, forever
from jaxinfer_service.client import generate_request
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2_grpc
from serving import in_loop, serving, until

from jaxinfer.request import FinishReason
from jaxinfer.stream import MOST_UNREAD

TOKENS, TOP = 8_000, 20
ASKED = {"max_new_tokens": TOKENS, "logprobs": TOP}
MOST_TOKENS = MOST_UNREAD // (1 + TOP)
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))


def expected() -> list[int]:
    return forever(None)[:TOKENS]


@contextlib.asynccontextmanager
async def over_grpc(server):
    """What reads the answer's tokens, so many messages or all."""
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GenerateStream(generate_request("x", **ASKED))

        async def read(messages: int | None) -> list[int]:
            found: list[int] = []
            while messages is None or messages > 0:
                chunk = await call.read()
                if chunk is grpc.aio.EOF:
                    break
                found += chunk.token_ids
                messages = None if messages is None else messages - 1
            return found

        yield read
        call.cancel()  # if it has not ended


class Socket:
    """The same over HTTP, of a socket that takes nothing by itself."""

    def __init__(self):
        self._sock, self._received = socket.socket(), bytearray()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self._sock.setblocking(False)

    async def ask(self, server):
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._sock, ("127.0.0.1", server.http_port))
        asked = {"prompt": "x", "stream": True, "max_tokens": TOKENS, "logprobs": TOP}
        body = json.dumps(asked | {"return_token_ids": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(self._sock, head.encode() + body)

    async def read(self, messages: int | None) -> list[int]:
        """Tokens of the first events, or of those that are left."""
        loop = asyncio.get_running_loop()
        while messages is None or self._received.count(b"data: ") <= messages:
            if not (got := await loop.sock_recv(self._sock, 1 << 20)):
                break
            self._received += got
        *events, rest = self._received.split(b"data: ")[1:]
        if messages is None:
            assert rest.startswith(b"[DONE]")
        else:
            events = events[:messages]
            self._received = self._received.split(b"data: ", 1 + messages)[-1]
            self._received[:0] = b"data: "
        return [token for event in events for token in _tokens(event)]

    def close(self):
        self._sock.close()


def _tokens(event: bytes) -> list[int]:
    """Each event is a chunk of its own."""
    choices = json.loads(event.partition(b"\n")[0])["choices"]
    return [token for choice in choices for token in choice["token_ids"]]


@contextlib.asynccontextmanager
async def over_http(server):
    reader = Socket()
    await reader.ask(server)
    yield reader.read
    reader.close()


@pytest.mark.parametrize("door", [over_grpc, over_http])
@in_loop
async def test_a_reader_that_stops_slows_itself_alone(door):
    engine = ScriptedEngine(forever, LONG, step_seconds=0.0002)
    async with serving(engine, http_port=0) as (server, client), door(server) as read:
        began = await read(3)
        frontend = server._service.served.frontend
        (stream,) = frontend._streams.values()
        await until(lambda: stream.id in engine.held)
        _, _, made = engine.running[stream.id]
        await until(lambda: stream.samples[0].generated == made)
        held = len(stream._pending[0].token_ids)
        assert MOST_TOKENS <= held < TOKENS // 2 and made < TOKENS
        others = [client.generate("y", max_new_tokens=50) for _ in range(4)]
        assert {len(each.token_ids) for each in await asyncio.gather(*others)} == {50}
        assert engine.running[stream.id][2] == made, "it goes on"
        assert len(stream._pending[0].token_ids) == held and not frontend.unavailable()
        assert began + await read(None) == expected()
        await until(lambda: not engine.running)
        assert [hold.held for hold in engine.holds] == [True, False] * (len(engine.holds) // 2)
        assert balanced(frontend.counters, engine) and not frontend._streams


@pytest.mark.parametrize("door", [over_grpc, over_http])
@in_loop
async def test_a_reader_that_stopped_and_leaves_is_ended(door):
    engine = ScriptedEngine(forever, LONG, step_seconds=0.0002)
    async with serving(engine, http_port=0) as (server, _):
        async with door(server) as read:
            await read(1)
            await until(lambda: engine.holds)
        await until(lambda: not engine.running)
        assert not server._service.served.frontend._streams
        assert [*engine.ended.values()] == [FinishReason.CANCELLED]
