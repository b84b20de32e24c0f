"""The engine's own thread: one batch of events a step, bounded queues, and how it ends."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from fakes import GREEDY, FakeRunner, expected, scheduler_limits
from serving import PATIENCE_S, wait_until

from jaxinfer.engine import Engine
from jaxinfer.engine_thread import IDLE_WAIT_S, RETRY_AFTER_S, EngineThread
from jaxinfer.request import (
    Abort,
    EngineStoppedError,
    FinishReason,
    QueueFullError,
    Request,
    Scheduling,
    Submit,
)
from jaxinfer.scheduler import Scheduler
from jaxinfer.validation import EngineLimits

MAX_MODEL_LEN = 64


class GatedRunner(FakeRunner):
    """A fake device that works only while its gate is open, and fails once told to."""

    def __init__(self, limits):
        super().__init__(limits, MAX_MODEL_LEN)
        self.gate = threading.Event()
        self.gate.set()
        self.one_step = False  # the gate closes behind the step that it lets pass
        self.failure: Exception | None = None
        self.steps = 0
        self.step_seconds = 0.0

    def collect(self, handle):
        assert self.gate.wait(PATIENCE_S)
        if self.one_step:
            self.gate.clear()
        time.sleep(self.step_seconds)
        if self.failure is not None:
            raise self.failure
        self.steps += 1
        return super().collect(handle)


class Front:
    """What stands before the thread: it keeps what the callbacks say, and who called."""

    def __init__(self, num_slots: int = 4, **limits: float):
        engine_limits = EngineLimits(51, MAX_MODEL_LEN, num_slots, 256, 100, 10_000)
        engine_limits = dataclasses.replace(engine_limits, **limits)
        plan_limits = scheduler_limits(num_slots=num_slots, pages=(80,))
        self.runner = GatedRunner(plan_limits)
        self.engine = Engine(Scheduler(plan_limits), self.runner, engine_limits)
        self.batches: list[list] = []
        self.stops: list[str] = []
        self.callers: set[str] = set()
        self.thread = EngineThread(self.engine, self._on_events, self._on_stop)

    def _on_events(self, events):
        self.callers.add(threading.current_thread().name)
        self.batches.append(events)

    def _on_stop(self, failure):
        self.callers.add(threading.current_thread().name)
        self.stops.append(failure)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.runner.gate.set()
        self.thread.stop()
        assert not self.thread._thread.is_alive()

    def submit(self, name: str, prompt: int = 3, output: int = 5, priority: int = 0) -> Request:
        urgency = Scheduling(priority)
        tokens = tuple(range(1, prompt + 1))
        request = Request(name, tokens, GREEDY, output, 0, scheduling=urgency)
        self.thread.send(Submit(request))
        return request

    def tokens(self, name: str) -> list[int]:
        events = [e for batch in self.batches for e in batch if e.request_id == name]
        return [token for event in events for token in event.tokens]

    def ends(self) -> dict[str, FinishReason]:
        return {e.request_id: e.finish for batch in self.batches for e in batch if e.finish}

    def hold(self) -> None:
        """Have the thread wait for the device, so that what is sent from now on stays waiting."""
        self.runner.gate.clear()
        self.submit("held", output=2)
        self.until(lambda: len(self.runner.outstanding) == 2)

    def until(self, condition):
        wait_until(condition)


def test_one_batch_of_events_a_step_from_the_engines_thread():
    with Front() as front:
        front.runner.gate.clear()
        first = front.submit("first")
        front.until(lambda: front.runner.outstanding)  # its step waits for the gate
        others = [front.submit(f"{i}", prompt=2 + i, output=6) for i in range(3)]
        front.runner.gate.set()
        front.until(lambda: len(front.ends()) == 4)
    for request in [first, *others]:
        assert (front.tokens(request.id), front.ends()[request.id]) == expected(request)
    assert front.callers == {"jaxinfer-engine"}
    with_tokens = [batch for batch in front.batches if any(event.tokens for event in batch)]
    assert len(with_tokens) <= front.runner.steps < 18, "fewer batches than tokens"
    assert max(map(len, front.batches)) == 4
    for batch in front.batches:
        names = [event.request_id for event in batch]
        assert batch and len(set(names)) == len(names)


def test_requests_may_come_from_many_threads():
    with Front(num_slots=3) as front:
        senders = [
            threading.Thread(target=lambda i=i: [front.submit(f"{i}/{j}") for j in range(20)])
            for i in range(4)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        front.until(lambda: len(front.ends()) == 80)
        assert front.thread.num_waiting == 0 and not front.thread.has_work
    assert front.engine.counters.finished == 80


def test_a_failing_device_ends_the_thread_and_says_why(caplog):
    with Front() as front:
        front.runner.failure = RuntimeError("the device was lost")
        front.submit("a")
        front.until(lambda: front.stops)
        assert front.stops == ["the engine failed: RuntimeError: the device was lost"]
        assert front.thread.status == "failed"
        assert front.thread.failure == front.stops[0]
        with pytest.raises(EngineStoppedError, match="the device was lost"):
            front.submit("b")
        with pytest.raises(EngineStoppedError):
            front.thread.send(Abort("a"))
    assert front.thread.status == "failed", "stopping it afterwards hides nothing"
    assert front.stops == ["the engine failed: RuntimeError: the device was lost"]
    assert "the engine failed" in caplog.text


def test_after_a_failure_nothing_runs_or_waits_and_no_page_is_used(caplog):
    with Front() as front:
        for i in range(30):
            front.submit(f"r{i}", output=40)
        front.until(lambda: front.batches)
        front.runner.failure = RuntimeError("the device is lost")
        front.until(lambda: front.stops)
        load = front.engine.load()
        assert (load.running, load.waiting, load.pages[2]) == (0, 0, 0)
        assert load.counters.received == 30 == load.counters.finished + load.counters.aborted
        assert front.thread.num_waiting == 0 and not front.thread.has_work


def test_a_failing_reader_of_events_ends_the_thread_too():
    front = Front()

    def fail(events):
        raise KeyError("gone")

    front.thread = EngineThread(front.engine, fail, front._on_stop)
    with front:
        front.submit("a")
        front.until(lambda: front.stops)
    assert front.thread.status == "failed" and "KeyError" in front.thread.failure


def test_stopping_ends_after_the_step_and_takes_nothing_more():
    with Front() as front:
        front.runner.step_seconds = 0.2
        front.submit("a", output=40)
        front.until(lambda: front.batches)
        front.thread.stop("the server is shutting down")
        assert front.thread.status == "stopped" and front.stops == [""]
        with pytest.raises(EngineStoppedError, match="the server is shutting down"):
            front.submit("b")
        steps = front.runner.steps
        assert steps < 40
        time.sleep(0.1)
        assert front.runner.steps == steps
        front.thread.stop("again")
        assert front.thread.failure == "the server is shutting down"
    assert front.stops == [""]


def test_what_is_left_at_the_end_is_accounted_for():
    with Front() as front:
        front.runner.step_seconds = 0.05
        for i in range(20):
            front.submit(f"r{i}", output=40)
        front.until(lambda: front.batches)
        for i in range(20, 40):
            front.submit(f"r{i}", output=40)
        front.thread.stop()
        counters, load = front.engine.counters, front.engine.load()
        assert counters.received == 40 == counters.finished + counters.aborted
        assert load.running == load.waiting == 0 and load.counters == counters


def test_a_thread_that_never_started_can_be_stopped():
    front = Front()
    front.thread.stop()
    with pytest.raises(EngineStoppedError):
        front.submit("a")


def test_the_queue_is_bounded_by_requests():
    with Front(max_queued_requests=5) as front:
        front.hold()
        for i in range(5):
            front.submit(f"{i}")
        with pytest.raises(QueueFullError, match="5 requests are waiting, the limit is 5") as full:
            front.submit("too much")
        assert RETRY_AFTER_S[0] <= full.value.retry_after <= RETRY_AFTER_S[1]
        front.thread.send(Abort("4"))  # leaving is never refused
        front.runner.gate.set()
        front.until(lambda: len(front.ends()) == 6)
        assert front.ends()["4"] is FinishReason.CANCELLED
        front.submit("later")
        front.until(lambda: len(front.ends()) == 7)
    assert "too much" not in front.ends()
    assert front.engine.counters.received == 7


def test_the_batch_class_leaves_places_in_the_queue():
    with Front(max_queued_requests=8, batch_priority=1, interactive_reserve=0.25) as front:
        front.hold()
        for i in range(6):
            front.submit(f"batch {i}", priority=1)
        with pytest.raises(QueueFullError, match=r"6 requests of the batch class .* of 8 is 6"):
            front.submit("batch 6", priority=1)
        front.submit("urgent")
        front.submit("urgent too")
        with pytest.raises(QueueFullError, match="8 requests are waiting"):
            front.submit("too much")
        front.runner.gate.set()
        front.until(lambda: len(front.ends()) == 9)
        front.submit("batch 6", priority=1)
        front.until(lambda: len(front.ends()) == 10)


def test_the_queue_is_bounded_by_tokens_but_takes_any_single_request():
    with Front(max_queued_tokens=20) as front:
        front.hold()
        front.submit("large", prompt=30)
        with pytest.raises(QueueFullError, match=r"30 prompt tokens are waiting, 1 more .* of 20"):
            front.submit("small", prompt=1)
        front.runner.gate.set()
        front.until(lambda: len(front.ends()) == 2)
    with Front(max_queued_tokens=20) as front:
        front.hold()
        front.submit("a", prompt=12)
        front.submit("b", prompt=8)
        with pytest.raises(QueueFullError):
            front.submit("c", prompt=1)
        front.runner.gate.set()
        front.until(lambda: len(front.ends()) == 3)
        front.submit("d", prompt=20)
        front.until(lambda: len(front.ends()) == 4)


def test_a_cancelled_request_ends_at_once():
    with Front() as front:
        front.runner.step_seconds = 0.1
        front.submit("a", output=50)
        front.until(lambda: front.batches)
        front.thread.send(Abort("a"))
        front.thread.send(Abort("a"))
        front.thread.send(Abort("nobody"))
        front.until(lambda: front.ends())
        front.until(lambda: not front.thread.has_work)
        assert front.ends() == {"a": FinishReason.CANCELLED}
        assert front.engine.scheduler.allocators[0].num_used == 0


def test_there_is_work_until_the_last_step_was_read():
    """Seen from another thread: nobody waits any more, but the device holds slots and pages."""
    with Front() as front:
        front.runner.gate.clear()
        front.submit("a", output=40)
        front.until(lambda: front.runner.outstanding)
        front.thread.send(Abort("a"))
        front.runner.one_step = True
        front.runner.gate.set()
        front.until(lambda: not front.engine.scheduler.by_id)
        assert front.thread.has_work
        front.runner.one_step = False
        front.runner.gate.set()
        front.until(lambda: not front.thread.has_work)
        assert all(allocator.num_used == 0 for allocator in front.engine.scheduler.allocators)


def test_an_idle_engine_rests_and_still_shows_that_it_lives():
    with Front() as front:
        calls, step = [], front.engine.step
        front.engine.step = lambda now: calls.append(now) or step(now)
        before = front.thread.last_progress
        front.until(lambda: front.thread.last_progress > before)
        calls.clear()
        begun = time.monotonic()
        time.sleep(1.2)
        assert len(calls) <= 2 + (time.monotonic() - begun) / IDLE_WAIT_S


def test_a_hanging_device_shows_as_no_progress_with_work():
    with Front() as front:
        front.runner.gate.clear()
        front.submit("a")
        front.until(lambda: len(front.runner.outstanding) == 2)  # the first step is reported
        before = front.thread.last_progress
        time.sleep(0.7)
        assert front.thread.last_progress == before and front.thread.has_work
        assert front.thread.status == "running"
