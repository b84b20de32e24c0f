"""The output of one ask on its way from the front to its reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from jaxinfer.request import EngineStoppedError, FinishReason, Request, SequenceEvent
from jaxinfer.text import Delta, Finish, OutputBuilder, Timing

logger = logging.getLogger(__name__)

MOST_UNREAD = 8192  # tokens of a sample that wait, or entries of logprobs: about 1 MB


@dataclass(slots=True, eq=False)
class Sample:
    """One sample of an ask: its request, and what makes deltas of its events."""

    stream: Stream
    request: Request
    output: OutputBuilder
    generated: int = 0  # tokens its reader was given
    held: bool = False  # it was set aside until its reader has taken what waits
    last_token: float | None = None  # when it had the last one

    def push(self, event: SequenceEvent) -> Delta:
        """What an event adds. A fault there ends this sample, and nobody else's."""
        try:
            return self.output.push(event)
        except Exception as error:
            logger.exception("request %s failed", event.request_id)
            failure = f"the output cannot be decoded: {type(error).__name__}: {error}"
            elapsed = event.time - self.request.arrival
            return Delta(
                self.output.index,
                finish=Finish(FinishReason.ERROR, error=failure),
                timing=Timing(None, None, elapsed),
            )


class Stream:
    """The output of one ask: iterate over its deltas within `async with`.

    Deltas of several samples come mixed, each with its sample's `index`; the last one of each
    sample has `finish`. Raises EngineStoppedError when the engine gave up instead. Leaving the
    context before the end ends all samples.

    What waits for the reader is joined; of a sample, once it has `MOST_UNREAD`, `hold` is told, and
    again when the reader has taken it.
    """

    def __init__(
        self,
        outputs: Sequence[OutputBuilder],
        leave: Callable[[Stream], None],
        hold: Callable[[Sample], None],
    ):
        self.samples = [Sample(self, output.request, output) for output in outputs]
        self.chat = False  # whether it is the reply to a chat
        self.timer: asyncio.TimerHandle | None = None  # of the deadline
        self.unended = len(outputs)  # samples whose end the front has not seen
        self._unread = len(outputs)  # samples whose end the reader has not seen
        self._pending: dict[int, Delta] = {}  # by sample, what came first is first
        self._error: EngineStoppedError | None = None
        self._leave, self._hold = leave, hold
        self._wake = asyncio.Event()

    @property
    def id(self) -> str:
        """The ask's id: that of its first sample, and the group of all."""
        return self.samples[0].request.id

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.samples[0].request.prompt

    @property
    def started(self) -> bool:
        """Whether a sample is known to have had a slot."""
        return any(sample.output.started for sample in self.samples)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._unread:
            raise StopAsyncIteration
        await self._wake.wait()
        if not self._pending:
            self._unread = 0
            assert self._error is not None
            raise self._error
        delta = self._pending.pop(next(iter(self._pending)))
        if (sample := self.samples[delta.index]).held:
            sample.held = False
            self._hold(sample)
        self._unread -= delta.finish is not None
        if not self._pending and self._error is None:
            self._wake.clear()
        return delta

    async def collect(self) -> list[Delta]:
        """The whole output, one delta a sample."""
        whole = [Delta(index) for index in range(len(self.samples))]
        async for delta in self:
            whole[delta.index].extend(delta)
        return whole

    # -- for the front ---------------------------------------------------------------------------

    def take(self, delta: Delta) -> None:
        """Join what is new to what its reader has not taken yet."""
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = waiting = delta
        else:
            waiting.extend(delta)
        sample = self.samples[delta.index]
        if _size(waiting) >= MOST_UNREAD and not sample.held and waiting.finish is None:
            sample.held = True
            self._hold(sample)
        self._wake.set()

    def fail(self, error: EngineStoppedError) -> None:
        """End with this error once what is pending was read."""
        self._error = error
        self._wake.set()


def _size(delta: Delta) -> int:
    """Of what waits; tokens of one output have equally many entries each."""
    entries = 1 + len(delta.logprobs[-1].top) if delta.logprobs else 1
    return len(delta.token_ids) * entries
