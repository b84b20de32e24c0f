"""The check at start is honest: whatever differs is found, and what is found decides.

Programs are stood in for by a runner that computes by hand, so that any of them can be at fault.
"""

from __future__ import annotations

import logging
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import MAX_MODEL_LEN, TINY, VOCAB

from jaxinfer.determinism import NotDeterministicError, Probe, choose, fixed_ways, invariant_ways
from jaxinfer.kv_pool import kv_groups
from jaxinfer.programs import FEWEST_ROWS, Programs, fixed_chunk, smallest_shape, step_shapes
from jaxinfer.runner import StepResult

SIZES = (8, 128, 16, 1)
INVARIANT, FIXED_SHAPES = step_shapes(*SIZES, "invariant"), step_shapes(*SIZES, "fixed")
ALL_ROWS, LEAST = INVARIANT[0], INVARIANT[-1]


class StandIn:
    """A runner whose programs say a number made of the tokens that a row's pages hold.

    `faulty(shape, kind, sequence, place)` are the rows for which a program "says" or "writes"
    something slightly else; `place` is a decode row, or for a prompt minus (1 + its piece).
    """

    def __init__(self, slots: int, page_size: int = 16, faulty=lambda *row: False):
        self.null_slot, self.programs = slots, Programs()
        self.page_size, self.faulty, self.seen = page_size, faulty, set()
        self.pool: dict[tuple[int, int], int] = {}

    def admit(self, admitted, resumed):
        slots = [sequence.slot for sequence in admitted]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(self.null_slot))

    def dispatch(self, plan, shape):
        assert shape in self.programs.forward
        assert len(plan.decodes) <= shape.rows and 0 <= plan.chunk_tokens <= shape.chunk
        assert plan.decodes or plan.pieces
        self.seen.add(shape)
        self.admit(plan.admitted, plan.resumed)
        rows = [(s, len(s.tokens) - 1, len(s.tokens), i) for i, s in enumerate(plan.decodes)]
        rows += [
            (p.sequence, p.start, p.start + p.length, -1 - i) for i, p in enumerate(plan.pieces)
        ]
        for sequence, start, end, place in rows:
            wrong = self.faulty(shape, "writes", sequence, place)
            for i in range(start, end):
                self.pool[self._where(sequence, i)] = sequence.tokens[i] + wrong
        return [self._say(shape, *row) for row in rows]

    def _where(self, sequence, position):
        index, offset = divmod(position, self.page_size)
        (pages,) = sequence.pages
        return (pages[index] if index < len(pages) else 0, offset)

    def _say(self, shape, sequence, start, end, place):
        context = [self.pool.get(self._where(sequence, i)) for i in range(end)]
        bits = np.zeros(42, np.int32)
        value = np.float32(zlib.crc32(repr(context).encode()) % 10**6) / 10**6
        value = value * np.float32(1.00001 if self.faulty(shape, "says", sequence, place) else 1)
        bits[2:22], bits[22:] = np.arange(20), value.view(np.int32)
        return bits

    def collect(self, rows):
        return StepResult([int(bits[22]) % VOCAB for bits in rows], [0] * len(rows), np.stack(rows))


def probe_over(runner: StandIn, pages: int = 60, longest: int = MAX_MODEL_LEN) -> Probe:
    return Probe(runner, kv_groups(TINY, pages, runner.page_size, "float32"), longest, VOCAB)


def first_difference(faulty, pages: int = 60):
    """What the check finds when all programs are compiled."""
    runner = StandIn(8, faulty=faulty)
    runner.programs.forward = dict.fromkeys(INVARIANT)
    probe = probe_over(runner, pages)
    probe.say(LEAST, ALL_ROWS)
    return probe.compare(invariant_ways(probe, INVARIANT))


@pytest.mark.parametrize("pages", [60, 9], ids=["two copies", "one copy"])
@pytest.mark.parametrize("kind", ["says", "writes"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "prompts"])
@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_a_program_that_differs_is_found_and_named(shape, rows, kind, pages):
    if not rows and not shape.chunk:
        return  # has no prompts
    found = first_difference(
        lambda where, what, _, place: where == shape and what == kind and (place >= 0) == rows,
        pages,
    )
    assert found is not None and found.size > 0
    if shape not in (ALL_ROWS, LEAST):
        assert f"{shape.rows} rows and a chunk of {shape.chunk}" in str(found)


