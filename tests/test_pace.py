"""What is learned from step times, and what it is good for. Numbers by hand."""

from __future__ import annotations

import pytest

from jaxinfer.pace import LEARNING, SMALLEST_CHUNK, STARVED_STEPS, SURE_STEPS, Pace


def learned(target: float | None = None, chunk: int = 512) -> Pace:
    """Decoding 8 rows takes 20 ms, a prompt token 0.5 ms."""
    pace = Pace(chunk, target)
    for chunk in (0, 128):
        seconds = 0.020 + chunk * 0.0005
        pace.observe(8, chunk, 0, seconds, expected=seconds)
    return pace


def test_a_bound_that_decoding_alone_breaks_is_said_once(caplog):
    pace = learned(0.015)
    for _ in range(4 * SURE_STEPS):
        pace.observe(8, 0, 0, 0.020)
    (record,) = caplog.records
    for part in ("takes 20.0 ms with 8 streams", "bound of 15.0 ms", "--tpot-target-ms"):
        assert part in record.getMessage()
    caplog.clear()
    kept = learned(0.025)
    for step in range(4 * SURE_STEPS):
        kept.observe(8, 0, 0, 0.030 if step % 8 == 0 else 0.020)
    assert not caplog.records, "a slow step now and then is none"


def test_without_a_bound_the_chunk_is_the_largest():
    assert learned(None).chunk_budget(8) == 512
    assert learned(0.05).chunk_budget(0) == 512, "nobody decodes: nobody waits"


@pytest.mark.parametrize(
    ("target", "budget"), [(1.0, 512), (0.2, 256), (0.12, 128), (0.055, 64), (0.03, 0)]
)
def test_the_largest_chunk_that_fits_the_bound(target, budget):
    assert learned(target).chunk_budget(8) == budget


def test_before_anything_is_known_the_smallest_chunk_shows_what_it_takes():
    assert Pace(512, 0.05).chunk_budget(8) == SMALLEST_CHUNK
    assert Pace(48, 0.05).chunk_budget(8) == 48


def test_what_steps_leave_of_the_bound_can_be_spent_once():
    pace = learned(0.055)
    for _ in range(20):
        pace.observe(8, 0, 0, 0.020, pace.expect(8, 0, 8))
    assert pace.chunk_budget(8) == 128, "bound, and as much of it again"
    pace.expect(8, 128, 8)
    assert pace.chunk_budget(8) == 64, "spent, though the step was not read yet"


def test_a_bound_that_decoding_breaks_still_lets_prompts_through():
    pace = learned(0.010)
    budgets = []
    for _ in range(3 * (STARVED_STEPS + 1)):
        budgets.append(pace.chunk_budget(8))
        pace.note_chunk(True, budgets[-1])
    assert budgets == ([0] * STARVED_STEPS + [SMALLEST_CHUNK]) * 3
    for _ in range(100):
        pace.note_chunk(False, 0)
    assert pace.chunk_budget(8) == 0, "nobody starves where nobody waits"


def test_step_times_are_kept_by_rows_and_follow_change():
    pace = learned()
    pace.observe(32, 0, 0, 0.060)
    assert pace.expect(8, 0, 8) == pytest.approx(0.020)
    assert pace.expect(20, 0, 20) == pytest.approx(0.060)
    assert pace.expect(8, 100, 8) == pytest.approx(0.020 + 128 * 0.0005), "computed as 128"
    pace.observe(32, 0, 0, 0.160)
    assert pace.expect(32, 0, 32) == pytest.approx(0.060 + LEARNING * 0.1)


def test_the_first_token_is_expected_after_what_is_ahead():
    pace = Pace(512, None)
    assert pace.first_token_in(10**6, 50, 8) == 0.0, "nothing is known"
    pace = learned()
    assert pace.first_token_in(1000) == pytest.approx(0.5)
    in_steps = 0.5 + 1000 / 512 * 0.020
    assert pace.first_token_in(1000, 3, 8) == pytest.approx(in_steps), "of ends nothing is known"
    for _ in range(5000):
        pace.observe(8, 0, 0, 0.020)
        pace.observe(8, 0, 1, 0.020)  # 25 ends a second
    assert pace.first_token_in(0, 50, 8) == pytest.approx(2.0 + 0.020, rel=0.02)


