"""A device with hand-computable tokens, and an engine over it whose promises are checked always.

`FakeRunner` does what the real device does, by hand: it unpacks the packed vector of every step,
keeps slots, page tables and a paged pool, and computes each next token from what the *pool* holds.
So a page that was freed too early, mapped wrongly or written twice gives a wrong token.
"""

from __future__ import annotations

from collections import deque

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.engine import Engine
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.programs import smallest_shape, step_shapes
from jaxinfer.request import (
    Abort,
    FinishReason,
    Hold,
    Request,
    SamplingParams,
    Scheduling,
    SequenceEvent,
    Submit,
)
from jaxinfer.runner import StepResult
from jaxinfer.scheduler import Scheduler
from jaxinfer.step_plan import TILE_ROWS, StepPlan, layout, pack
from jaxinfer.validation import EngineLimits

POISON = 50  # a prompt token that makes the model's logits NaN; no output is ever it
GREEDY = SamplingParams(temperature=0)


def next_token(context: list[int]) -> int:
    """The fake model: what follows a context."""
    return (sum((i + 1) * token for i, token in enumerate(context)) + len(context)) % POISON


def expected(request: Request, sees: int | None = None) -> tuple[list[int], FinishReason]:
    """All the fake model answers to a request that nobody cuts short; `sees` are the last tokens
    it sees."""
    if POISON in (request.prompt[-sees:] if sees else request.prompt):
        return [], FinishReason.ERROR
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(next_token(tokens[-sees:] if sees else tokens))
        if tokens[-1] in request.stop_ids:
            own = tokens[-1] in request.params.stop_token_ids
            return tokens[len(request.prompt) :], (
                FinishReason.STOP_ID if own else FinishReason.EOS
            )
    return tokens[len(request.prompt) :], FinishReason.LENGTH


