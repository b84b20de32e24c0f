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
   their sequences, ended ones give up their slots (those at their limit did so before, when the
   step of their last token was planned), and one list of events goes to the front.
   Rows that may not take every token have their masks between the two programs: where these follow
   the output, the previous result is read, and masks are computed by another process
   (`token_masks.py`), while the device is busy with `forward`.
5. The front turns token ids into text, holds back stop strings and streams (`frontend.py`). If a
   stop string is found, or the client leaves, it sends `Abort`.

Because results are read one step late, a sequence that ended is still a row of the step after; the
device marks such rows done, computes nothing for them, and the host ignores what they yield.
Single-threaded: no clock (`now` is an input), no locks, no I/O.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.compile_watch import CompileWatch
from jaxinfer.expert_load import ExpertLoad
from jaxinfer.grammar_process import GrammarError
from jaxinfer.load import Load, SlotRow, StepRecord
from jaxinfer.load_now import load_of
from jaxinfer.memory_plan import MemoryPlan
from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.request import (
    Abort,
    Command,
    Counters,
    FinishReason,
    FlushPrefixes,
    LateError,
    Request,
    SequenceEvent,
    Submit,
    TokenLogprobs,
)
from jaxinfer.runner import StepResult, StepRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import NO_SLOT, Sequence
from jaxinfer.step_plan import RowRules, StepPlan
from jaxinfer.step_times import StepTimes
from jaxinfer.tally import Tally
from jaxinfer.token_masks import TokenMasks, wait_for
from jaxinfer.token_rules import NothingAllowedError, SequenceRules
from jaxinfer.unread import Unread
from jaxinfer.validation import EngineLimits

RULES_WAIT_S = 0.01  # how long an idle step waits for what may be a sequence's first token

_NOT_FINITE = "the model's logits are not finite"


