"""Engine and scheduler over a fake device: any mix of requests, cancels, deadlines and pressure."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes import GREEDY, POISON, Harness, expected, next_token, scheduler_limits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jaxinfer.policy import SchedulerPolicy
from jaxinfer.request import Abort, FinishReason, Request, SamplingParams, Scheduling, Submit
from jaxinfer.window_pages import most_kept

MAX_MODEL_LEN = 24
PAGE_SIZE = 4
FEWEST_PAGES = MAX_MODEL_LEN // PAGE_SIZE + 1
LONG = 5  # times the tokens that the smallest pools of windows hold
BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])


class EngineMachine(RuleBasedStateMachine):
    """Random operations; `Harness` checks every promise after each, and outputs at the end."""

    @initialize(
        overlap=st.booleans(),
        num_slots=st.integers(1, 5),
        chunk=st.integers(1, 20),
        spare=st.integers(0, 6),
        beside_windows=st.sampled_from([0, 0, 1, 4, 12]),
        longest=st.sampled_from([MAX_MODEL_LEN, LONG * 12]),
        windows=st.sampled_from([(None,), (None, None), (None, 5), (6,), (9, 4), (None, 3, 10)]),
        policy=st.builds(
            SchedulerPolicy,
            prefix_cache=st.booleans(),
            watermark=st.sampled_from([0.0, 0.01, 0.3]),
            ageing=st.sampled_from([2.0, 30.0]),
            tenant_weights=st.sampled_from([(), (("a", 3.0),)]),
            tpot_target=st.none() | st.just(1.5),
            interactive_reserve=st.sampled_from([0.0, 0.4]),
            separate_phases=st.booleans(),
        ),
        host_pages=st.sampled_from([(0, 0), (3, 3), (12, 12), (40, 3)]),
    )
    def start(
        self, overlap, num_slots, chunk, spare, beside_windows, longest, windows, policy, host_pages
    ):
        """Pools of windows hold what one sequence needs to go on at all, or little more."""
        whole = longest // PAGE_SIZE + 1 + spare
        pages = tuple(
            whole if window is None else 1 + most_kept(window, PAGE_SIZE) + beside_windows
            for window in windows
        )
        limits = scheduler_limits(num_slots, chunk, PAGE_SIZE, pages, windows)
        hosts = tuple(host_pages[window is not None] for window in windows)
        policy = dataclasses.replace(policy, host_pages=hosts)
        self.harness = Harness(limits, longest, overlap, policy)

    @rule(
        prompt=st.lists(st.integers(0, POISON - 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        like=st.none() | st.integers(0, 40),
        output=st.integers(1, MAX_MODEL_LEN),
        stops=st.sets(st.integers(0, POISON - 1), max_size=5),
        timeout=st.none() | st.integers(0, 12),
        priority=st.integers(-1, 2),
        tenant=st.sampled_from(["", "a"]),
        times=st.sampled_from([1, 1, LONG]),
        samples=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(self, prompt, like, output, stops, timeout, priority, tenant, times, samples):
        """`like` continues an earlier request's prompt and answer, as a conversation does; `times`
        makes it a long one."""
        longest = self.harness.max_model_len
        earlier = self.harness.requests.get(f"r{like}")
        if earlier is not None:
            prompt = [*earlier.prompt, *self.harness.outputs[earlier.id], *prompt]
        prompt = (times * prompt)[: longest - 1]
        output = min(output, longest - len(prompt))
        group = f"g{len(self.harness.requests)}" if samples > 1 else ""
        how = tuple(stops), timeout, Scheduling(priority, tenant), group
        for _ in range(samples):
            self.harness.submit(prompt, output, *how)

    @rule(at=st.integers(0, 3))
    def submit_poison(self, at):
        prompt = [1, 2, 3, 4]
        prompt[at] = POISON
        self.harness.submit(prompt, 5)

    @rule(which=st.integers(0, 40))
    def cancel(self, which):
        self.harness.cancel(f"r{which}")  # known, unknown, ended or running

    @rule(which=st.integers(0, 40), held=st.booleans())
    def hold(self, which, held):
        self.harness.hold(f"r{which}", held)

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0]), times=st.integers(1, 4))
    def step(self, seconds, times):
        for _ in range(times):
            self.harness.step(seconds)

    def teardown(self):
        if hasattr(self, "harness"):
            for sequence in [*self.harness.scheduler.waiting.held]:
                self.harness.hold(sequence.request.id, False)
            self.harness.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40)


def random_traffic(harness: Harness, rng: np.random.Generator, count: int, cancels: float):
    """Requests of random lengths at random times, some cancelled, some with a deadline."""
    submitted = 0
    while submitted < count or harness.engine.has_work:
        for _ in range(min(int(rng.integers(0, 6)), count - submitted)):
            prompt = rng.integers(0, POISON, rng.integers(1, harness.max_model_len)).tolist()
            output = int(rng.integers(1, harness.max_model_len - len(prompt) + 1))
            stops = tuple(rng.integers(0, POISON, rng.integers(0, 3)).tolist())
            timeout = float(rng.integers(1, 200)) if rng.random() < cancels else None
            harness.submit(prompt, output, stops, timeout)
            submitted += 1
        if rng.random() < cancels:
            harness.cancel(f"r{rng.integers(0, len(harness.requests) + 1)}")
        harness.step()
    harness.drain()


@BOTH_LOOPS
@pytest.mark.parametrize("pages", [20, 60, 400])
def test_traffic_with_large_chunks_and_pressure(overlap, pages):
    """Chunks of several prompts and tiles; the smallest pool preempts all the time."""
    limits = scheduler_limits(num_slots=16, chunk=200, page_size=16, pages=(pages,))
    harness = Harness(limits, max_model_len=300, overlap=overlap)
    random_traffic(harness, np.random.default_rng(pages), count=120, cancels=0.1)
    assert len(set(harness.ends.values())) >= 4
    assert (harness.scheduler.preemptions > 0) == (pages < 400)


def test_overlapped_and_synchronous_loops_say_the_same():
    outputs = []
    for overlap in (False, True):
        limits = scheduler_limits(num_slots=8, chunk=32, page_size=8, pages=(30,))
        harness = Harness(limits, max_model_len=64, overlap=overlap)
        random_traffic(harness, np.random.default_rng(7), count=100, cancels=0.0)
        outputs.append((harness.outputs, harness.ends))
    assert outputs[0] == outputs[1]


@BOTH_LOOPS
def test_one_token_a_step_with_what_each_event_says(overlap):
    harness = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap)
    harness.submit([3, 1], 3)
    tokens = [next_token([3, 1])]
    tokens.append(next_token([3, 1, *tokens]))
    tokens.append(next_token([3, 1, *tokens]))
    started, *events = [event for _ in range(5) for event in harness.step()]
    assert (started.tokens, started.first_scheduled, started.time) == ((), 1.0, 1.0)
    assert [event.tokens for event in events] == [(token,) for token in tokens]
    assert [event.finish for event in events] == [None, None, FinishReason.LENGTH]
    assert [event.first_scheduled for event in events] == [None, None, None]
    late = 1.0 if overlap else 0.0  # read one step after it was dispatched
    assert [event.time for event in events] == [1.0 + late, 2.0 + late, 3.0 + late]
    assert not harness.engine.has_work


@BOTH_LOOPS
def test_a_stop_id_ends_the_output_and_is_its_last_token(overlap):
    for own in (False, True):
        harness = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap)
        stop = expected(Request("x", (9, 9), GREEDY, 6, 0))[0][2]
        params = SamplingParams(temperature=0, stop_token_ids=(stop,) if own else ())
        request = Request("x", (9, 9), params, 6, 0, stop_ids=(stop,))
        harness.requests["x"], harness.outputs["x"] = request, []
        harness.engine.execute(Submit(request), 0.0)
        harness.queued_tokens = 2
        harness.drain()
        assert harness.outputs["x"][-1] == stop and len(harness.outputs["x"]) <= 3
        assert harness.ends["x"] is (FinishReason.STOP_ID if own else FinishReason.EOS)


@BOTH_LOOPS
def test_a_cancelled_request_frees_its_slot_at_once_and_its_pages_with_the_next_step(overlap):
    harness = Harness(scheduler_limits(num_slots=1, pages=(9,)), MAX_MODEL_LEN, overlap)
    running = harness.submit([1] * 10, 14)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.allocators[0].num_used > 0
    waiting = harness.submit([2] * 10, 14)
    harness.cancel(running)
    assert harness.scheduler._free_slots == [0]
    events = harness.step()
    assert [e.finish for e in events if e.request_id == running] == [FinishReason.CANCELLED]
    held = harness.scheduler.by_id[waiting].pages
    assert harness.scheduler.allocators[0].num_used == (len(held[0]) if held else 0)
    harness.drain()


@BOTH_LOOPS
def test_a_deadline_ends_waiting_prefilling_and_decoding_requests(overlap):
    harness = Harness(scheduler_limits(num_slots=2, chunk=4, pages=(17,)), MAX_MODEL_LEN, overlap)
    decoding = harness.submit([1, 2], 20, timeout=5.0)
    prefilling = harness.submit([1] * 20, 4, timeout=5.0)
    waiting = harness.submit([1, 2], 20, timeout=5.0)
    for _ in range(4):
        harness.step()
    assert harness.outputs[decoding] and harness.scheduler.by_id[prefilling].prefilling
    assert harness.scheduler.waiting
    events = harness.step()
    assert {e.request_id for e in events if e.finish is FinishReason.DEADLINE} == {
        decoding,
        prefilling,
        waiting,
    }
    harness.drain()
    assert harness.engine.counters.by_reason == {"deadline": 3}


@BOTH_LOOPS
def test_an_id_used_again_has_nothing_of_the_earlier_deadline(overlap):
    engine, ends = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap).engine, []

    def run(now: float, deadline: float | None) -> None:
        request = Request("same", (1, 2), GREEDY, 3, 0, deadline=deadline)
        engine.execute(Submit(request), now)
        while engine.has_work:
            ends.extend(e.finish for e in engine.step(now) if e.finish)

    for now, deadline in ((0.0, 10.0), (0.0, 10.0), (50.0, 100.0), (200.0, None)):
        run(now, deadline)  # earlier deadlines have passed, not its own
    run(200.0, 300.0)
    run(300.0, 300.0)  # two entries for one instant end it once
    assert ends == [FinishReason.LENGTH] * 5 + [FinishReason.DEADLINE]


@BOTH_LOOPS
def test_a_preempted_request_resumes_with_the_same_output(overlap):
    pages = FEWEST_PAGES + 1
    harness = Harness(scheduler_limits(num_slots=3, pages=(pages,)), MAX_MODEL_LEN, overlap)
    for i in range(3):
        harness.submit([i, 1], MAX_MODEL_LEN - 2)
    harness.drain()
    assert harness.scheduler.preemptions > 0
    assert list(harness.ends) == ["r0", "r1", "r2"], "the earlier admitted end earlier"


@BOTH_LOOPS
def test_requests_start_in_the_order_they_came(overlap):
    harness = Harness(scheduler_limits(num_slots=2, chunk=8), MAX_MODEL_LEN, overlap)
    rng = np.random.default_rng(3)
    for _ in range(30):
        harness.submit(rng.integers(0, POISON, rng.integers(1, 20)).tolist(), 4)
    harness.drain()
    assert harness.order == list(harness.requests)


@BOTH_LOOPS
def test_a_fault_in_one_request_fails_that_request(overlap):
    harness = Harness(scheduler_limits(num_slots=4), MAX_MODEL_LEN, overlap)
    harness.submit([1, 2, 3], 10)
    harness.submit([1, POISON, 3], 10)
    harness.submit([4, 5], 10)
    harness.drain()
    assert harness.ends == {
        "r0": FinishReason.LENGTH,
        "r1": FinishReason.ERROR,
        "r2": FinishReason.LENGTH,
    }
    assert harness.engine.counters.aborted == 1


@BOTH_LOOPS
def test_a_stop_string_found_by_the_front_counts_as_finished(overlap):
    harness = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap)
    harness.submit([1, 2], 20)
    for _ in range(8):
        harness.step()
    harness.engine.execute(Abort("r0", FinishReason.STOP_STRING), harness.now)
    events = harness.engine.step(harness.now)
    assert [event.finish for event in events] == [FinishReason.STOP_STRING]
    counters = harness.engine.counters
    assert (counters.finished, counters.aborted) == (1, 0)


def test_an_id_in_use_is_refused_and_counts_for_nothing():
    harness = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap=True)
    harness.submit([1, 2], 5)
    with pytest.raises(ValueError, match="'r0' is already in use"):
        harness.engine.execute(Submit(harness.requests["r0"]), 0.0)
    harness.drain()
    assert harness.engine.counters.received == 1


def test_an_engine_without_work_does_nothing():
    harness = Harness(scheduler_limits(), MAX_MODEL_LEN, overlap=True)
    assert not harness.engine.has_work
    assert harness.step() == []
    harness.cancel("never seen")
    assert not harness.engine.has_work
