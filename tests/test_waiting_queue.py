"""Who runs next: priorities, ageing, fair shares, order of arrival."""

from __future__ import annotations

import itertools
import time

import pytest
from fakes import GREEDY
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.request import Request, Scheduling
from jaxinfer.sequence import NOT_WAITING, Sequence
from jaxinfer.waiting_queue import MOST_ACCOUNTS, MOST_RISES, WaitingQueue

_orders = itertools.count(1)


def sequence(name: str = "s", priority: int = 0, tenant: str = "", tokens: int = 4) -> Sequence:
    scheduling = Scheduling(priority, tenant)
    request = Request(name, (1,) * tokens, GREEDY, 4, 0, scheduling=scheduling)
    return Sequence(request, list(request.prompt), order=next(_orders), level=priority)


def take(queue: WaitingQueue) -> str:
    """Admit the head; its tokens are charged."""
    head = queue.head()
    queue.remove(head)
    queue.charge([head], len(head.tokens))
    queue.check_invariants()
    return head.request.id


def fill(queue: WaitingQueue, *sequences: Sequence, now: float = 0.0) -> None:
    for each in sequences:
        queue.push(each, now)
        queue.check_invariants()


def test_lower_numbers_first_then_order_of_arrival():
    queue = WaitingQueue(ageing=30)
    fill(queue, *(sequence(f"{p}{i}", p) for i in range(2) for p in (3, -1, 0)))
    assert [take(queue) for _ in range(6)] == ["-10", "-11", "00", "01", "30", "31"]
    assert queue.head() is None and len(queue) == queue.tokens == 0


def test_the_preempted_go_before_their_peers_in_order_of_arrival():
    queue = WaitingQueue(ageing=30)
    early, late = sequence("early"), sequence("late")
    fill(queue, sequence("new"), sequence("urgent", -1))
    for ran in (late, early):
        queue.push(ran, 0.0, preempted=True)
    assert [take(queue) for _ in range(4)] == ["urgent", "early", "late", "new"]


def test_tenants_share_by_tokens_and_weight():
    """`large` asks for four times as much a request, `double` has twice the share."""
    queue = WaitingQueue(ageing=1e9, weights={"double": 2.0})
    for i in range(60):
        fill(queue, sequence(f"large{i}", 0, "large", 40), sequence(f"small{i}", 0, "small", 10))
        fill(queue, sequence(f"double{i}", 0, "double", 10))
    served = {"large": 0, "small": 0, "double": 0}
    for _ in range(70):
        head = queue.head()
        served[head.tenant] += len(head.tokens)
        take(queue)
    assert served["small"] == pytest.approx(served["large"], abs=40)
    assert served["double"] == pytest.approx(2 * served["small"], abs=40)


def test_a_tenant_that_was_away_has_no_credit():
    queue = WaitingQueue(ageing=1e9)
    fill(queue, *(sequence(f"busy{i}", 0, "busy") for i in range(30)))
    for _ in range(20):
        take(queue)
    fill(queue, *(sequence(f"back{i}", 0, "back") for i in range(10)))
    turns = [take(queue)[:4] for _ in range(10)]
    assert turns.count("busy") in (4, 5, 6), "they take turns from now on"


def test_who_waited_long_enough_rises_one_level_in_use_and_is_first_there():
    queue = WaitingQueue(ageing=10)
    low = sequence("low", 5)
    fill(queue, low)
    queue.rise(100.0)
    assert low.level == 5, "nobody is above it"
    fill(queue, *(sequence(f"mid{i}", 2) for i in range(3)), now=100.0)
    fill(queue, *(sequence(f"top{i}", 0) for i in range(3)), now=100.0)
    queue.rise(100.0)
    assert low.level == 2
    queue.rise(109.0)
    assert low.level == 2
    queue.rise(110.0)
    queue.check_invariants()
    assert low.level == 0 and take(queue) == "low", "it came before all others"


def test_ageing_bounds_the_wait():
    """One place a second, and an urgent request every second: the low one waits no longer than
    one ageing time for each level above it, and its turn."""
    queue, low, now = WaitingQueue(ageing=10), sequence("low", 2), 0.0
    fill(queue, low)
    while low.entry != NOT_WAITING:
        now += 1.0
        assert now <= 22, "it starves"
        fill(queue, sequence(f"a{now}", 0), sequence(f"b{now}", 1), now=now)
        queue.rise(now)
        take(queue)
    assert now >= 10


