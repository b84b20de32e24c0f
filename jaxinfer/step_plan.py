"""What the scheduler decided for one step, and how it is packed for the device.

`StepShape` names a program: decode rows, prefill chunk and their derived sizes. `pack` writes a
`StepPlan` into one int32 vector by that shape's layout; the step unpacks it by the same layout.
Host only: plain Python over NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.sequence import Sequence

MAX_PIECES = 8  # sequences whose prompts one chunk may serve
SCORED_ROWS = 64  # positions of prompts whose logits are made at a time
TILE_ROWS = 64  # query tokens of one prefill tile; asserted equal to the kernel's


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one sequence's prompt in a chunk. `last`: the prompt ends here, so sample.

    `scored`: positions in it of which it is to be known how likely the token after them was.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool
    scored: range = range(0)


@dataclass(slots=True)
class RowRules:
    """What rows may take, by their index in `StepPlan.sampled`.

    `settle`, called once when the device computes the step's logits with what says whether it is
    done with them, fills `masks` (uint32[words] a row) and `held`: rows whose mask is not known by
    then, which sit the step out.
    """

    settle: Callable[[Callable[[], bool]], None]
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)


@dataclass(slots=True)
class StepPlan:
    """One step's work. `deltas` are new page-table entries: (group, slot, index, page).

    Before the step is computed, pages move: first `page_outs`, (group, page, host page), of
    sequences that lose their pages, then `page_ins`, (group, page, host page), of those that get
    theirs back. A sequence that is `resumed` has all its keys and values so: its slot goes on
    decoding from its last token, at position `num_computed_tokens` as it was before this step.
    """

    number: int
    expected: float = 0.0  # seconds it is expected to take
    running: int = 0  # sequences that have a slot meanwhile
    decodes: list[Sequence] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)  # these are among `admitted`
    page_outs: list[tuple[int, int, int]] = field(default_factory=list)
    page_ins: list[tuple[int, int, int]] = field(default_factory=list)
    deltas: list[tuple[int, int, int, int]] = field(default_factory=list)
    rules: RowRules | None = None  # of rows that may not take every token

    @property
    def num_scored(self) -> int:
        """Positions of prompts that are scored."""
        return sum(len(piece.scored) for piece in self.pieces)

    @property
    def chunk_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def sampled(self) -> list[tuple[int, Sequence]]:
        """(index, sequence) of every row that yields a token: decode rows, then last pieces.

        The index counts decode rows first and pieces after them, without padding.
        """
        rows = list(enumerate(self.decodes))
        first = len(self.decodes)
        rows += [(first + i, p.sequence) for i, p in enumerate(self.pieces) if p.last]
        if self.rules is not None and self.rules.held:
            rows = [row for row in rows if row[0] not in self.rules.held]
        return rows


@dataclass(frozen=True, slots=True)
class StepShape:
    """A program of the step: `rows` decode rows and a prefill chunk of `chunk` tokens (0: none)."""

    rows: int
    chunk: int
    page_size: int
    num_groups: int = 1

    @property
    def pieces(self) -> int:
        return MAX_PIECES if self.chunk else 0

    @property
    def tiles(self) -> int:
        """Prefill tiles that a chunk in `pieces` pieces can need."""
        return self.chunk // TILE_ROWS + self.pieces if self.chunk else 0

    @property
    def sample_rows(self) -> int:
        return self.rows + self.pieces

    @property
    def deltas(self) -> int:
        """Page-table entries a step can add by group: one a row. Admission enters all others."""
        return self.rows

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every int32 input, in packing order."""
        fields: dict[str, tuple[int, ...]] = {
            "rows": (self.rows,),
            "deltas": (self.num_groups, self.deltas, 3),
        }
        if self.chunk:
            fields |= {
                "tokens": (self.chunk,),
                "positions": (self.chunk,),
                "slots": (self.chunk,),
                "tiles": (self.tiles, 4),
                # slot, row of its last token in the chunk, tokens computed after it, last
                "pieces": (self.pieces, 4),
            }
        return fields

    @property
    def packed_size(self) -> int:
        return sum(math.prod(shape) for shape in self.fields().values())


@functools.cache
def layout(shape: StepShape) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """Where each field lies in the packed vector."""
    places, offset = {}, 0
    for name, dims in shape.fields().items():
        size = math.prod(dims)
        places[name] = (slice(offset, offset + size), dims)
        offset += size
    return places


def pack(plan: StepPlan, shape: StepShape, null_slot: int) -> np.ndarray:
    """The plan as int32[shape.packed_size]. Padding works on `null_slot`, whose pages are null."""
    packed = np.zeros(shape.packed_size, np.int32)
    view = {name: packed[place].reshape(dims) for name, (place, dims) in layout(shape).items()}
    view["rows"][:] = null_slot
    view["rows"][: len(plan.decodes)] = [sequence.slot for sequence in plan.decodes]
    view["deltas"][:, :, 0] = null_slot
    used = [0] * shape.num_groups
    for group, slot, index, page in plan.deltas:
        view["deltas"][group, used[group]] = slot, index, page
        used[group] += 1
    if shape.chunk:
        _pack_chunk(plan.pieces, view, null_slot)
    return packed


def pack_scored(plan: StepPlan) -> list[np.ndarray]:
    """Blocks int32[2, SCORED_ROWS] of the positions that are scored, in the order of the pieces:
    rows of the chunk, and the tokens that follow them. Padding looks at row 0.
    """
    rows: list[np.ndarray] = []
    following: list[np.ndarray] = []
    first = 0  # row of the chunk
    for piece in plan.pieces:
        if scored := piece.scored:
            rows.append(np.arange(scored.start, scored.stop, dtype=np.int32) - piece.start + first)
            after = piece.sequence.tokens[scored.start + 1 : scored.stop + 1]
            following.append(np.asarray(after, np.int32))
        first += piece.length
    if not rows:
        return []
    both = np.stack([np.concatenate(rows), np.concatenate(following)])
    both = np.pad(both, ((0, 0), (0, -both.shape[1] % SCORED_ROWS)))
    return np.split(both, both.shape[1] // SCORED_ROWS, axis=1)


def _pack_chunk(pieces: list[Piece], view: dict[str, np.ndarray], null_slot: int) -> None:
    view["slots"][:] = null_slot
    view["pieces"][:, 0] = null_slot
    row = tile = 0
    for i, piece in enumerate(pieces):
        sequence, end = piece.sequence, piece.start + piece.length
        chunk = slice(row, row + piece.length)
        view["tokens"][chunk] = sequence.tokens[piece.start : end]
        view["positions"][chunk] = np.arange(piece.start, end)
        view["slots"][chunk] = sequence.slot
        view["pieces"][i] = sequence.slot, row + piece.length - 1, end, piece.last
        for first in range(0, piece.length, TILE_ROWS):
            rows = min(TILE_ROWS, piece.length - first)
            view["tiles"][tile] = row + first, rows, sequence.slot, piece.start + first
            tile += 1
        row += piece.length
