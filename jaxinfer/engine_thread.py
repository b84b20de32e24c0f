"""Runs an engine on a thread of its own: commands in through one queue, events out once a step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxinfer.engine import Engine
from jaxinfer.request import (
    Command,
    EngineStoppedError,
    QueueFullError,
    SequenceEvent,
    Submit,
)

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # how often an idle engine looks around
RETRY_AFTER_S = (1.0, 30.0)  # bounds of the advice to a refused client

Status = Literal["running", "stopped", "failed"]


class _Waiting(NamedTuple):
    """A request that was sent and has not been scheduled yet: its prompt tokens, since when it
    waits, and whether it is of the batch class."""

    tokens: int
    since: float
    batch: bool


class EngineThread:
    """Owns an `Engine` on one thread. `send` may be called from any other.

    `on_events` is called on the engine thread with one list a step; `on_stop` once, when the
    engine takes no more steps, with the failure text or "" after `stop`.
    """

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[SequenceEvent]], None],
        on_stop: Callable[[str], None] = lambda failure: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.engine = engine
        self.failure = ""
        self.status: Status = "running"
        self.last_progress = clock()
        self._on_events, self._on_stop, self._clock = on_events, on_stop, clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}  # by id
        self._waiting_tokens = self._waiting_batch = 0  # prompt tokens; requests of the batch class
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, reason: str = "the engine was stopped", timeout: float = 30.0) -> None:
        """Take no more commands and end the thread after the step in flight."""
        with self._lock:
            if self.status == "running":
                self.status, self.failure = "stopped", reason
        self._commands.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def has_work(self) -> bool:
        """Whether requests are queued or running."""
        return self.engine.has_work or not self._commands.empty()

    @property
    def num_waiting(self) -> int:
        """Requests that were sent and have not been scheduled yet."""
        return len(self._waiting)

    def send(self, command: Command) -> None:
        """Queue a command.

        Raises EngineStoppedError when the engine is not running, QueueFullError when the waiting
        queue is full by requests or tokens, or by the batch class for one of it, ValueError for a
        request id in use.
        """
        with self._lock:
            if self.status != "running":
                raise EngineStoppedError(self.failure)
            if isinstance(command, Submit):
                self._enter(command)
            self._commands.put(command)

    def _enter(self, command: Submit) -> None:
        limits, tokens = self.engine.limits, len(command.request.prompt)
        request_id = command.request.id
        if request_id in self._waiting or self.engine.has_request(request_id):
            raise ValueError(f"request id {request_id!r} is already in use")
        if len(self._waiting) >= limits.max_queued_requests:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, the limit is "
                f"{limits.max_queued_requests}; retry later",
                self._retry_after(),
            )
        if self._waiting and self._waiting_tokens + tokens > limits.max_queued_tokens:
            raise QueueFullError(
                f"{self._waiting_tokens} prompt tokens are waiting, {tokens} more would pass the "
                f"limit of {limits.max_queued_tokens}; retry later",
                self._retry_after(),
            )
        batch = command.request.scheduling.priority >= limits.batch_priority
        if batch and self._waiting_batch >= limits.max_queued_batch:
            raise QueueFullError(
                f"{self._waiting_batch} requests of the batch class are waiting, its part of the "
                f"limit of {limits.max_queued_requests} is {limits.max_queued_batch}; retry later",
                self._retry_after(),
            )
        self._waiting[request_id] = _Waiting(tokens, self._clock(), batch)
        self._waiting_tokens += tokens
        self._waiting_batch += batch

    def _retry_after(self) -> float:
        """Seconds the oldest waiting request has waited: about the time a place takes to free."""
        oldest = next(iter(self._waiting.values())).since if self._waiting else self._clock()
        low, high = RETRY_AFTER_S
        return min(max(self._clock() - oldest, low), high)

    def _leave(self, events: list[SequenceEvent]) -> None:
        """Requests that were scheduled or ended are not waiting any more."""
        with self._lock:
            for event in events:
                entry = self._waiting.pop(event.request_id, None)
                if entry is not None:
                    self._waiting_tokens -= entry.tokens
                    self._waiting_batch -= entry.batch

    def _run(self) -> None:
        failure = ""
        try:
            while self.status == "running":
                self._take_commands()
                events = self.engine.step(self._clock())
                self.last_progress = self._clock()
                if events:
                    self._leave(events)
                    self._on_events(events)
        except Exception as error:
            logger.exception("the engine failed")
            failure = f"the engine failed: {type(error).__name__}: {error}"
            with self._lock:
                self.status, self.failure = "failed", failure
        finally:
            self._end_all()
            self._on_stop(failure)

    def _take_commands(self) -> None:
        """Execute what is queued; wait for a command when there is nothing to do."""
        try:
            wait = not self.engine.has_work
            command = self._commands.get(timeout=IDLE_WAIT_S) if wait else self._commands.get(False)
            while command is not None:
                self._execute(command)
                command = self._commands.get(False)
        except queue.Empty:
            pass

    def _end_all(self) -> None:
        """Account for what came and will not be computed."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                self._execute(command)
        self.engine.end_all(self._clock())
        with self._lock:
            self._waiting.clear()
            self._waiting_tokens = self._waiting_batch = 0

    def _execute(self, command: Command) -> None:
        self.last_progress = self._clock()
        self.engine.execute(command, self.last_progress)
