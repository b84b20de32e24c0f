"""From what was asked to what is answered: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from jaxinfer.request import Scheduling
from jaxinfer.stream import Stream
from jaxinfer.text import AnyPrompt, Delta
from jaxinfer_service import status
from jaxinfer_service.access import tenant_of
from jaxinfer_service.http import errors
from jaxinfer_service.http.answers import Call, Choice, Shape, usage
from jaxinfer_service.http.schema import Sampling
from jaxinfer_service.model import ServedModel

DONE = b"data: [DONE]\n\n"
LEFT = 499  # the status of a call whose client left, which nobody reads


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a call, and how it is to be continued."""

    model: ServedModel
    prompt: AnyPrompt
    params: dict[str, Any]
    body: Sampling

    async def submit(self) -> Stream:
        """Start it. Raises RequestError, QueueFullError or EngineStoppedError."""
        body = self.body
        scheduling = Scheduling(body.priority, tenant_of(body.tenant), body.cache_salt or "")
        frontend = self.model.frontend
        with body.named():
            return await frontend.submit(self.prompt, self.params, body.timeout, scheduling)


class Started:
    """The streams of one call's prompts, side by side. Leaving the context ends them all.

    Choices are numbered over the prompts: those of the first one come first.
    """

    def __init__(self, asks: Sequence[Ask]):
        self._asks = asks
        self._leave = contextlib.AsyncExitStack()
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Started:
        async with contextlib.AsyncExitStack() as leave:
            for ask in self._asks:
                self.streams.append(await leave.enter_async_context(await ask.submit()))
            self._leave = leave.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._leave.aclose()

    @property
    def choices(self) -> int:
        return sum(len(stream.samples) for stream in self.streams)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(stream.prompt) for stream in self.streams)

    def call(self, prefix: str) -> Call:
        return Call(f"{prefix}-{self.streams[0].id}", self._asks[0].model.names[0])

    def prompts(self) -> list[str]:
        """The text of each choice's prompt; that of token ids is decoded."""
        texts = [
            ask.prompt
            if isinstance(ask.prompt, str)
            else ask.model.opened.text.decode(stream.prompt)
            for ask, stream in zip(self._asks, self.streams)
        ]
        return [text for text, one in zip(texts, self.streams) for _ in one.samples]

    async def deltas(self) -> AsyncGenerator[Delta]:
        """What comes, with the `index` of the choice. Raises what ends a call without answer."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                status.check_finish(delta.finish)
                yield delta
            return
        async with contextlib.aclosing(self._mixed()) as deltas:
            async for delta in deltas:
                yield delta

    async def _mixed(self) -> AsyncGenerator[Delta]:
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=1)

        async def read(stream: Stream, first: int) -> None:
            try:
                async for delta in stream:
                    status.check_finish(delta.finish)
                    delta.index += first
                    await queue.put(delta)
            except Exception as error:
                await queue.put(error)
            await queue.put(None)

        readers, first = [], 0
        for stream in self.streams:
            readers.append(asyncio.create_task(read(stream, first)))
            first += len(stream.samples)
        try:
            left = len(readers)
            while left:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for reader in readers:
                reader.cancel()


async def answer(asks: Sequence[Ask], shape: Shape, request: Request) -> Response:
    """The answer, whole. Ends the asks if the client leaves before."""
    whole = await _unless_left(request, _whole(asks, shape))
    return Response(status_code=LEFT) if whole is None else JSONResponse(whole)


async def _unless_left[T](request: Request, doing: Coroutine[Any, Any, T]) -> T | None:
    """What `doing` gives; None, and it is cancelled, if the client goes before."""
    done, gone = asyncio.create_task(doing), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        return await done if done.done() else None
    finally:
        for task in (done, gone):
            task.cancel()
        await asyncio.wait((done, gone))


async def _left(request: Request) -> None:
    """Until the client goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(asks: Sequence[Ask], shape: Shape) -> dict[str, Any]:
    async with Started(asks) as started:
        samples = [Delta(index) for index in range(started.choices)]
        async for delta in started.deltas():
            samples[delta.index].extend(delta)
        call, tally = started.call(shape.id_prefix), Tally(started)
        for sample in samples:
            tally.add(sample)
        prompts = started.prompts() if shape.with_prompt else [""] * len(samples)
        choices = [shape.whole(*each) for each in zip(samples, prompts)]
        return call.object(shape.kind, choices, usage=tally.usage())


async def stream(asks: Sequence[Ask], shape: Shape, with_usage: bool, request: Request) -> Response:
    """Server-sent events. An end without any output is raised: it has a status of its own.

    Ends the asks if the client leaves, be it before the first event: they may wait for long.
    """
    events = _events(asks, shape, with_usage)
    first = await _unless_left(request, _first(events))
    if first is None:
        return Response(status_code=LEFT)
    return StreamingResponse(_joined(first, events), media_type="text/event-stream")


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _joined(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for event in rest:
            yield event


async def _events(asks: Sequence[Ask], shape: Shape, with_usage: bool) -> AsyncGenerator[bytes]:
    async with Started(asks) as started, contextlib.aclosing(started.deltas()) as deltas:
        call, tally = started.call(shape.id_prefix), Tally(started)
        event = _chunks(call, shape.chunk_kind, ',"usage":null' if with_usage else "")
        prompts = started.prompts() if shape.with_prompt else [""] * started.choices
        heads = [head for each in enumerate(prompts) if (head := shape.head(*each))]
        begun = False
        try:
            async for delta in deltas:
                tally.add(delta)
                for choice in (*heads, *shape.parts(delta)):
                    begun = True
                    yield event(choice)
                heads = []
        except Exception as error:
            if not begun:  # there is still a status to say it with
                raise
            yield _event(_json(errors.body_of(error)[1]))
            return
        if with_usage:
            yield _event(_json(call.object(shape.chunk_kind, [], usage=tally.usage())))
    yield DONE


class Tally:
    """The tokens of a call's choices, while they come."""

    def __init__(self, started: Started):
        self._started, self._generated = started, 0
        self._cached = [0] * started.choices
        self._reasoning: int | None = None  # None where reasoning is not told apart

    def add(self, delta: Delta) -> None:
        self._generated += len(delta.token_ids)
        if delta.finish is not None:
            self._cached[delta.index] = delta.cached_tokens
            if delta.reasoning_tokens is not None:
                self._reasoning = (self._reasoning or 0) + delta.reasoning_tokens

    def usage(self) -> dict[str, Any]:
        """In all. Of a prompt's samples the later ones find what the first one computed."""
        cached, rest = 0, iter(self._cached)
        for one in self._started.streams:
            cached += min(itertools.islice(rest, len(one.samples)))
        return usage(self._started.prompt_tokens, self._generated, cached, self._reasoning)


def _chunks(call: Call, kind: str, more: str) -> Callable[[Choice], bytes]:
    """What makes the event of one choice: all but the choice is written once for a call."""
    before, after = _json(call.object(kind, [{}])).rsplit("[{}]", 1)
    return lambda choice: _event(f"{before}[{_json(choice)}]{more}{after}")


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
