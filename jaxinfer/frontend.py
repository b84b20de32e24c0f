"""The asyncio front of the engine: prompts in, streams of deltas out.

The story of a request:
1. `Frontend.submit` encodes the prompt, validates the request and sends it to the engine's thread.
2. The engine's thread calls back once a step with the events of all requests; one hop takes them
   to the event loop.
3. There each event is decoded and searched for stop strings by the request's `OutputBuilder`. What
   is certain waits in its `Stream`; when the reader is slow, it is joined to what waits already. So
   a reader slows nobody else, and a stream never holds more than the request's own output.
4. The reader leaves, at the end or earlier: leaving early ends the request in the engine.

Everything here runs on one event loop; only `_on_events` and `_on_stop` are called from another
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from jaxinfer.request import (
    Abort,
    Command,
    Counters,
    EngineStoppedError,
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    SamplingParams,
    SequenceEvent,
    Submit,
)
from jaxinfer.text import Delta, Finish, OutputBuilder, Prompt, TextProcessor, Timing

logger = logging.getLogger(__name__)

LONG_TEXT = 8192  # characters (or ids) from which on encoding (decoding) leaves the event loop

OnEvents = Callable[[list[SequenceEvent]], None]
OnStop = Callable[[str], None]


class _Counting(Protocol):
    @property
    def counters(self) -> Counters: ...


class EngineLink(Protocol):
    """What the front needs of the engine, wherever it runs. `EngineThread` is one."""

    @property
    def status(self) -> str: ...  # "running", "stopped" or "failed"

    @property
    def failure(self) -> str: ...

    @property
    def last_progress(self) -> float: ...  # when the last step ended, on the engine's clock

    @property
    def has_work(self) -> bool: ...

    @property
    def engine(self) -> _Counting: ...

    def start(self) -> None: ...

    def stop(self, reason: str) -> None: ...

    def send(self, command: Command) -> None: ...


class Stream:
    """The output of one request: iterate over its deltas within `async with`.

    The last delta has `finish`. Raises EngineStoppedError when the engine gave up instead. Leaving
    the context before the end ends the request.
    """

    def __init__(self, frontend: Frontend, request: Request, output: OutputBuilder):
        self.request = request
        self._frontend = frontend
        self._output = output
        self._pending: Delta | None = None
        self._error: EngineStoppedError | None = None
        self._over = False
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._frontend._leave(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        await self._wake.wait()
        if self._pending is None:
            self._over = True
            assert self._error is not None
            raise self._error
        delta, self._pending = self._pending, None
        self._over = delta.finish is not None
        if self._error is None:
            self._wake.clear()
        return delta

    async def collect(self) -> Delta:
        """The whole output as one delta."""
        whole = Delta()
        async for delta in self:
            whole.extend(delta)
        return whole

    # -- for the front ---------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._output.started

    def _take(self, delta: Delta) -> None:
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.extend(delta)
        self._wake.set()

    def _fail(self, error: EngineStoppedError) -> None:
        self._error = error
        self._wake.set()


class Frontend:
    """Runs requests on one engine for any number of readers.

    `connect` makes the engine's end, given the callbacks for events and for the engine's end;
    `stall_limit` is how many seconds without a step, while there is work, count as a stall.
    """

    def __init__(
        self,
        text: TextProcessor,
        connect: Callable[[OnEvents, OnStop], EngineLink],
        stall_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.text = text
        self._engine = connect(self._on_events, self._on_stop)
        self._stall_limit = stall_limit
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count(1)
        self._closed = ""  # why nothing is accepted any more
        self._busy_since = clock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._refused = 0
        self._dropped_tokens = 0

    # -- requests --------------------------------------------------------------------------------

    async def submit(
        self, prompt: Prompt, params: SamplingParams, timeout: float | None = None
    ) -> Stream:
        """Start a request that must end within `timeout` seconds.

        Raises RequestError, QueueFullError or EngineStoppedError; then nothing was started.
        """
        now = self._clock()
        try:
            self._require_open()
            prompt_ids = await self.encode(prompt)
            request = self.text.request(prompt_ids, params, f"r{next(self._ids)}", now, timeout)
            return self._start(request)
        except (RequestError, QueueFullError, EngineStoppedError):
            self._refused += 1
            raise

    async def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Long ones are encoded in a thread. Raises RequestError."""
        if _text_length(prompt) < LONG_TEXT:
            return self.text.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(self.text.encode, prompt, add_special_tokens)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Many are decoded in a thread. Raises RequestError."""
        if len(ids) < LONG_TEXT:
            return self.text.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.text.decode, ids, skip_special_tokens)

    def _start(self, request: Request) -> Stream:
        self._require_open()
        stream = Stream(self, request, self.text.output(request))
        if not self._streams:
            self._busy_since = self._clock()
        self._streams[request.id] = stream
        self._empty.clear()
        try:
            self._engine.send(Submit(request))
        except (QueueFullError, EngineStoppedError):
            self._forget(stream)
            raise
        if request.deadline is not None:
            delay = max(0.0, request.deadline - self._clock())
            stream._timer = self._loop.call_later(delay, self._expire, stream)
        return stream

    def _require_open(self) -> None:
        if reason := self.unavailable():
            raise EngineStoppedError(reason)

    def _leave(self, stream: Stream) -> None:
        """The reader left. Tell the engine unless the output was complete."""
        if stream.request.id in self._streams:
            self._abort(stream, FinishReason.CANCELLED)

    def _expire(self, stream: Stream) -> None:
        """The deadline passed, whatever the engine is doing."""
        if stream.request.id in self._streams:
            self._abort(stream, FinishReason.DEADLINE)
            end = SequenceEvent(stream.request.id, finish=FinishReason.DEADLINE, time=self._clock())
            stream._take(stream._output.push(end))

    def _abort(self, stream: Stream, reason: FinishReason) -> None:
        self._forget(stream)
        with contextlib.suppress(EngineStoppedError):  # a stopped one holds nothing any more
            self._engine.send(Abort(stream.request.id, reason))

    def _forget(self, stream: Stream) -> None:
        """No more events are for this stream."""
        if stream._timer is not None:
            stream._timer.cancel()
        del self._streams[stream.request.id]
        if not self._streams:
            self._empty.set()

    # -- events ----------------------------------------------------------------------------------

    def _on_events(self, events: list[SequenceEvent]) -> None:
        """Called by the engine's thread: one hop a step."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _on_stop(self, failure: str) -> None:
        """Called by the engine's thread when it takes no more steps."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.check)

    def _deliver(self, events: list[SequenceEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                self._dropped_tokens += len(event.tokens)
                continue
            delta = _push(stream, event)
            self._dropped_tokens += len(event.tokens) - len(delta.token_ids)
            if delta.finish is None:
                if delta.token_ids:
                    stream._take(delta)
                continue
            if event.finish is None:  # the engine knows nothing of it: a stop string, or a fault
                self._abort(stream, delta.finish.reason)
            else:
                self._forget(stream)
            stream._take(delta)

    # -- health ----------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Requests and tokens since start, with those that were refused before the engine.

        Tokens that came after a request's end are not counted as generated.
        """
        engine = self._engine.engine.counters
        return dataclasses.replace(
            engine,
            received=engine.received + self._refused,
            refused=engine.refused + self._refused,
            generated_tokens=engine.generated_tokens - self._dropped_tokens,
        )

    def unavailable(self) -> str:
        """Why requests are not taken now, or ""."""
        return self._closed or self._trouble()

    def _trouble(self) -> str:
        """What is wrong with the engine, or ""."""
        if self._engine.status != "running":
            return self._engine.failure or "the engine was stopped"
        still = self._clock() - max(self._engine.last_progress, self._busy_since)
        if self._engine.has_work and still > self._stall_limit:
            return f"the engine stalls: no step has ended for {still:.1f} s"
        return ""

    def check(self) -> str:
        """`unavailable`, after ending all streams if the engine is dead or stalled.

        To be called a few times a second.
        """
        if trouble := self._trouble():
            self._fail_all(list(self._streams.values()), trouble)
        return self.unavailable()

    def _fail_all(self, streams: list[Stream], reason: str) -> None:
        for stream in streams:
            self._abort(stream, FinishReason.CANCELLED)
            stream._fail(EngineStoppedError(reason))

    # -- the end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine."""
        self._engine.start()

    async def drain(self, timeout: float) -> None:
        """Accept nothing more, end what waits, and let what runs finish within `timeout` seconds.

        What has not finished then ends with EngineStoppedError too.
        """
        self._closed = "the server is shutting down"
        waiting = [stream for stream in self._streams.values() if not stream.started]
        self._fail_all(waiting, self._closed)
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            reason = f"{self._closed}, and the request did not finish within {timeout:g} s"
            self._fail_all(list(self._streams.values()), reason)

    def stop(self) -> None:
        """Stop the engine."""
        self._engine.stop(self._closed or "the engine was stopped")


def _push(stream: Stream, event: SequenceEvent) -> Delta:
    """What an event adds to an output. A fault there ends its request, and nobody else's."""
    try:
        return stream._output.push(event)
    except Exception as error:
        logger.exception("request %s failed", stream.request.id)
        failure = f"the output cannot be decoded: {type(error).__name__}: {error}"
        elapsed = event.time - stream.request.arrival
        return Delta(
            finish=Finish(FinishReason.ERROR, error=failure), timing=Timing(None, None, elapsed)
        )


def _text_length(prompt: Prompt) -> int:
    """Characters to encode; token ids have none."""
    if isinstance(prompt, str):
        return len(prompt)
    if not len(prompt) or not isinstance(prompt[0], Mapping):
        return 0
    return sum(len(str(value)) for m in prompt if isinstance(m, Mapping) for value in m.values())