class Engine:
    """Owns scheduler and runner. `overlap`: dispatch a step before the previous one is read.

    What is decided depends on `now` alone; `clock`, if given, only stamps events with the time
    their step was read, which is later than the step's `now` by the time it took, and measures
    (`times`).
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
        experts: ExpertLoad | None = None,
        masks: TokenMasks | None = None,
    ):
        self.masks = masks  # None where no request has rules
        self.unread, self._num_ruled = Unread(), 0  # sequences with rules
        self._clock = clock
        self.experts = experts  # tokens that went to each; None for a model without
        self.memory, self.compiles = memory, compiles  # None where nothing real runs
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self.overlap = overlap
        self._tally = Tally()
        self.times = StepTimes(clock or time.monotonic)
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()
        self._pending: list[SequenceEvent] = []  # ends decided between steps
        self._load = load_of(self)

    @property
    def counters(self) -> Counters:
        """Requests and tokens since the start."""
        return self._tally.counters

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or is doing it. May be asked from any thread."""
        return bool(self._in_flight or self._pending or self.scheduler.has_work or self.unread)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs. May be asked from any thread."""
        return request_id in self.scheduler.by_id or request_id in self.unread

    def execute(self, command: Command, now: float) -> None:
        """Take one command. Raises ValueError for a request id already in use."""
        if isinstance(command, Submit):
            self._submit(command.request, now)
        elif isinstance(command, Abort):
            self._abort(command, now)
        elif isinstance(command, FlushPrefixes):
            self.scheduler.pages.flush()
        elif (sequence := self.scheduler.by_id.get(command.request_id)) is not None:
            self.scheduler.hold(sequence, command.held, now)
        self._load = load_of(self)

    def _submit(self, request: Request, now: float) -> None:
        if self.has_request(request.id):
            raise ValueError(f"request id {request.id!r} is already in use")
        self.counters.received += 1
        if request.rules is None:
            self._queue(request, None, now)
            return
        assert self.masks is not None, "this engine was built without token masks"
        self.unread.add(request, self.masks.rules(request.rules))
        self._queue_read(now)

    def _queue_read(self, now: float) -> None:
        """Queue those whose first token's mask is known; end those whose time is over."""
        for request, rules in self.unread.take_read():
            self._queue(request, rules, now)
        for request_id in self.unread.expired(now):
            self._end_unread(request_id, FinishReason.DEADLINE, now)

    def _end_unread(self, request_id: str, reason: FinishReason, now: float) -> None:
        self.unread.remove(request_id)
        self._tally.ended(reason)
        self._pending.append(SequenceEvent(request_id, finish=reason, time=now))

    def _queue(self, request: Request, rules: SequenceRules | None, now: float) -> None:
        try:
            self.scheduler.add(request)
        except LateError as error:
            self._tally.refused(FinishReason.LATE)
            late = SequenceEvent(request.id, finish=FinishReason.LATE, error=str(error), time=now)
            self._pending.append(late)
        else:
            self.counters.prompt_tokens += len(request.prompt)
            if rules is not None:
                self.scheduler.by_id[request.id].rules = rules
                self._num_ruled += 1

    def end_all(self, now: float) -> None:
        """End every request, of which nobody is told: no more steps are taken."""
        for sequence in list(self.scheduler.by_id.values()):
            self._end(sequence, FinishReason.CANCELLED, now)
        for request_id in self.unread.ids():
            self._end_unread(request_id, FinishReason.CANCELLED, now)
        self.scheduler.stop()
        self._in_flight.clear()
        self._pending.clear()
        self._load = load_of(self)

    def step(self, now: float) -> list[SequenceEvent]:
        """Dispatch the next step, read the previous one, return what it brought."""
        began = self.times.clock()
        for sequence in self.scheduler.deadlines.expired(now):
            self._end(sequence, FinishReason.DEADLINE, now)
        if self.unread:
            self._queue_read(now)
        plan = self.scheduler.plan(now)
        self._tally.decisions(self.scheduler)
        events, self._pending = self._pending, []
        read: list[SequenceEvent] = []
        if plan is not None:
            if self._num_ruled and any(s.rules is not None for _, s in plan.sampled()):
                plan.rules = RowRules(functools.partial(self._settle, plan, read, now))
            handle = self.runner.dispatch(plan)
            self._in_flight.append((plan, handle, self.times.clock()))
            events += self._announced(plan, now)
        elif not self._in_flight:
            self.unread.wait(RULES_WAIT_S)
        self._read_steps(1 if self.overlap and plan is not None else 0, read, now)
        events += read + self._pending  # what reading brought, and brought to an end
        self._pending = []
        self._load = load_of(self)
        self.times.stepped(began)
        return events

    def _read_steps(self, keep: int, events: list[SequenceEvent], now: float) -> None:
        """Read all steps in flight but the last `keep`."""
        while len(self._in_flight) > keep:
            plan, handle, dispatched = self._in_flight[0]
            asked = self.times.clock()
            result = self.runner.collect(handle)
            self.times.collected(result.program, dispatched, asked)
            events += self._read(plan, result, self._clock() if self._clock else now)
            self.scheduler.retire(plan)
            self._in_flight.popleft()  # last: until its pages are back there is work

    def _announced(self, plan: StepPlan, now: float) -> list[SequenceEvent]:
        """Tell the front which requests wait no longer; their first token may be long in coming."""
        return [
            self._event(sequence, (), (), None, now)
            for sequence in plan.admitted
            if not sequence.reported
        ]

    def _settle(
        self,
        plan: StepPlan,
        read: list[SequenceEvent],
        now: float,
        device_is_done: Callable[[], bool],
    ) -> None:
        """While the device computes a step's logits, find what its rows may take.

        For rows whose rules follow their output the step before is read first.
        """
        assert plan.rules is not None
        rows = plan.sampled()
        ruled = [(row, s, s.rules) for row, s in rows if s.rules is not None]
        if any(rules.rules.follow_output for _, _, rules in ruled):
            self._read_steps(0, read, now)
            ruled = [each for each in ruled if not each[1].finished]
            others = len(ruled) < len(rows)
            wait_for([rules for _, _, rules in ruled], others, device_is_done)
        for row, sequence, rules in ruled:
            if row < len(plan.decodes) and not sequence.rules_are_known:
                plan.rules.held.add(row)
                sequence.sit_out()
                continue
            try:
                output = sequence.output if rules.rules.follow_output else ()
                plan.rules.masks[row] = rules.mask(output, sequence.num_outputs - 1)
            except (NothingAllowedError, GrammarError) as error:
                self._end(sequence, FinishReason.RULES, now, str(error))

    def _read(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceEvent]:
        """Append the tokens of a step to their sequences. One turn a row: keep it lean."""
        events, tokens, row_outcomes = [], result.tokens, result.outcomes
        if self.experts is not None and result.expert_load is not None:
            self.experts = self.experts.plus(result.expert_load)
        scored = {} if result.scored is None else self._scored(plan, result.scored, now)
        for row, sequence in plan.sampled():
            outcome = row_outcomes[row]
            if sequence.finished or outcome == outcomes.IDLE:
                continue
            if outcome == outcomes.NOT_FINITE:
                self._end(sequence, FinishReason.ERROR, now, _NOT_FINITE)
                continue
            of_prompt = scored.pop(sequence, None)
            if not sequence.request.max_new_tokens:  # all that was asked is what is said of it
                self._retire(sequence, FinishReason.LENGTH, now)
                end = self._event(sequence, (), (), FinishReason.LENGTH, now, of_prompt)
                events.append(end)
                continue
            token = tokens[row]
            sequence.tokens.append(token)
            if sequence.rules is not None and outcome == outcomes.RUNNING:
                sequence.rules.follow(sequence.output)
            if sequence.replay:
                self._check_replay(sequence, token, now)
                continue
            self.counters.generated_tokens += 1
            if sequence.first_token is None:
                self._tally.first_token(sequence, now)
            top = sequence.request.params.logprobs
            logprobs = () if top is None else (result.row_logprobs(row, top),)
            finish = None
            if outcome != outcomes.RUNNING:
                finish = self._finish_reason(sequence, token, outcome)
                self._retire(sequence, finish, now)
            events.append(self._event(sequence, (token,), logprobs, finish, now, of_prompt))
        events += [self._event(s, (), (), None, now, lines) for s, lines in scored.items()]
        return events

    def _scored(
        self, plan: StepPlan, columns: np.ndarray, now: float
    ) -> dict[Sequence, PromptLogprobs]:
        """What a step says of prompts, by sequence; one with a logprob that is none fails."""
        found, first = {}, 0
        for piece in plan.pieces:
            sequence, end = piece.sequence, first + len(piece.scored)
            if end > first and not sequence.finished:
                top = sequence.request.params.prompt_logprobs
                lines = PromptLogprobs.of_columns(columns[first:end], top or 0)
                if lines.finite:
                    found[sequence] = lines
                else:
                    self._end(sequence, FinishReason.ERROR, now, _NOT_FINITE)
            first = end
        return found

    def _check_replay(self, sequence: Sequence, token: int, now: float) -> None:
        """A preempted sequence computes again what its reader has already."""
        before = sequence.replay.pop()
        if token != before:
            why = f"token {len(sequence.tokens) - 1} is {token} after a preemption, was {before}"
            self._end(sequence, FinishReason.ERROR, now, f"not deterministic: {why}")

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
        of_prompt: PromptLogprobs | None = None,
    ) -> SequenceEvent:
        first, cached = None, 0
        if not sequence.reported:
            sequence.reported = True
            first, cached = sequence.first_scheduled, sequence.cached_tokens
        id_, lost = sequence.request.id, sequence.preemptions
        return SequenceEvent(id_, tokens, logprobs, finish, "", now, first, cached, of_prompt, lost)

    def _abort(self, command: Abort, now: float) -> None:
        if command.request_id in self.unread:
            self._end_unread(command.request_id, command.reason, now)
            return
        sequence = self.scheduler.by_id.get(command.request_id)
        if sequence is None:
            return  # it ended by itself meanwhile
        self._end(sequence, command.reason, now)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "") -> None:
        """End a sequence from the host's side; the event goes out with the next step's."""
        event = self._event(sequence, (), (), reason, now)
        self._pending.append(event._replace(error=error))
        self._retire(sequence, reason, now)

    def _retire(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.rules is not None:
            self._num_ruled -= 1
            sequence.rules.forget()
        self.scheduler.finish(sequence, failed=reason is FinishReason.ERROR)
        self._tally.ended(reason)
        self._tally.last_token(sequence, now)

    # -- what can be seen from outside, from any thread ------------------------------------------

    @property
    def records(self) -> deque[StepRecord]:
        """One a step, newest last."""
        return self.scheduler.records

    def page_states(self) -> list[bytes]:
        """By KV group, one byte a page but the null page: see `page_allocator`."""
        return [allocator.states() for allocator in self.scheduler.allocators]

    def slot_rows(self) -> list[SlotRow]:
        """The sequences that have a slot, as far as they are."""
        rows = (SlotRow.of(sequence) for sequence in [*self.scheduler.running])
        return [row for row in rows if row.slot != NO_SLOT]  # it may have lost it meanwhile

    def load(self) -> Load:
        """What the engine was doing when its last step ended: all figures are of that moment."""
        ttft, tpot = self._tally.latencies()
        return dataclasses.replace(self._load, ttft=ttft, tpot=tpot)

    @property
    def compiles_after_ready(self) -> int:
        """Programs that JAX compiled while serving; there should be none."""
        return self.compiles.compiles_after_ready if self.compiles else 0