def test_a_burst_rises_over_several_steps():
    queue = WaitingQueue(ageing=1)
    fill(queue, sequence("top", 0), *(sequence(f"{i}", 1) for i in range(3 * MOST_RISES)))
    for step in range(1, 4):
        queue.rise(5.0)
        queue.check_invariants()
        assert queue.more_urgent(1) == 1 + step * MOST_RISES


def test_of_other_tenants_as_much_goes_before_as_their_share():
    queue = WaitingQueue(ageing=1e9, weights={"double": 2.0})
    fill(queue, sequence("urgent", -1, tokens=7), sequence("later", 1, tokens=1000))
    fill(queue, *(sequence(f"{i}", 0, "crowd", 40) for i in range(50)))
    assert queue.ahead_of(sequence("few", 0, "few", 80)) == (1 + 2, 7 + 80)
    assert queue.ahead_of(sequence("few", 0, "double", 80)) == (1 + 1, 7 + 40)
    assert queue.ahead_of(sequence("own", 0, "crowd", 80)) == (1 + 50, 7 + 2000)
    fill(queue, sequence("few0", 0, "few", 80))
    assert queue.ahead_of(sequence("few1", 0, "few", 80)) == (1 + 4 + 1, 7 + 160 + 80)
    assert queue.ahead_of(sequence("top", -2)) == (0, 0)
    runs = [sequence("u", -1, tokens=9), sequence("f", 0, "few", 30), sequence("l", 3, tokens=900)]
    for each in runs:
        each.prefill_target, each.num_computed_tokens = each.prompt_len, 2
    assert queue.ahead_of(sequence("few2", 0, "few", 52), runs) == (1 + 4 + 1, 7 + 160 + 80 + 35)
    assert queue.ahead_of(sequence("top", -2), runs) == (0, 0)


def test_however_many_rose_the_urgent_ones_have_their_turns():
    """A long queue of old requests does not pass every one that comes at a level above."""
    queue = WaitingQueue(ageing=10)
    old = [sequence(f"old{i}", 1, f"t{i % 5}") for i in range(200)]
    fill(queue, *old, sequence("new", 0))
    for step in range(5):
        queue.rise(20.0 + step)
    assert all(each.level == 0 for each in old)
    turns = []
    for i in range(40):
        fill(queue, sequence(f"new{i}", 0), now=30.0)
        turns.append(take(queue))
    risen = [name for name in turns if name.startswith("old")]
    assert len(risen) in (19, 20, 21), "they take turns"
    assert risen == [f"old{i}" for i in range(len(risen))], "in order of arrival"


def test_newcomers_do_not_keep_a_served_tenant_from_its_turn():
    """A place a second, and a tenant nobody knew every second."""
    queue = WaitingQueue(ageing=1e9)
    fill(queue, *(sequence(f"known{i}", 0, "known") for i in range(2)))
    assert take(queue) == "known0"
    for i in range(20):
        fill(queue, sequence(f"{i}", 0, f"new{i}"))
        if take(queue) == "known1":
            return
    raise AssertionError("it starves")


def test_accounts_of_passing_tenants_are_forgotten():
    """Each is a request, served and gone; what it costs to charge one stays what it was."""
    queue = WaitingQueue(ageing=1e9)
    for i in range(30_000):
        fill(queue, sequence(f"{i}", 0, f"tenant{i}"))
        take(queue)
        queue.rise(0.0)
    assert len(queue._service) <= 2 * MOST_ACCOUNTS


def test_the_account_of_who_runs_is_kept():
    """Its prompt has its turns whatever number of others came meanwhile."""
    queue, runs = WaitingQueue(ageing=1e9), sequence("runs", 0, "runs", 1000)
    queue.charge([runs], 10)
    fill(queue, sequence("waits"))
    for i in range(3 * MOST_ACCOUNTS):
        queue.charge([sequence("passing", 0, f"tenant{i}")], 1)
        queue.rise(0.0, [runs])
    assert len(queue._service) <= 2 * MOST_ACCOUNTS + 1 and queue.service(runs) == 10