class FakeRunner:
    """Device owner of the fake model: dispatched steps run at once and in order."""

    def __init__(self, limits: SchedulerLimits, max_model_len: int, separate_phases: bool = False):
        self.limits, self.null = limits, limits.num_slots
        self.separate_phases = separate_phases
        self.shapes = step_shapes(
            limits.num_slots, limits.chunk_tokens, limits.page_size, len(limits.num_pages)
        )
        width, rows = -(-max_model_len // limits.page_size), limits.num_slots + 1
        self.token, self.position, self.done = [0] * rows, [0] * rows, [True] * rows
        self.request: list[Request | None] = [None] * rows
        self.tables = [[[0] * width for _ in range(rows)] for _ in limits.num_pages]
        # An entry of a page is (position, token, whether a decode row computed it): what lies there
        # says where it belongs.
        empty = (-1, POISON, False)
        self.pools = [[[empty] * limits.page_size for _ in range(n)] for n in limits.num_pages]
        self.host: list[dict[int, list]] = [{} for _ in limits.num_pages]
        self.outstanding: deque[StepResult] = deque()

    def dispatch(self, plan: StepPlan) -> StepResult:
        assert not (self.separate_phases and plan.decodes and plan.pieces), "phases share a step"
        self._move_pages(plan)
        for sequence in plan.admitted:
            slot, last = sequence.slot, len(sequence.tokens) - 1
            self.request[slot], self.done[slot] = sequence.request, sequence not in plan.resumed
            self.token[slot], self.position[slot] = sequence.tokens[last], last
            for table, pages in zip(self.tables, sequence.pages):
                table[slot] = pages + [0] * (len(table[slot]) - len(pages))
        shape = smallest_shape(self.shapes, len(plan.decodes), plan.chunk_tokens)
        packed = pack(plan, shape, self.null)
        inputs = {name: packed[at].reshape(dims) for name, (at, dims) in layout(shape).items()}
        for table, deltas in zip(self.tables, inputs["deltas"].tolist()):
            for slot, index, page in deltas:
                table[slot][index] = page
        sampled = self._decode(inputs["rows"].tolist())
        if shape.chunk:
            sampled += self._prefill(inputs)
        rows = [self._sample(slot, live) for slot, live in sampled]
        first = shape.rows
        kept = rows[: len(plan.decodes)] + rows[first : first + len(plan.pieces)]
        result = StepResult([token for token, _ in kept], [outcome for _, outcome in kept])
        self.outstanding.append(result)
        assert len(self.outstanding) <= 2, "more than one step is dispatched ahead"
        return result

    def _move_pages(self, plan: StepPlan) -> None:
        for group, page, host in plan.page_outs:
            self.host[group][host] = list(self.pools[group][page])
        for group, page, host in plan.page_ins:
            self.pools[group][page] = self.host[group][host]

    def collect(self, handle: StepResult) -> StepResult:
        assert handle is self.outstanding.popleft(), "steps are read out of order"
        return handle

    def _decode(self, rows: list[int]) -> list[tuple[int, bool]]:
        real = [slot for slot in rows if slot != self.null]
        assert len(set(real)) == len(real), "a slot decodes twice in one step"
        sampled = [(slot, not self.done[slot]) for slot in rows]
        self._write([(s, self.position[s], self.token[s]) for s, live in sampled if live], True)
        for slot, live in sampled:
            self.position[slot] += live
        return sampled

    def _prefill(self, inputs: dict) -> list[tuple[int, bool]]:
        slots, tokens = inputs["slots"].tolist(), inputs["tokens"].tolist()
        positions = inputs["positions"].tolist()
        self._write([w for w in zip(slots, positions, tokens) if w[0] != self.null], False)
        covered = []
        for first, count, slot, position in inputs["tiles"].tolist():
            assert 0 <= count <= TILE_ROWS
            for row in range(first, first + count):
                assert (slots[row], positions[row]) == (slot, position + row - first), "tiles"
                covered.append(row)
        assert covered == [row for row, slot in enumerate(slots) if slot != self.null], "tiles"
        sampled = []
        for slot, row, end, ends in inputs["pieces"].tolist():
            if slot != self.null:
                assert (slots[row], positions[row]) == (slot, end - 1), "pieces"
                assert self.done[slot], "a prefilling slot decodes"
            self.position[slot] = end
            sampled.append((slot if ends else self.null, bool(ends)))
        return sampled

    def _write(self, writes: list[tuple[int, int, int]], decoded: bool) -> None:
        for table, pool in zip(self.tables, self.pools):
            places = set()
            for slot, position, token in writes:
                index, offset = divmod(position, self.limits.page_size)
                page = table[slot][index]
                assert page != 0, "a live token is written to the null page"
                assert (page, offset) not in places, "two tokens are written to one place"
                places.add((page, offset))
                pool[page][offset] = (position, token, decoded)

    def _context(self, slot: int) -> list[int]:
        """The tokens before the slot's position, as attention finds them."""
        readings, end = [], self.position[slot]
        windows = self.limits.windows or (None,) * len(self.pools)
        for table, pool, window in zip(self.tables, self.pools, windows):
            entries = [entry for page in table[slot] for entry in pool[page]][:end]
            first = 0 if window is None else max(0, end - window)
            readings.append(entries[first:])
            assert [entry[0] for entry in entries[first:]] == [*range(first, end)]
        longest = max(readings, key=len)
        tokens = [[token for _, token, _ in reading] for reading in readings]
        whole = max(tokens, key=len)
        assert all(whole[len(whole) - len(t) :] == t for t in tokens), "groups differ"
        if self.separate_phases:
            prompt_len = len(self.request[slot].prompt)
            for position, _, decoded in longest:
                assert decoded == (position >= prompt_len), "computed by the other program"
        return [token for _, token, _ in longest]

    def _sample(self, slot: int, live: bool) -> tuple[int, int]:
        if not live:
            return POISON, outcomes.IDLE
        request, context = self.request[slot], self._context(slot)
        token = next_token(context)
        if POISON in context:
            outcome = outcomes.NOT_FINITE
        elif token in request.stop_ids:
            outcome = outcomes.STOPPED
        elif self.position[slot] + 1 >= len(request.prompt) + request.max_new_tokens:
            outcome = outcomes.AT_LIMIT
        else:
            outcome = outcomes.RUNNING
        self.token[slot], self.done[slot] = token, outcome != outcomes.RUNNING
        return token, outcome


class Harness:
    """An engine over a `FakeRunner`; `step`, `submit` and `cancel` check every promise."""

    def __init__(
        self,
        limits: SchedulerLimits,
        max_model_len: int,
        overlap: bool,
        policy: SchedulerPolicy | None = None,
    ):
        self.max_model_len = max_model_len
        scheduler = Scheduler(limits, policy)
        self.engine = Engine(
            scheduler,
            FakeRunner(limits, max_model_len, scheduler.policy.separate_phases),
            EngineLimits(POISON + 1, max_model_len, limits.num_slots, max_model_len, 100, 10_000),
            overlap=overlap,
        )
        self.scheduler = scheduler
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.order: list[str] = []  # request ids in order of their first token
        self.cancelled: set[str] = set()
        self.queued_tokens = 0  # of prompts, but for those refused on arrival

    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_ids: tuple[int, ...] = (),
        timeout: float | None = None,
        scheduling: Scheduling | None = None,
        group: str = "",
    ) -> str:
        request_id = f"r{len(self.requests)}"
        deadline = None if timeout is None else self.now + timeout
        request = Request(
            request_id, tuple(prompt), GREEDY, max_new_tokens, 0, stop_ids, self.now, deadline,
            scheduling or Scheduling(), group,
        )  # fmt: skip
        assert len(prompt) + max_new_tokens <= self.max_model_len
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.engine.execute(Submit(request), self.now)
        self.queued_tokens += len(prompt) if request_id in self.scheduler.by_id else 0
        self.check()
        return request_id

    def cancel(self, request_id: str) -> None:
        sequence = self.scheduler.by_id.get(request_id)
        if sequence is not None:
            self.cancelled.add(request_id)
        self.engine.execute(Abort(request_id), self.now)
        assert request_id not in self.scheduler.by_id
        self.check()

    def hold(self, request_id: str, held: bool) -> None:
        self.engine.execute(Hold(request_id, held), self.now)
        self.check()

    def step(self, seconds: float = 1.0) -> list[SequenceEvent]:
        self.now += seconds
        due = [s for s in self.scheduler.by_id.values() if (s.request.deadline or 1e9) <= self.now]
        preempted = self.engine.counters.preemptions
        events = self.engine.step(self.now)
        for event in events:
            self._take(event)
        assert all(sequence.request.id in self.ends for sequence in due), "a deadline was missed"
        assert self.engine.counters.preemptions >= preempted
        # Whatever ended before this call was last in the step that this call read.
        pages = self.scheduler.pages
        held = [step for step, _ in pages._releases]
        assert all(step > pages.retired for step in held), "pages are kept too long"
        self.check()
        return events

    def _take(self, event: SequenceEvent) -> None:
        request_id = event.request_id
        assert request_id not in self.ends, "an event after the end"
        started = event.first_scheduled is not None
        assert event.tokens or event.finish or started, "an empty event"
        if event.tokens and not self.outputs[request_id]:
            self.order.append(request_id)
        self.outputs[request_id] += event.tokens
        if event.finish is not None:
            self.ends[request_id] = event.finish
            told = event.finish in (FinishReason.ERROR, FinishReason.LATE)
            assert bool(event.error) == told

    def check(self) -> None:
        """Nothing leaks, everything is counted, every output is right so far."""
        self.scheduler.check_invariants()
        counters, by_reason = self.engine.counters, self.engine.counters.by_reason
        in_work = len(self.scheduler.running) + len(self.scheduler.waiting)
        in_work += len(self.scheduler.waiting.held)
        assert counters.received == len(self.requests)
        assert (
            counters.received == counters.finished + counters.aborted + counters.refused + in_work
        )
        assert sum(by_reason.values()) == counters.finished + counters.aborted + counters.refused
        assert counters.generated_tokens == sum(map(len, self.outputs.values()))
        assert counters.prompt_tokens == self.queued_tokens
        assert counters.preemptions == self.scheduler.preemptions
        load, pages = self.engine.load(), self.scheduler.limits.num_pages
        assert load.running + load.waiting == in_work and sum(load.pages) == sum(pages) - len(pages)
        assert [len(states) for states in self.engine.page_states()] == [n - 1 for n in pages]

    def drain(self) -> None:
        """Run to the end and compare every output with the one computed by hand."""
        budget = 50 + 8 * sum(self._cost(r) for r in self.requests.values())
        while self.engine.has_work:
            budget -= 1
            assert budget > 0, "the engine makes no progress"
            self.step()
        for allocator in self.scheduler.allocators:
            assert allocator.num_used == 0, "pages leaked"
        assert len(self.scheduler._free_slots) == self.scheduler.limits.num_slots
        assert not self.engine.runner.outstanding
        for request_id, request in self.requests.items():
            self._compare(request_id, request)

    def hit_rate(self) -> float:
        """Of the prompt tokens that were looked up."""
        return self.scheduler.prefix_hits / max(1, self.scheduler.prefix_queries)

    def _cost(self, request: Request) -> int:
        """Steps a request can take alone."""
        return 2 + request.max_new_tokens + len(request.prompt)

    def _compare(self, request_id: str, request: Request) -> None:
        windows = self.scheduler.limits.windows
        sees = max(windows) if windows and None not in windows else None
        tokens, finish = expected(request, sees)
        end, output = self.ends[request_id], self.outputs[request_id]
        if end is FinishReason.LATE:
            assert output == [] and request.deadline is not None
        elif end in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            assert output == tokens[: len(output)]
            assert (end is FinishReason.CANCELLED) == (request_id in self.cancelled)
        else:
            assert (output, end) == (tokens, finish)


def scheduler_limits(
    num_slots: int = 4,
    chunk: int = 16,
    page_size: int = 4,
    pages: tuple[int, ...] = (17,),
    windows: tuple[int | None, ...] = (),
) -> SchedulerLimits:
    return SchedulerLimits(num_slots, chunk, page_size, pages, windows)
