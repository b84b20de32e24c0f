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

from jaxinfer.conversation import Conversation
from jaxinfer.request import Scheduling
from jaxinfer.stream import Stream
from jaxinfer.text import AnyPrompt, Delta, Finish
from jaxinfer.truncation import truncated
from jaxinfer_service import status
from jaxinfer_service.access import tenant_of
from jaxinfer_service.answer_size import aside, check_entries
from jaxinfer_service.end_log import LEFT, log_end
from jaxinfer_service.http import errors
from jaxinfer_service.http.answers import Call, Choice, Echoed, Shape, usage
from jaxinfer_service.http.echo import Prefaced
from jaxinfer_service.http.schema import Sampling, check_tokens
from jaxinfer_service.http.strict import renamed
from jaxinfer_service.model import ServedModel
from jaxinfer_service.tracing import names
from jaxinfer_service.tracing.current import note

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a call, and how it is to be continued. `name`: what the body calls it."""

    model: ServedModel
    prompt: AnyPrompt
    params: dict[str, Any]
    body: Sampling
    name: str
    usual_length: int | None = None  # of outputs where nobody says how long, if there is room

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Violations found within name fields as the body does."""
        return renamed(lambda found: self.body.renamed(found, self.name))

    def check(self, finish: Finish | None) -> None:
        """Raise for an end that is no answer."""
        if finish is not None:  # most of what comes is no end
            with self.named():
                status.check_finish(finish)

    async def encode(self) -> list[int]:
        """Token ids of the prompt that are kept. Raises RequestError or EngineStoppedError."""
        special = self.body.add_special_tokens is not False
        usual = {"max_new_tokens": self.usual_length} | self.params
        with self.named():
            ids = await self.model.frontend.prepare(self.prompt, special)
            return list(truncated(ids, usual, self.model.opened.text.limits))

    async def submit(self, ids: list[int]) -> Stream:
        """Start it. Raises RequestError, QueueFullError or EngineStoppedError."""
        body, params = self.body, self.params
        if self.usual_length is not None and "max_new_tokens" not in params:
            room = self.model.opened.text.limits.max_tokens - len(ids)
            if room > 0:
                params = params | {"max_new_tokens": min(self.usual_length, room)}
        scheduling = Scheduling(body.priority, tenant_of(body.tenant), body.cache_salt or "")
        chat = self.prompt if isinstance(self.prompt, Conversation) else None
        with self.named():
            return await self.model.frontend.submit(
                ids, params, body.timeout, scheduling, conversation=chat
            )