def test_what_left_leaves_nothing_behind():
    queue = WaitingQueue(ageing=1e9)
    stays = sequence("stays")
    fill(queue, stays)
    for i in range(5000):
        passing = sequence(f"{i}", 0, f"tenant{i}")
        queue.push(passing, 0.0)
        queue.charge([passing], 1)
        queue.remove(passing)
        queue.rise(0.0)
    queue.check_invariants()
    (level,) = queue._levels.values()
    assert len(level.entries) < 200 and len(level.lines) < 200 and len(level.turns) < 200
    assert len(queue._service) <= 8192 and take(queue) == "stays"


def test_choosing_takes_no_longer_in_a_long_queue():
    """Operations counted, not timed: entries looked at for one head."""
    for waiting in (100, 10_000):
        queue = WaitingQueue(ageing=1e9)
        for i in range(waiting):
            queue.push(sequence(f"{i}", i % 3, f"t{i % 7}"), 0.0)
        start = time.process_time()
        for _ in range(50):
            take_unchecked(queue)
        seconds = time.process_time() - start
        if waiting == 100:
            short = seconds
    assert seconds < 20 * short + 0.02, (short, seconds)


def take_unchecked(queue: WaitingQueue) -> None:
    head = queue.head()
    queue.remove(head)
    queue.charge([head], 4)


def rose(each: Sequence) -> bool:
    return each.level < each.request.scheduling.priority


def line_of(each: Sequence) -> str | None:
    """Those that rose are one line, whoever they are of."""
    return None if rose(each) else each.tenant


class QueueMachine(RuleBasedStateMachine):
    """Against a plain list: the head is of the most urgent level, and first of its tenant there."""

    @initialize(ageing=st.sampled_from([1.0, 5.0, 1e9]))
    def start(self, ageing):
        self.queue, self.ageing, self.now = WaitingQueue(ageing), ageing, 0.0
        self.waiting: list[Sequence] = []
        self.ran: list[Sequence] = []

    @rule(priority=st.integers(-1, 2), tenant=st.sampled_from("abc"), tokens=st.integers(1, 9))
    def push(self, priority, tenant, tokens):
        each = sequence("s", priority, tenant, tokens)
        self.queue.push(each, self.now)
        self.waiting.append(each)

    @rule(which=st.integers(0, 20))
    def push_back(self, which):
        if self.ran:
            each = self.ran.pop(which % len(self.ran))
            self.queue.push(each, self.now, preempted=True)
            self.waiting.append(each)

    @rule()
    def take(self):
        head = self.queue.head()
        if head is None:
            assert not self.waiting
            return
        peers = [s for s in self.waiting if s.level == head.level]
        assert head.level == min(s.level for s in self.waiting)
        back = [s for s in peers if s.preempted and not rose(s)]
        if back:
            assert head is min(back, key=lambda s: s.order)
        else:
            own = [s for s in peers if line_of(s) == line_of(head)]
            assert head is min(own, key=lambda s: s.order)
            served = {line_of(s): self.queue.service(s) for s in peers}
            assert served[line_of(head)] == min(served.values())
        self.queue.remove(head)
        self.queue.charge([head], len(head.tokens))
        self.waiting.remove(head)
        self.ran.append(head)

    @rule(which=st.integers(0, 20))
    def cancel(self, which):
        if self.waiting:
            self.queue.remove(self.waiting.pop(which % len(self.waiting)))

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0]))
    def wait(self, seconds):
        before = {id(s): (s.level, s.entered) for s in self.waiting}
        levels = sorted({s.level for s in self.waiting})
        self.now += seconds
        self.queue.rise(self.now)
        for each in self.waiting:
            level, entered = before[id(each)]
            due = self.now - entered >= self.ageing and level != levels[0]
            assert (each.level < level) == due, "rises when it is due, and only then"

    @invariant()
    def consistent(self):
        if hasattr(self, "queue"):
            self.queue.check_invariants()
            assert len(self.queue) == len(self.waiting)
            assert {id(s) for s in self.queue} == {id(s) for s in self.waiting}


TestQueueMachine = QueueMachine.TestCase