@pytest.mark.parametrize(
    "faulty",
    {
        "rows in company": lambda where, what, _, place: place == where.rows - 1,
        "behind a prompt": lambda where, what, _, place: place == -2,
        "another slot": lambda where, what, sequence, _: sequence.slot != 0,
        "the end of a cut prompt": lambda where, what, _, place: place < 0 and where.chunk == 64,
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("kind", ["says", "writes"])
def test_differences_within_a_program_are_found(faulty, kind):
    """Whatever the programs have in common, so no other program gives them away."""
    check = faulty[1]
    assert first_difference(lambda *row: row[1] == kind and check(*row)) is not None


def test_programs_that_agree_are_found_to_agree():
    assert first_difference(lambda *row: False) is None


def choose_with(faulty):
    """What `choose` takes, its runner, and the shapes it had compiled, in order."""
    runner, asked = StandIn(8, faulty=faulty), []

    def build(shapes):
        asked.append(shapes)
        runner.programs.forward |= dict.fromkeys(shapes)

    groups = kv_groups(TINY, 60, 16, "float32")
    return choose(runner, build, groups, 128, MAX_MODEL_LEN, VOCAB), runner, asked


def test_programs_that_agree_need_nothing_else(caplog):
    with caplog.at_level(logging.INFO):
        way, runner, asked = choose_with(lambda *row: False)
    assert way == "invariant" and set(runner.programs.forward) == set(INVARIANT) == runner.seen
    assert asked == [(ALL_ROWS, LEAST), INVARIANT], "what differs first is compiled first"
    assert 'deterministic "invariant": every program agrees to the bit' in caplog.text


def test_programs_that_differ_are_kept_apart(caplog):
    with caplog.at_level(logging.INFO):
        way, runner, asked = choose_with(lambda where, *row: where == LEAST and row[2] >= 0)
    assert way == "fixed" and tuple(runner.programs.forward) == FIXED_SHAPES
    assert asked == [(ALL_ROWS, LEAST), FIXED_SHAPES], "the other way's are not all compiled"
    assert 'deterministic "fixed": a row among 8 rows and a chunk of 64 differs by' in caplog.text


@pytest.mark.parametrize(
    ("faulty", "what"),
    [
        (lambda where, what, _, place: place == 7, "a row of 8"),
        (lambda where, what, _, place: place == -2, "a prompt cut in two"),
    ],
    ids=["company", "behind a prompt"],
)
def test_where_a_program_differs_from_itself_nothing_is_promised(faulty, what):
    with pytest.raises(NotDeterministicError, match=rf"{what}.* differs by .*; serve without"):
        choose_with(faulty)


@pytest.mark.parametrize(
    ("slots", "chunk", "longest", "page_size", "pages"),
    [(1, 1, 2, 1, 3), (1, 64, 128, 16, 9), (2, 5, 40, 16, 4), (3, 1000, 128, 128, 2)],
)
@pytest.mark.parametrize("way", ["invariant", "fixed"])
def test_the_smallest_engines_can_be_checked(slots, chunk, longest, page_size, pages, way):
    """One slot, chunks of one token, a pool of one sequence: no program is left out."""
    runner = StandIn(slots, page_size)
    shapes = step_shapes(slots, chunk, page_size, 1, way)
    runner.programs.forward = dict.fromkeys(shapes)
    probe = probe_over(runner, pages, longest)
    probe.say(shapes[-1], shapes[0])
    runner.seen.clear()
    ways = invariant_ways(probe, shapes) if way == "invariant" else fixed_ways(probe, *shapes)
    assert probe.compare(ways) is None
    assert runner.seen == set(shapes)
    assert all(0 <= offset < page_size and page < pages for page, offset in runner.pool)
    probe.leave()


@given(slots=st.integers(1, 300), chunk=st.integers(1, 3000), data=st.data())
def test_every_step_has_a_program_and_none_has_few_rows(slots, chunk, data):
    shapes = step_shapes(slots, chunk, 16, 1, "invariant")
    assert len(set(shapes)) == len(shapes)
    assert all(shape.rows >= FEWEST_ROWS for shape in shapes)
    rows = data.draw(st.integers(0, slots))
    tokens = data.draw(st.integers(0 if rows else 1, chunk))
    smallest_shape(shapes, rows, tokens)
    decode, prefill = step_shapes(slots, chunk, 16, 1, "fixed")
    assert decode in shapes and (prefill.rows, prefill.chunk) == (0, fixed_chunk(chunk))
    assert min(chunk, 128) <= prefill.chunk <= chunk
