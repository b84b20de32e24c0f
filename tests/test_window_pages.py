"""Layers that see a window: a prompt of any length in a pool that holds little more than that."""

from __future__ import annotations

import pytest
from fakes import GREEDY, POISON, Harness, scheduler_limits
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.policy import SchedulerPolicy
from jaxinfer.request import FinishReason, Request, Scheduling
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import Sequence
from jaxinfer.step_plan import MAX_PIECES, chunk_pages
from jaxinfer.window_pages import Growing, WindowPages, first_seen, most_kept, pages_of_one

LONG = 300  # tokens of the longest sequence here
WHOLE = LONG // 4 + 1  # pages of it, and the null page
BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])


def harness(
    window_pages: int,
    overlap: bool = True,
    whole: int = 3 * WHOLE,
    slots: int = 4,
    **policy: object,
) -> Harness:
    """Pages of four tokens, chunks of 16, a window of 9: three pages beside the one in use."""
    limits = scheduler_limits(slots, 16, 4, (whole, window_pages + 1), (None, 9))
    return Harness(limits, LONG, overlap, SchedulerPolicy(**policy))


def prompt(first: int, length: int) -> list[int]:
    return [(first + i * i) % 49 for i in range(length)]


@given(window=st.integers(1, 70), page_size=st.integers(1, 40))
def test_no_position_needs_more_pages_than_are_kept(window, page_size):
    for position in range(window, window + 2 * page_size):
        seen = position // page_size + 1 - first_seen(window, position, page_size)
        assert seen <= most_kept(window, page_size) - 1
    needed = [position // page_size + 1 - first_seen(window, position, page_size)
              for position in range(window, window + 2 * page_size)]  # fmt: skip
    assert max(needed) == most_kept(window, page_size) - 1, "and one to go on with"


def test_one_sequence_needs_its_window_and_a_chunk_but_no_more_than_its_length():
    assert pages_of_one(None, 100, 4, 16) == 25
    assert pages_of_one(9, 100, 4, 16) == 4 + 4 + MAX_PIECES
    assert pages_of_one(9, 12, 4, 16) == 3


def test_what_is_promised_is_the_windows_of_all_and_one_chunk_but_never_more_than_they_lack():
    pages = WindowPages(9, 4, 16, num_pages=100)
    growing = Growing({1: pages})
    assert growing.claims(0, 20) == (20, 20) and growing.promised(0, (20, 20)) == 20
    assert growing.claims(1, 20) == (20, 4)
    assert growing.promised(1, (20, 4)) == 4 + chunk_pages(16, 4)
    assert growing.promised(1, (3, 3)) == 3
    assert growing.claims(1, 20, has=3) == (20, 1), "what it brings it need not take"
    request = Request("r", (1,) * 80, GREEDY, 1, 0)
    begun = Sequence(request, num_computed_tokens=24, pages=[[9] * 20, [0, 0, 0, 0, 5, 6]])
    growing.prompts[begun] = 20
    assert growing.claims(1) == (14, 2) and growing.claims(1, 20) == (34, 6)
    assert growing.without(1, (34, 6), begun) == (20, 4)
    small = WindowPages(9, 4, 160, num_pages=11)
    assert small.promised((50, 4)) == 4 + 3, "half of what one sequence leaves"


@BOTH_LOOPS
@pytest.mark.parametrize("window_pages", [4, 5, 9, 20])
def test_a_prompt_far_longer_than_the_windows_pool_is_served(window_pages, overlap):
    run = harness(window_pages, overlap)
    for first in (1, 2):
        run.submit(prompt(first, 280), 20)
    run.drain()  # which compares every token
    assert run.engine.counters.preemptions == 0


@BOTH_LOOPS
def test_a_window_group_holds_the_window_and_the_chunks_on_their_way(overlap):
    run = harness(60, overlap)
    run.submit(prompt(1, 280), 20)
    most = 0
    while run.engine.has_work:
        run.step()
        most = max(most, run.scheduler.allocators[1].num_used)
    assert most == 2 + 4, "whose step was read gave them back"
    assert run.scheduler.allocators[0].num_used == 0
    run.drain()


def test_a_chunk_is_never_cut_short_where_there_are_windows_and_two_chunks():
    """As many long prompts at once as the pool holds windows; not one stands still."""
    run = harness(4 * 4 + 2 * chunk_pages(16, 4), whole=4 * WHOLE)
    for first in range(4):
        run.submit(prompt(first, 200), 4, scheduling=Scheduling(tenant=f"{first}"))
    for _ in range(4):
        run.step()
    while any(sequence.prefilling for sequence in run.scheduler.running):
        assert len(run.scheduler.running) == 4 and not run.scheduler.waiting
        left = sum(s.prefill_target - s.num_computed_tokens for s in run.scheduler.running)
        run.step()
        assert run.scheduler.records[-1].chunk_tokens == min(16, left)
    run.drain()
    assert run.engine.counters.preemptions == 0


def test_nobody_is_admitted_into_what_prompts_in_progress_will_take():
    run = harness(4 + 12 + 3)
    run.submit(prompt(1, 280), 4)
    run.step()
    others = [Scheduling(tenant="a"), Scheduling(tenant="b")]
    small = run.submit(prompt(2, 8), 4, scheduling=others[0])
    large = run.submit(prompt(3, 200), 4, scheduling=others[1])
    for _ in range(3):
        run.step()
    assert run.outputs[small], "what it will ever take is there besides"
    assert run.scheduler.by_id[large].slot < 0, "a second window and its chunk are not"
    run.drain()
    assert run.engine.counters.preemptions == 0


