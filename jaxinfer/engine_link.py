"""How the front and the engine know each other, wherever each of them runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxinfer.expert_load import ExpertLoad
from jaxinfer.load import Load, SlotRow, StepRecord
from jaxinfer.request import Command, Counters, FinishReason, SequenceEvent
from jaxinfer.step_times import StepTimes
from jaxinfer.stream import Sample, Stream

OnEvents = Callable[[list[SequenceEvent]], None]
OnStop = Callable[[str], None]


class EngineView(Protocol):
    """What may be asked of an engine from any thread."""

    @property
    def counters(self) -> Counters: ...

    @property
    def records(self) -> Sequence[StepRecord]: ...  # of its last steps, the newest last

    def load(self) -> Load: ...

    def page_states(self) -> list[bytes]: ...  # by KV group, a byte a page: see `page_allocator`

    def slot_rows(self) -> list[SlotRow]: ...  # the sequences that have a slot

    @property
    def times(self) -> StepTimes: ...

    @property
    def compiles_after_ready(self) -> int: ...

    @property
    def experts(self) -> ExpertLoad | None: ...  # None for a model without


class Observer:
    """Who wants to know what becomes of requests; called on the event loop."""

    def submitted(self, stream: Stream) -> None:
        """An ask was sent to the engine, all its samples; in the context of who asks."""

    def token(self, since_last: float) -> None:
        """A sample had a token, so many seconds after the one before."""

    def ended(self, sample: Sample, reason: FinishReason, now: float) -> None:
        """A sample ended, whatever the reason, at `now` of the front's clock.

        Of an ask that the queue did not take as a whole, those that it had taken end too, though
        nobody was told that it was submitted.
        """


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
    def engine(self) -> EngineView: ...

    def start(self) -> None: ...

    def stop(self, reason: str) -> None: ...

    def send(self, command: Command) -> None: ...
