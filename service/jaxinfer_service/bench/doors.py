"""How load reaches a server: gRPC, or the OpenAI API over HTTP.

Requests are token ids, greedy and of their full length. Both doors tell of each message how many
tokens it brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import h11

from jaxinfer.bench.workload import WorkItem
from jaxinfer_service.channel import own_key
from jaxinfer_service.client import AsyncClient

_READ_BYTES = 1 << 16


class Door(Protocol):
    """A way into a server; `more` of `stream` are further parameters by the door's own names."""

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server takes requests. Raises TimeoutError."""

    def stream(self, item: WorkItem, **more: Any) -> AsyncGenerator[int]:
        """Send a request; yields how many tokens each message brings. Raises when it fails."""

    async def close(self) -> None: ...


def door(server: str) -> Door:
    """The door of "HOST:PORT" (gRPC, tls:// before it with TLS) or "http://HOST:PORT".

    Raises ValueError for what is neither. Both send the environment's API key, if any.
    """
    return HttpDoor(server) if server.startswith("http://") else GrpcDoor(server)


class GrpcDoor:
    """jaxinfer.v1 over one connection; refusals are not tried again: they are to be seen."""

    def __init__(self, server: str):
        self._client = AsyncClient(server, retries=0)

    async def wait_ready(self, seconds: float) -> None:
        await self._client.wait_ready(seconds)

    async def stream(self, item: WorkItem, **more: Any) -> AsyncGenerator[int]:
        asked = {"temperature": 0, "max_new_tokens": item.output_len, "ignore_eos": True} | more
        async for chunk in self._client.stream(item.prompt, **asked):
            yield len(chunk.token_ids)

    async def close(self) -> None:
        await self._client.close()


class HttpDoor:
    """/v1/completions, streamed, over connections that are used again.

    An event with text counts as one token; what the usage at the end has more came with others.
    """

    def __init__(self, server: str):
        where = urlsplit(server)
        self._host, self._port = where.hostname or "localhost", where.port or 80
        self._idle = list[_Link]()

    async def wait_ready(self, seconds: float) -> None:
        last: object = "nothing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        async with self._asked("GET", "/ready") as answer:
                            if answer.status == 200:
                                return
                            last = answer.status
                    except OSError as error:
                        last = error
                    await asyncio.sleep(0.2)
        raise TimeoutError(
            f"http://{self._host}:{self._port} is not ready after {seconds:g} s; last: {last}"
        )

    async def stream(self, item: WorkItem, **more: Any) -> AsyncGenerator[int]:
        body = {
            "prompt": list(item.prompt),
            "max_tokens": item.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | more
        counted = 0
        async with self._asked("POST", "/v1/completions", json.dumps(body).encode()) as answer:
            if answer.status != 200:
                said = b"".join([data async for data in answer.body()])
                raise ConnectionError(f"HTTP {answer.status}: {said.decode(errors='replace')}")
            async for event in _events(answer.body()):
                found = json.loads(event)
                if "error" in found:
                    raise ConnectionError(found["error"]["message"])
                if usage := found.get("usage"):
                    yield usage["completion_tokens"] - counted
                elif found["choices"][0]["text"]:
                    counted += 1
                    yield 1

    async def close(self) -> None:
        for link in self._idle:
            link.writer.close()

    def _kept(self) -> _Link | None:
        """A connection that the server has not closed meanwhile."""
        while self._idle:
            link = self._idle.pop()
            if not link.reader.at_eof():
                return link
            link.writer.close()
        return None

    async def _sent(self, request: Sequence[Any]) -> tuple[_Link, int]:
        """The connection that a request went over, and the status of the answer. A kept one may
        have been closed by the server just now; then the next one is tried."""
        while True:
            kept = self._kept()
            link = kept or await _Link.open(self._host, self._port)
            try:
                for event in request:
                    link.writer.write(link.http.send(event) or b"")
                return link, await link.head()
            except BaseException as error:
                link.writer.close()
                if kept is None or not isinstance(error, OSError):
                    raise

    @contextlib.asynccontextmanager
    async def _asked(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[_Answer]:
        """One request, on a connection that is kept if its answer was read to the end."""
        head = [("Host", f"{self._host}:{self._port}")]
        if key := own_key():
            head.append(("Authorization", f"Bearer {key}"))
        if body:
            head += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=path, headers=head)
        link, status = await self._sent((request, h11.Data(data=body), h11.EndOfMessage()))
        try:
            yield _Answer(link, status)
        finally:
            if link.http.their_state is h11.DONE and link.http.our_state is h11.DONE:
                link.http.start_next_cycle()
                self._idle.append(link)
            else:
                link.writer.close()


@dataclass(slots=True)
class _Link:
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        return cls(*await asyncio.open_connection(host, port), h11.Connection(h11.CLIENT))

    async def next(self) -> Any:
        """The next event of the answer. Raises ConnectionError for what is no HTTP."""
        try:
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            raise ConnectionError(f"the server does not speak HTTP: {error}") from error
        return event

    async def head(self) -> int:
        """The status of the answer. Raises ConnectionError if there is none."""
        while not isinstance(event := await self.next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("the server closed the connection without an answer")
        return event.status_code


@dataclass(frozen=True, slots=True)
class _Answer:
    link: _Link
    status: int

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self.link.next(), h11.Data):
            yield bytes(event.data)


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, but for the last one, [DONE]."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                yield data
