"""From what was asked to what is answered: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from jaxinfer.request import Scheduling
from jaxinfer.stream import Stream
from jaxinfer.text import Delta, Prompt
from jaxinfer_service import status
from jaxinfer_service.access import tenant_of
from jaxinfer_service.http import errors
from jaxinfer_service.http.answers import Call, Shape, usage
from jaxinfer_service.http.schema import Sampling
from jaxinfer_service.model import ServedModel

DONE = "data: [DONE]\n\n"
LEFT = 499  # the status of a call whose client left, which nobody reads


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a call, and how it is to be continued."""

    model: ServedModel
    prompt: Prompt
    params: dict[str, Any]
    body: Sampling

    async def submit(self) -> Stream:
        """Start it. Raises RequestError, QueueFullError or EngineStoppedError."""
        body = self.body
        scheduling = Scheduling(body.priority, tenant_of(body.tenant), body.cache_salt or "")
        frontend = self.model.frontend
        return await frontend.submit(self.prompt, self.params, scheduling=scheduling)


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

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, with the `index` of the choice. Raises what ends a call without answer."""
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
    """The whole answer at once. Ends the asks if the client leaves before."""
    whole = asyncio.create_task(_whole(asks, shape))
    gone = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await whole) if whole.done() else Response(status_code=LEFT)
    finally:
        for task in (whole, gone):
            task.cancel()
        await asyncio.wait((whole, gone))


async def _left(request: Request) -> None:
    """Until the client goes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(asks: Sequence[Ask], shape: Shape) -> dict[str, Any]:
    async with Started(asks) as started:
        samples = [Delta(index) for index in range(started.choices)]
        async for delta in started.deltas():
            samples[delta.index].extend(delta)
        call = started.call(shape.id_prefix)
        choices = [shape.whole(*each) for each in zip(samples, started.prompts())]
        counts = _usage(started, samples)
        return call.object(shape.kind, choices, usage=counts)


async def stream(
    asks: Sequence[Ask], shape: Shape, with_usage: bool
) -> tuple[str, AsyncIterator[str]]:
    """The first event and the others: what is wrong with the asks is raised before any."""
    events = _events(asks, shape, with_usage)
    return await anext(events), events


async def _events(asks: Sequence[Ask], shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    async with Started(asks) as started:
        call = started.call(shape.id_prefix)
        more = {"usage": None} if with_usage else {}
        for index, prompt in enumerate(started.prompts()):
            if head := shape.head(index, prompt):
                yield _event(call.object(shape.chunk_kind, [head], **more))
        samples = [Delta(index) for index in range(started.choices)]
        try:
            async for delta in started.deltas():
                before = len(samples[delta.index].text)
                samples[delta.index].extend(delta)
                if choice := shape.part(delta, before):
                    yield _event(call.object(shape.chunk_kind, [choice], **more))
        except Exception as error:
            yield _event(errors.body_of(error)[1])
            return
        if with_usage:
            yield _event(call.object(shape.chunk_kind, [], usage=_usage(started, samples)))
    yield DONE


def _usage(started: Started, samples: Sequence[Delta]) -> dict[str, Any]:
    generated = sum(len(sample.token_ids) for sample in samples)
    cached, first = 0, 0
    for one in started.streams:
        own = samples[first : first + len(one.samples)]
        cached += min(sample.cached_tokens for sample in own)
        first += len(own)
    return usage(started.prompt_tokens, generated, cached)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
