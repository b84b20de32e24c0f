"""Packing a plan: every plan the scheduler can make fits the program chosen for it."""

from __future__ import annotations

import numpy as np
from fakes import GREEDY, scheduler_limits
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.programs import smallest_shape, step_shapes
from jaxinfer.request import Request
from jaxinfer.scheduler import Scheduler
from jaxinfer.step_plan import MAX_PIECES, StepShape, layout, pack


def unpack(packed: np.ndarray, shape: StepShape) -> dict[str, np.ndarray]:
    return {name: packed[at].reshape(dims) for name, (at, dims) in layout(shape).items()}


@given(
    rows=st.integers(1, 70),
    chunk=st.sampled_from([0, 1, 32, 64, 200]),
    page_size=st.sampled_from([4, 16, 64]),
    groups=st.integers(1, 3),
)
def test_layout_covers_the_vector_without_gaps(rows, chunk, page_size, groups):
    shape = StepShape(rows, chunk, page_size, groups)
    end = 0
    for place, dims in layout(shape).values():
        assert place.start == end and place.stop - place.start == int(np.prod(dims))
        end = place.stop
    assert end == shape.packed_size


@given(data=st.data())
def test_every_plan_fits_the_smallest_program_for_it(data):
    """Drawn with the tightest capacities: pages of one token, chunks of many pieces."""
    num_slots = data.draw(st.integers(1, 12))
    chunk = data.draw(st.sampled_from([1, 7, 64, 130]))
    page_size = data.draw(st.sampled_from([1, 2, 16]))
    windows = data.draw(st.sampled_from([(None,), (20,), (None, 3)]))
    pages = tuple(3000 if window is None else 80 for window in windows)
    scheduler = Scheduler(scheduler_limits(num_slots, chunk, page_size, pages, windows))
    shapes = step_shapes(num_slots, chunk, page_size, len(windows))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=20))
    for i, length in enumerate(lengths):
        scheduler.add(Request(f"{i}", (5,) * length, GREEDY, 40, 0))
    for _ in range(30):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        shape = smallest_shape(shapes, len(plan.decodes), plan.chunk_tokens)
        view = unpack(pack(plan, shape, num_slots), shape)
        entries = [
            (group, *entry)
            for group, deltas in enumerate(view["deltas"].tolist())
            for entry in deltas
            if entry[0] != num_slots
        ]
        assert entries == sorted(plan.deltas, key=lambda entry: entry[0])
        rows = view["rows"].tolist()
        assert rows[: len(plan.decodes)] == [s.slot for s in plan.decodes]
        assert set(rows[len(plan.decodes) :]) <= {num_slots}
        if shape.chunk:
            assert (view["slots"] != num_slots).sum() == plan.chunk_tokens
            assert view["tiles"][:, 1].sum() == plan.chunk_tokens
        for _, sequence in plan.sampled():
            sequence.tokens.append(5)


def test_packed_fields_of_a_mixed_step():
    scheduler = Scheduler(scheduler_limits(num_slots=3, chunk=128, page_size=16, pages=(40,)))
    scheduler.add(Request("decoding", (1, 2, 3), GREEDY, 9, 0))
    for _, sequence in scheduler.plan(0.0).sampled():
        sequence.tokens.append(4)
    scheduler.add(Request("ends", tuple(range(10, 90)), GREEDY, 9, 0))
    scheduler.add(Request("splits", tuple(range(100, 200)), GREEDY, 9, 0))
    plan = scheduler.plan(0.0)
    shape = StepShape(8, 128, 16)
    view = unpack(pack(plan, shape, null_slot=3), shape)
    assert view["rows"].tolist() == [0] + [3] * 7
    assert view["tokens"].tolist() == [*range(10, 90), *range(100, 148)]
    assert view["positions"].tolist() == [*range(80), *range(48)]
    assert view["slots"].tolist() == [1] * 80 + [2] * 48
    tiles = [(0, 64, 1, 0), (64, 16, 1, 64), (80, 48, 2, 0)]
    assert [tuple(tile) for tile in view["tiles"].tolist() if tile[1]] == tiles
    null_piece = [3, 0, 0, 0]
    assert view["pieces"].tolist() == [[1, 79, 80, 1], [2, 127, 48, 0]] + [null_piece] * (
        MAX_PIECES - 2
    )
    assert [row for row, _ in plan.sampled()] == [0, 1]


def test_null_padding_maps_the_null_slot_to_the_null_page():
    scheduler = Scheduler(scheduler_limits(num_slots=2, chunk=8))
    scheduler.add(Request("a", (1, 2), GREEDY, 9, 0))
    shape = StepShape(2, 8, 4)
    view = unpack(pack(scheduler.plan(0.0), shape, null_slot=2), shape)
    padding = [entry for entry in view["deltas"][0].tolist() if entry[0] == 2]
    assert padding and all(entry == [2, 0, 0] for entry in padding)
    assert view["slots"].tolist() == [0, 0] + [2] * 6


def test_the_most_page_table_entries_one_step_can_have():
    """One a decode row: the pages of prompts are entered when they are admitted."""
    scheduler = Scheduler(scheduler_limits(num_slots=16, chunk=136, page_size=16, pages=(100,)))
    for i in range(8):
        scheduler.add(Request(f"decoding {i}", (5,) * 16, GREEDY, 9, 0))
    for _, sequence in scheduler.plan(0.0).sampled():
        sequence.tokens.append(5)
    for i in range(8):
        scheduler.add(Request(f"new {i}", (5,) * 17, GREEDY, 9, 0))
    plan = scheduler.plan(0.0)
    assert (len(plan.decodes), len(plan.pieces), len(plan.deltas)) == (8, 8, 8)
    shape = StepShape(8, 136, 16)
    view = unpack(pack(plan, shape, null_slot=16), shape)
    entries = [(0, *entry) for entry in view["deltas"][0].tolist() if entry[0] != 16]
    assert entries == plan.deltas