def test_streams_do_not_grow_into_what_a_prompt_before_them_was_promised():
    """They are less urgent, and many: without a promise they would take every page."""
    run = harness(20, slots=8, prefix_cache=False, watermark=0.0)
    for first in range(5):
        run.submit(prompt(first, 4), 60, scheduling=Scheduling(priority=5))
    for _ in range(3):
        run.step()
    urgent = run.submit(prompt(9, 280), 4)
    steps = 0
    while not run.outputs[urgent]:
        run.step()
        steps += 1
    assert steps <= 280 // 16 + 6, "no step of it was much cut short"
    assert run.engine.counters.preemptions > 0
    run.drain()


def test_a_prompt_without_a_page_takes_it_from_who_is_behind_it_and_from_nobody_else():
    """Somebody else has all free pages, and nothing is on its way."""
    scheduler = Scheduler(
        scheduler_limits(4, 16, 4, (200, 60), (None, 9)), SchedulerPolicy(prefix_cache=False)
    )
    first, second = (
        scheduler.add(Request(name, (1,) * 200, GREEDY, 4, 0, scheduling=Scheduling(tenant=name)))
        for name in "ab"
    )
    for _ in range(4):
        scheduler.retire(scheduler.plan(0.0))
    assert first.prefilling and second.prefilling and second.slot >= 0
    scheduler.pages.trim_advanced()
    allocator = scheduler.pages.caches[1].allocator
    taken = allocator.allocate(allocator.num_available)
    plan = scheduler.plan(0.0)
    assert [piece.sequence for piece in plan.pieces] == [first]
    assert scheduler.preemptions == 1 and second.slot < 0
    scheduler.retire(plan)
    scheduler.pages.trim_advanced()
    taken += allocator.allocate(allocator.num_available)
    assert scheduler.plan(0.0) is None and first.slot >= 0, "nobody is behind it"
    allocator.release(taken[:1])
    plan = scheduler.plan(0.0)
    assert [(p.sequence, p.length) for p in plan.pieces] == [(first, 4)], "a page is four tokens"


@BOTH_LOOPS
def test_who_is_urgent_gets_the_window_of_a_prompt_in_progress(overlap):
    run = harness(4 + 6, overlap)
    low = run.submit(prompt(1, 280), 4, scheduling=Scheduling(priority=5))
    for _ in range(4):
        run.step()
    urgent = run.submit(prompt(2, 40), 4, scheduling=Scheduling(priority=0))
    steps = 0
    while not run.outputs[urgent]:
        run.step()
        steps += 1
    assert steps <= 10 and low not in run.ends
    run.drain()


def test_a_prompt_that_was_passed_by_its_window_is_found_by_its_end():
    """Of a long prompt a window's group has the end alone, and that is enough."""
    run = harness(4 + 12 + 20)
    first = run.submit(prompt(1, 280), 1)
    run.drain()
    again = run.submit(prompt(1, 280), 4)
    run.step()
    found = run.scheduler.by_id[again]
    assert found.cached_tokens == 276
    assert found.pages[1][: 276 // 4 - 2] == [0] * (276 // 4 - 2) and len(found.pages[0]) == 70
    run.drain()
    assert run.outputs[again][:1] == run.outputs[first]


@BOTH_LOOPS
@pytest.mark.parametrize("windows", [(9,), (None, 9)])
def test_of_a_prompt_that_failed_nothing_is_found_not_even_what_was_passed(windows, overlap):
    pages = tuple(WHOLE if window is None else 40 for window in windows)
    run = Harness(scheduler_limits(4, 16, 4, pages, windows), LONG, overlap, SchedulerPolicy())
    failed = run.submit([*prompt(1, 200), POISON], 4)
    run.drain()
    assert run.ends[failed] == FinishReason.ERROR
    assert [allocator.num_cached for allocator in run.scheduler.allocators] == [0] * len(windows)


@BOTH_LOOPS
def test_samples_share_the_window_they_began_with(overlap):
    run = harness(4 + 12 + 12, overlap, slots=6)
    for _ in range(6):
        run.submit(prompt(1, 130), 30, group="g")
    run.drain()
    assert run.scheduler.prefix_hits >= 5 * 128


@BOTH_LOOPS
def test_what_comes_back_from_host_memory_is_the_window_alone(overlap):
    run = harness(40, overlap, whole=WHOLE, host_pages=(WHOLE, 5))
    low = run.submit(prompt(1, 200), 60, scheduling=Scheduling(priority=5))
    for _ in range(30):
        run.step()
    run.submit(prompt(2, 200), 4, scheduling=Scheduling(priority=0))
    while not run.scheduler.by_id[low].host_pages:
        run.step()
    on_host = [page for page in run.scheduler.by_id[low].host_pages[1] if page >= 0]
    assert 3 <= len(on_host) <= 4
    while run.scheduler.by_id[low].slot < 0:
        run.step()
    computed = run.scheduler.by_id[low].num_computed_tokens
    assert computed > 200, "nothing is computed again"
    run.drain()