class Started:
    """The streams of one call's prompts, side by side. Leaving the context ends them all.

    Choices are numbered over the prompts: those of the first one come first.
    """

    def __init__(self, asks: Sequence[Ask]):
        self._asks = asks
        self._leave = contextlib.AsyncExitStack()
        self.streams: list[Stream] = []
        self.entries = 0  # logprobs of prompts that the answer has

    async def __aenter__(self) -> Started:
        async with contextlib.AsyncExitStack() as leave:
            prompts = [await ask.encode() for ask in self._asks]
            first = self._asks[0]
            check_tokens(prompts, first.params.get("n", 1), first.model.opened.text.limits)
            lengths, instead = [*map(len, prompts)], "stream them over gRPC"
            with first.named():
                self.entries = check_entries(lengths, first.params, instead)
            for ask, ids in zip(self._asks, prompts):
                self.streams.append(await leave.enter_async_context(await ask.submit(ids)))
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
        call = Call(f"{prefix}-{self.streams[0].id}", self._asks[0].model.names[0])
        note(names.RESPONSE_ID, call.id)
        return call

    @property
    def samples(self) -> list[int]:
        """How many choices each prompt has."""
        return [len(stream.samples) for stream in self.streams]

    def prompts(self, with_text: bool) -> list[Echoed]:
        """The prompts as they were taken; the text of token ids, or of a part, is decoded."""
        return [
            Echoed(_text(ask, stream) if with_text else "", stream.prompt)
            for ask, stream in zip(self._asks, self.streams)
        ]

    async def deltas(self) -> AsyncGenerator[Delta]:
        """What comes, with the `index` of the choice. Raises what ends a call without answer."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                self._asks[0].check(delta.finish)
                yield delta
            return
        async with contextlib.aclosing(self._mixed()) as deltas:
            async for delta in deltas:
                yield delta

    async def _mixed(self) -> AsyncGenerator[Delta]:
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=1)

        async def read(ask: Ask, stream: Stream, first: int) -> None:
            try:
                async for delta in stream:
                    ask.check(delta.finish)
                    delta.index += first
                    await queue.put(delta)
            except Exception as error:
                await queue.put(error)
            await queue.put(None)

        readers, first = [], 0
        for ask, stream in zip(self._asks, self.streams):
            readers.append(asyncio.create_task(read(ask, stream, first)))
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


def _text(ask: Ask, stream: Stream) -> str:
    if isinstance(ask.prompt, str) and ask.body.truncate_prompt_tokens is None:
        return ask.prompt
    return ask.model.opened.text.decode(stream.prompt)


async def answer(asks: Sequence[Ask], shape: Shape, request: Request) -> Response:
    """The answer, whole. Ends the asks if the client leaves before."""
    whole = await _unless_left(request, _whole(asks, shape))
    return Response(status_code=LEFT) if whole is None else whole


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


async def _whole(asks: Sequence[Ask], shape: Shape) -> Response:
    async with Started(asks) as started:
        samples = [Delta(index) for index in range(started.choices)]
        async for delta in started.deltas():
            samples[delta.index].extend(delta)
        call, tally = started.call(shape.id_prefix), Tally(started)
        for sample in samples:
            tally.add(sample)
        prompts, used = started.prompts(shape.with_prompt), tally.usage()

    def written() -> Response:
        choices, rest = list[Choice](), iter(samples)
        for prompt, count in zip(prompts, started.samples):
            own = list(itertools.islice(rest, count))
            prompt.logprobs = own[0].prompt_logprobs
            choices += [shape.whole(sample, prompt) for sample in own]
        besides = shape.besides(prompts[0])
        return JSONResponse(call.object(shape.kind, choices, usage=used, **besides))

    return await aside(started.entries, written)


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
        prompts = started.prompts(shape.with_prompt)
        prefaced, begun = Prefaced(shape, prompts, started.samples, shape.scored), False
        try:
            async for delta in deltas:
                tally.add(delta)
                of_prompt = started.entries if delta.prompt_logprobs is not None else 0
                for written in await aside(of_prompt, _written, event, prefaced, delta):
                    begun = True
                    yield written
        except Exception as error:
            if not begun:  # there is still a status to say it with
                raise
            yield _event(_json(errors.body_of(error)[1]))
            return
        used = tally.usage()
        if with_usage:
            yield _event(_json(call.object(shape.chunk_kind, [], usage=used)))
    yield DONE


def _written(event: Callable[[Choice], bytes], prefaced: Prefaced, delta: Delta) -> list[bytes]:
    """The events that a delta brings."""
    return [event(choice) for choice in prefaced.take(delta)]


class Tally:
    """The tokens of a call's choices, while they come."""

    def __init__(self, started: Started):
        self._started = started
        self._generated = [0] * started.choices
        self._ends: dict[int, Delta] = {}

    def add(self, delta: Delta) -> None:
        self._generated[delta.index] += len(delta.token_ids)
        if delta.finish is not None:
            self._ends[delta.index] = delta

    def usage(self) -> dict[str, Any]:
        """In all, once all have ended, which is logged. Of a prompt's samples the later ones find
        what the first one computed."""
        cached, first = 0, 0
        for one in self._started.streams:
            own = range(first, first + len(one.samples))
            ends = [self._ends[choice] for choice in own]
            cached += min(end.cached_tokens for end in ends)
            log_end(one, ends, sum(self._generated[choice] for choice in own))
            first = own.stop
        thought = [
            e.reasoning_tokens for e in self._ends.values() if e.reasoning_tokens is not None
        ]
        reasoning = sum(thought) if thought else None  # None where it is not told apart
        return usage(self._started.prompt_tokens, sum(self._generated), cached, reasoning)


def _chunks(call: Call, kind: str, more: str) -> Callable[[Choice], bytes]:
    """What makes the event of one choice: all but the choice is written once for a call."""
    before, after = _json(call.object(kind, [{}])).rsplit("[{}]", 1)
    return lambda choice: _event(f"{before}[{_json(choice)}]{more}{after}")


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
