"""The asyncio front of the engine: prompts in, streams of deltas out.

The story of a request:
1. `Frontend.submit` encodes the prompt, validates the request and sends it to the engine's thread:
   one request for each sample of the prompt.
2. The engine's thread calls back once a step with the events of all requests; one hop takes them
   to the event loop.
3. There each event is decoded and searched for stop strings by the request's `OutputBuilder`. What
   is certain waits in the ask's `Stream`; when the reader is slow, it is joined to what waits
   already, and when that is much, the engine sets the request aside until it was read.
4. The reader leaves, at the end or earlier: leaving early ends its requests in the engine.

Everything here runs on one event loop; only `_on_events` and `_on_stop` are called from another
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from jaxinfer.conversation import Conversation
from jaxinfer.engine_link import EngineLink, EngineView, Observer, OnEvents, OnStop
from jaxinfer.grammar_process import GrammarError
from jaxinfer.load import Load
from jaxinfer.replies.reader import Replies
from jaxinfer.request import (
    REFUSALS,
    Abort,
    Counters,
    EngineStoppedError,
    FinishReason,
    FlushPrefixes,
    Hold,
    QueueFullError,
    Request,
    RequestError,
    Scheduling,
    SequenceEvent,
    Submit,
)
from jaxinfer.stream import Sample, Stream
from jaxinfer.structure_check import refusal
from jaxinfer.structured import StructuredOutput
from jaxinfer.text import AnyPrompt, Params, TextProcessor, is_chat

LONG_TEXT = 8192  # characters (or ids) from which on encoding (decoding) leaves the event loop


class Frontend:
    """Runs requests on one engine for any number of readers.

    `connect` makes the engine's end, given the callbacks for events and for the engine's end;
    `stall_limit` is how many seconds without a step, while there is work, count as a stall;
    `observers` are told of every ask, every token and every end.
    """

    def __init__(
        self,
        text: TextProcessor,
        connect: Callable[[OnEvents, OnStop], EngineLink],
        stall_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[Observer] = (),
    ):
        self.text = text
        self._observers = tuple(observers)
        self.started_at = clock()
        self._engine = connect(self._on_events, self._on_stop)
        self._stall_limit = stall_limit
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._samples: dict[str, Sample] = {}  # those that have not ended, by their ids
        self._streams: dict[str, Stream] = {}  # and what they are part of
        self._ids = itertools.count(1)
        self._closed = ""  # why nothing is accepted any more
        self._busy_since = clock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._refused = dict.fromkeys(REFUSALS, 0)  # before the engine
        self._dropped_tokens = 0

    # -- requests --------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: AnyPrompt,
        params: Params,
        timeout: float | None = None,
        scheduling: Scheduling | None = None,
        add_special_tokens: bool = True,
        conversation: Conversation | None = None,
    ) -> Stream:
        """Start the samples of a prompt, `n` of `params`, which must end within `timeout` seconds.

        `conversation`: of which the prompt is the token ids, where it is not one itself.
        Raises RequestError, QueueFullError or EngineStoppedError; then nothing was started.
        """
        now = self._clock()
        prompt_ids = await self.prepare(prompt, add_special_tokens)
        try:
            self._require_open()
            request_id = f"r{next(self._ids)}"
            requests = self.text.requests(prompt_ids, params, request_id, now, timeout, scheduling)
            if (structure := requests[0].params.structured) is not None:
                await self._check(structure)
                self._require_open()
        except (RequestError, EngineStoppedError, QueueFullError) as error:
            self._refused[_why(error)] += 1
            raise
        if isinstance(prompt, Conversation):
            conversation = prompt
        stream = self._start(requests, None if conversation is None else conversation.replies)
        stream.chat = conversation is not None
        for observer in self._observers:
            observer.submitted(stream)
        return stream

    async def prepare(self, prompt: AnyPrompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that is to be submitted: if it is none, that counts as refused.

        Raises RequestError or EngineStoppedError.
        """
        try:
            self._require_open()
            return await self.encode(prompt, add_special_tokens)
        except (RequestError, EngineStoppedError) as error:
            self._refused[_why(error)] += 1
            raise

    async def _check(self, structure: StructuredOutput) -> None:
        """Wait until a structure was read. Raises RequestError and QueueFullError."""
        reading = self.text.structures.check(structure)
        if reading is None:
            return
        try:
            await asyncio.wrap_future(reading)
        except GrammarError as error:
            raise refusal(structure, error) from error
        self.text.structures.note(structure)

    async def encode(self, prompt: AnyPrompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises RequestError.

        Long texts are encoded in a thread, and chats, whose templates may take their time.
        """
        if isinstance(prompt, str):
            slow = len(prompt) >= LONG_TEXT
        else:
            slow = isinstance(prompt, Conversation) or is_chat(prompt)
        if slow:
            return await asyncio.to_thread(self.text.encode, prompt, add_special_tokens)
        return self.text.encode(prompt, add_special_tokens)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Many are decoded in a thread. Raises RequestError."""
        if len(ids) < LONG_TEXT:
            return self.text.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.text.decode, ids, skip_special_tokens)

    def _start(self, requests: list[Request], replies: Replies | None) -> Stream:
        outputs = [self.text.output(each, index, replies) for index, each in enumerate(requests)]
        stream = Stream(outputs, self._leave, self._hold)
        if not self._streams:
            self._busy_since = self._clock()
        self._streams[stream.id] = stream
        self._samples |= {sample.request.id: sample for sample in stream.samples}
        self._empty.clear()
        unsent = list(stream.samples)
        try:
            while unsent:
                self._engine.send(Submit(unsent[0].request))
                unsent.pop(0)
        except (QueueFullError, EngineStoppedError) as error:  # all of them or none
            self._refused[_why(error)] += len(unsent)
            for sample in unsent:
                self._forget(sample)
            self._leave(stream)
            raise
        deadline = requests[0].deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            stream.timer = self._loop.call_later(delay, self._end, stream, FinishReason.DEADLINE)
        return stream

    def _require_open(self) -> None:
        if reason := self.unavailable():
            raise EngineStoppedError(reason)

    def abort(self, request_id: str) -> bool:
        """End what was asked under this id, which may be that of any of its samples.

        Its reader gets the end CANCELLED. Returns whether there was such an ask.
        """
        sample = self._samples.get(request_id)
        stream = sample.stream if sample else self._streams.get(request_id)
        if stream is None:
            return False
        self._end(stream, FinishReason.CANCELLED)
        return True

    def flush_prefixes(self) -> None:
        """Let no request that comes from now on find what was computed for others before.

        Raises EngineStoppedError.
        """
        self._engine.send(FlushPrefixes())

    def _leave(self, stream: Stream) -> None:
        """The reader left. Tell the engine of what was not complete.

        A call that has a deadline is cancelled by it at both ends, and either may be the first.
        """
        deadline = stream.samples[0].request.deadline
        late = deadline is not None and self._clock() >= deadline
        for sample in self._unended(stream):
            self._abort(sample, FinishReason.DEADLINE if late else FinishReason.CANCELLED)

    def _hold(self, sample: Sample) -> None:
        if sample.request.id in self._samples:
            with contextlib.suppress(EngineStoppedError):
                self._engine.send(Hold(sample.request.id, sample.held))

    def _end(self, stream: Stream, reason: FinishReason) -> None:
        """End what has not ended yet for a reason from outside, whatever the engine is doing."""
        for sample in self._unended(stream):
            self._abort(sample, reason)
            end = SequenceEvent(sample.request.id, finish=reason, time=self._clock())
            stream.take(sample.output.push(end))

    def _unended(self, stream: Stream) -> list[Sample]:
        return [sample for sample in stream.samples if sample.request.id in self._samples]

    def _abort(self, sample: Sample, reason: FinishReason) -> None:
        self._note_end(sample, reason, self._clock())
        self._forget(sample)
        with contextlib.suppress(EngineStoppedError):  # a stopped one holds nothing any more
            self._engine.send(Abort(sample.request.id, reason))

    def _forget(self, sample: Sample) -> None:
        """No more events are for this sample."""
        del self._samples[sample.request.id]
        stream = sample.stream
        stream.unended -= 1
        if stream.unended:
            return
        if stream.timer is not None:
            stream.timer.cancel()
        del self._streams[stream.id]
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
            sample = self._samples.get(event.request_id)
            if sample is None:
                self._dropped_tokens += len(event.tokens)
                continue
            delta = sample.push(event)
            self._note_tokens(sample, len(delta.token_ids), event.time)
            self._dropped_tokens += len(event.tokens) - len(delta.token_ids)
            if delta.finish is None:
                if not delta.empty:
                    sample.stream.take(delta)
                continue
            if event.finish is None:  # the engine knows nothing of it: a stop string, or a fault
                self._abort(sample, delta.finish.reason)
            else:
                self._note_end(sample, delta.finish.reason, event.time)
                self._forget(sample)
            sample.stream.take(delta)

    def _note_tokens(self, sample: Sample, tokens: int, now: float) -> None:
        if not tokens:
            return
        if sample.last_token is not None:
            for observer in self._observers:
                observer.token(now - sample.last_token)
        sample.generated += tokens
        sample.last_token = now

    def _note_end(self, sample: Sample, reason: FinishReason, now: float) -> None:
        for observer in self._observers:
            observer.ended(sample, reason, now)

    # -- health ----------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineView:
        """For looking at what the engine does."""
        return self._engine.engine

    @property
    def uptime(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self.started_at

    @property
    def counters(self) -> Counters:
        """Samples and tokens since start, with what was refused before the engine.

        An ask whose samples were never made counts as one. Tokens that came after a sample's end
        are not counted as generated.
        """
        return self._with_own(self._engine.engine.counters)

    def load(self) -> Load:
        """The engine's load, with the counters as here."""
        load = self._engine.engine.load()
        return dataclasses.replace(load, counters=self._with_own(load.counters))

    def _with_own(self, counters: Counters) -> Counters:
        before = sum(self._refused.values())
        return dataclasses.replace(
            counters,
            received=counters.received + before,
            refused=counters.refused + before,
            refused_by=self._refused | {"late": counters.refused},  # the engine's only reason
            generated_tokens=counters.generated_tokens - self._dropped_tokens,
        )

    @property
    def failure(self) -> str:
        """What ended the engine by itself, or ""."""
        return self._engine.failure if self._engine.status == "failed" else ""

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
            self._leave(stream)
            stream.fail(EngineStoppedError(reason))

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


def _why(error: Exception) -> str:
    """Which of `REFUSALS` an error is."""
    if isinstance(error, QueueFullError):
        return "queue_full"
    return "unavailable" if isinstance(error, EngineStoppedError) else "invalid"