def test_a_second_of_ends_says_how_fast_they_come():
    pace = Pace(512, None)
    for _ in range(20):
        pace.observe(8, 0, 1, 0.05)
    assert pace.first_token_in(0, 3, 8) == pytest.approx(3 * 0.05)
    pace.observe(8, 0, 4, 0.2)
    assert pace.first_token_in(0, 3, 8) == pytest.approx(3 * 0.05), "four in four times as long"


def test_ends_that_do_not_come_are_expected_as_late_as_they_are():
    pace = Pace(512, None)
    for _ in range(20):
        pace.observe(8, 0, 1, 0.05)
    for _ in range(2000):
        pace.observe(8, 0, 0, 0.05)
    assert pace.first_token_in(0, 1, 8) == pytest.approx(100.0), "not in hours"


def test_sequences_that_began_together_are_expected_to_end_together():
    """Eight every three seconds: what they leave unsaid in between is not said of each."""
    pace = Pace(512, None)
    for _ in range(20):
        for _ in range(59):
            pace.observe(8, 0, 0, 0.05)
        pace.observe(8, 0, 8, 0.05)
    for _ in range(50):
        pace.observe(8, 0, 0, 0.05)
    assert pace.first_token_in(0, 0.5, 8) == pytest.approx(0.5 * 2.5)
    assert pace.first_token_in(0, 8, 8) == pytest.approx(7 * 3.0 / 8 + 2.5)


def test_one_that_ran_alone_tells_how_soon_many_end():
    """Each takes 5 s: of 32 that run, one ends every 5/32 s, not every 5 s."""
    pace = Pace(512, None)
    for _ in range(20):
        for step in range(100):
            pace.observe(1, 0, int(step == 99), 0.05)
    assert pace.first_token_in(0, 64, 32) == pytest.approx(2 * 5.0)
    assert pace.first_token_in(0, 1, 1) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "target, seconds",
    [(None, 0.2 + 0.020), (0.030, 0.2 + 400 / 20 * 0.020), (0.001, 0.2 + 400 * 9 / 64 * 0.020)],
    ids=["no bound", "20 tokens a step", "the smallest chunk every ninth step"],
)
def test_beside_streams_a_prompt_takes_as_many_steps_as_the_bound_makes_it_take(target, seconds):
    pace = learned(target)
    assert pace.first_token_in(400, running=8) == pytest.approx(seconds)
    assert pace.first_token_in(400) == pytest.approx(0.2), "nobody runs"


def test_a_clock_that_stands_still_teaches_nothing():
    pace = learned(0.05)
    before = pace.chunk_budget(8)
    pace.observe(8, 64, 3, 0.0)
    assert pace.chunk_budget(8) == before


def test_steps_of_prompts_only_take_from_the_streams_that_wait():
    """One chunk size, 90 ms; decode steps of 20 ms; a bound of 60 ms: a chunk now and then."""
    pace = Pace(200, 0.060, one_size=True)
    pace.observe(8, 0, 0, 0.020, 0.020)
    pace.observe(0, 200, 0, 0.090, 0.090)
    steps, elapsed = 0, 0.0
    for _ in range(60):
        budget = pace.chunk_budget(8)
        if budget:
            pace.observe(0, 200, 0, 0.090, pace.expect(0, 200, 8))
            elapsed += 0.090
        pace.observe(8, 0, 0, 0.020, pace.expect(8, 0, 8))
        steps, elapsed = steps + 1, elapsed + 0.020
        pace.note_chunk(True, budget)
    assert 0.045 <= elapsed / steps <= 0.060, "within the bound, and most of it used"
