"""The engine: one loop that turns commands into steps and steps into events.

The story of a request:

1. The front validates it (`validation.py`), chooses its seed and sends `Submit`; `execute` queues
   it with the scheduler.
2. Each `step` asks the scheduler for a plan: who decodes, whose prompt advances (`scheduler.py`).
   Admission gives the sequence a slot and pages.
3. The runner packs the plan into one int32 vector and dispatches two programs without waiting:
   `forward` computes the tokens' keys, values and logits (`step.py`), `sample` chooses the next
   token of every row and decides whether it ends (`sampler.py`). Tokens stay on the device and are
   the input of the next step.
4. While the device computes this step, the previous one's result is read: tokens are appended to
   their sequences, ended ones give up their slots, and one list of events goes to the front.
5. The front turns token ids into text, holds back stop strings and streams (`frontend.py`). If a
   stop string is found, or the client leaves, it sends `Abort`.

Because results are read one step late, a sequence that ended is still a row of the step after; the
device marks such rows done, computes nothing for them, and the host ignores what they yield.
Single-threaded: no clock (`now` is an input), no locks, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.compile_watch import CompileWatch
from jaxinfer.memory_plan import MemoryPlan
from jaxinfer.request import (
    Abort,
    Command,
    Counters,
    FinishReason,
    SequenceEvent,
    Submit,
    TokenLogprobs,
)
from jaxinfer.runner import StepResult, StepRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import Sequence
from jaxinfer.step_plan import StepPlan
from jaxinfer.validation import EngineLimits

_FINISHED = (
    FinishReason.EOS,
    FinishReason.STOP_ID,
    FinishReason.STOP_STRING,
    FinishReason.LENGTH,
)


class Engine:
    """Owns scheduler and runner. `overlap`: dispatch a step before the previous one is read.

    What is decided depends on `now` alone; `clock`, if given, only stamps events with the time
    their step was read, which is later than the step's `now` by the time it took.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        limits: EngineLimits,
        overlap: bool = True,
        memory: MemoryPlan | None = None,
        compiles: CompileWatch | None = None,
        clock: Callable[[], float] | None = None,
    ):
        self._clock = clock
        self.memory, self.compiles = memory, compiles  # None where nothing real runs
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self.overlap = overlap
        self.counters = Counters()
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._pending: list[SequenceEvent] = []  # ends decided between steps

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or is doing it. May be asked from any thread."""
        return bool(self._in_flight or self._pending or self.scheduler.by_id)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs. May be asked from any thread."""
        return request_id in self.scheduler.by_id

    def execute(self, command: Command, now: float) -> None:
        """Take one command. Raises ValueError for a request id already in use."""
        if isinstance(command, Submit):
            self.scheduler.add(command.request)
            self.counters.received += 1
            self.counters.prompt_tokens += len(command.request.prompt)
        else:
            self._abort(command, now)

    def step(self, now: float) -> list[SequenceEvent]:
        """Dispatch the next step, read the previous one, return what it brought."""
        for sequence in self.scheduler.expired(now):
            self._end(sequence, FinishReason.DEADLINE, now)
        plan = self.scheduler.plan(now)
        self.counters.preemptions = self.scheduler.preemptions
        if plan is not None:
            self._in_flight.append((plan, self.runner.dispatch(plan)))
            self._announce(plan, now)
        keep = 1 if self.overlap and plan is not None else 0
        events, self._pending = self._pending, []
        while len(self._in_flight) > keep:
            plan_read, handle = self._in_flight[0]
            result = self.runner.collect(handle)
            events += self._read(plan_read, result, self._clock() if self._clock else now)
            self.scheduler.retire(plan_read.number)
            self._in_flight.popleft()  # last: until its pages are back there is work
        events += self._pending  # what reading brought to an end
        self._pending = []
        return events

    def _announce(self, plan: StepPlan, now: float) -> None:
        """Tell the front which requests wait no longer; their first token may be long in coming."""
        for sequence in plan.admitted:
            if not sequence.reported:
                self._pending.append(self._event(sequence, (), (), None, now))

    def _read(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceEvent]:
        """Append the tokens of a step to their sequences. One turn a row: keep it lean."""
        events, tokens, row_outcomes = [], result.tokens, result.outcomes
        for row, sequence in plan.sampled():
            sequence.num_in_flight -= 1
            outcome = row_outcomes[row]
            if sequence.finished or outcome == outcomes.IDLE:
                continue
            if outcome == outcomes.NOT_FINITE:
                self._end(sequence, FinishReason.ERROR, now, "the model's logits are not finite")
                continue
            token = tokens[row]
            sequence.tokens.append(token)
            self.counters.generated_tokens += 1
            top = sequence.request.params.logprobs
            logprobs = () if top is None else (result.row_logprobs(row, top),)
            finish = None
            if outcome != outcomes.RUNNING:
                finish = self._finish_reason(sequence, token, outcome)
                self._retire(sequence, finish)
            events.append(self._event(sequence, (token,), logprobs, finish, now))
        return events

    def _finish_reason(self, sequence: Sequence, token: int, outcome: int) -> FinishReason:
        if outcome == outcomes.AT_LIMIT:
            return FinishReason.LENGTH
        own = token in sequence.request.params.stop_token_ids
        return FinishReason.STOP_ID if own else FinishReason.EOS

    def _event(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None,
        now: float,
    ) -> SequenceEvent:
        first = None if sequence.reported else sequence.first_scheduled
        sequence.reported = True
        return SequenceEvent(sequence.request.id, tokens, logprobs, finish, "", now, first)

    def _abort(self, command: Abort, now: float) -> None:
        sequence = self.scheduler.by_id.get(command.request_id)
        if sequence is None:
            return  # it ended by itself meanwhile
        self._end(sequence, command.reason, now)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "") -> None:
        """End a sequence from the host's side; the event goes out with the next step's."""
        event = self._event(sequence, (), (), reason, now)
        self._pending.append(event._replace(error=error))
        self._retire(sequence, reason)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        if reason in _FINISHED:
            self.counters.finished += 1
        else:
            self.counters.aborted += 1
        by_reason = self.counters.by_reason
        by_reason[reason.value] = by_reason.get(reason.value, 0) + 1
