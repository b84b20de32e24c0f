"""`deterministic`: a request's logprobs have the same bits whatever runs beside it.

Every reduction must take a token's own history in one order. Two ways lead there:

    invariant   every program of the set computes a row with the same bits: whatever the other rows
                hold, wherever it is among them, as one token or as part of a prompt. Then nothing
                else is needed, and deterministic serving costs next to nothing.
    fixed       only rows of one and the same program agree. Then prompts are always computed by one
                program, outputs by another, and the scheduler keeps them apart.

Which one holds depends on the backend's kernels, so it is found out at every start: a random
sequence is computed in all the ways that a request can meet, by the compiled programs themselves,
and its tokens and logprobs are compared bit by bit. It leaves no trace: its slots are done, and
what it wrote lies in pages that are nobody's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.config import Determinism
from jaxinfer.kv_pool import KVGroup, pages_for
from jaxinfer.programs import step_shapes
from jaxinfer.request import MAX_LOGPROBS, Request, SamplingParams
from jaxinfer.runner import Runner, StepResult
from jaxinfer.sequence import Sequence
from jaxinfer.step_plan import Piece, StepPlan, StepShape

logger = logging.getLogger(__name__)

ATTENTION_BLOCK = 64  # keys that attention takes at once in every program
PROMPT, OUTPUTS = 76, 2  # tokens of the probe: more than one attention block
AHEAD = 7  # tokens of another prompt in front of the probe's
_PARAMS = SamplingParams(temperature=1.0, top_p=0.95, logprobs=MAX_LOGPROBS)

Build = Callable[[tuple[StepShape, ...]], None]  # compile these shapes into the runner's programs


class NotDeterministicError(RuntimeError):
    """Even one program computes the same row differently."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two ways to compute the same token disagree, and by how much in logprobs."""

    what: str
    size: float

    def __str__(self) -> str:
        return f"{self.what} differs by {self.size:.1e} in logprobs"


def choose(
    runner: Runner,
    build: Build,
    groups: tuple[KVGroup, ...],
    max_chunk: int,
    max_model_len: int,
    vocab_size: int,
    hidden: bool = False,
) -> Determinism:
    """Find the way that holds here; the runner is left with its programs.

    `hidden`: activations, or keys and values, are rounded to few bits. A last bit that differs
    between two programs then disappears in nearly every token and changes some, so that a probe
    cannot tell that all agree: the way is "fixed".

    Programs in which a difference shows first are compiled first. Raises NotDeterministicError when
    neither way holds.
    """
    started = time.monotonic()
    sizes = (runner.null_slot, max_chunk, groups[0].page_size, len(groups))
    invariant, fixed = step_shapes(*sizes, "invariant"), step_shapes(*sizes, "fixed")
    all_rows = fixed[0]
    least = min((shape for shape in invariant if shape.chunk), key=lambda shape: shape.chunk)
    rest = tuple(shape for shape in invariant if shape not in (all_rows, least))
    probe = Probe(runner, groups, max_model_len, vocab_size)
    difference: Difference | str | None = "rounded numbers would hide a difference"
    if not hidden:
        build((all_rows, least))
        probe.say(least, all_rows)
        difference = probe.compare(invariant_ways(probe, (all_rows, least)))
        if difference is None:
            build(invariant)
            difference = probe.compare(invariant_ways(probe, rest))
    if difference is None:
        probe.leave()
        seconds = time.monotonic() - started
        logger.info(f'deterministic "invariant": every program agrees to the bit, {seconds:.1f} s')
        return "invariant"
    build(fixed)
    runner.programs.keep(fixed)
    probe.say(fixed[1], all_rows)
    still = probe.compare(fixed_ways(probe, *fixed))
    if still is not None:
        raise NotDeterministicError(
            f"deterministic results are not possible here: {still}; serve without"
        )
    probe.leave()
    logger.info(f'deterministic "fixed": {difference}, {time.monotonic() - started:.1f} s')
    return "fixed"


@dataclass(slots=True)
class Probe:
    """A random sequence, what is said of it, and how to compute that in one way or another.

    `said[i]` is what follows `tokens[: prompt_len + i]`: a token and its logprobs, as bits. There
    are two copies of its pages, `here` and `there`, if the pool holds as many. Company works on
    null pages.
    """

    runner: Runner
    groups: tuple[KVGroup, ...]
    max_model_len: int
    vocab_size: int
    tokens: list[int] = field(default_factory=list)
    said: list[np.ndarray] = field(default_factory=list)
    here: list[list[int]] = field(default_factory=list)
    there: list[list[int]] | None = None
    scored: np.ndarray | None = None  # what the last step said of the piece's tokens
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        length = self.prompt_len + self.outputs
        widths = [pages_for(length, group.page_size) for group in self.groups]
        self.here = [list(range(1, width + 1)) for width in widths]
        if all(2 * width < group.num_pages for width, group in zip(widths, self.groups)):
            self.there = [list(range(width + 1, 2 * width + 1)) for width in widths]

    @property
    def nowhere(self) -> list[list[int]]:
        """No pages: their place in the table is the null page."""
        return [[] for _ in self.groups]

    @property
    def prompt_len(self) -> int:
        room = min(group.capacity for group in self.groups)  # of windows it may be less
        return max(1, min(PROMPT, self.max_model_len - OUTPUTS, room - OUTPUTS))

    @property
    def outputs(self) -> int:
        return min(OUTPUTS, self.max_model_len - self.prompt_len)

    def ahead(self, chunk: StepShape) -> int:
        """Tokens of another prompt that there is room for, in the chunk and in the slots."""
        return min(AHEAD, chunk.chunk // 2) if self.runner.null_slot > 1 else 0

    def say(self, chunk: StepShape, decode: StepShape) -> None:
        """Compute the sequence as all other ways are compared with."""
        self.tokens = self._random(self.prompt_len)
        self.said = [self.prefill(chunk, self.here, self.prompt_len)]
        self.tokens.append(int(self.said[0][0]))
        for i in range(self.outputs):
            self.said.append(self.decode(decode, self.here, self.prompt_len + i))
            self.tokens.append(int(self.said[-1][0]))

    def compare(self, ways: Iterator[tuple[str, int, np.ndarray]]) -> Difference | None:
        """The first of the ways that differs from what was said."""
        for what, i, bits in ways:
            if not np.array_equal(self.said[i], bits):
                return _difference(what, self.said[i], bits)
        return None

    def leave(self) -> None:
        """All slots are done, and their page tables name the null page."""
        slots = range(self.runner.null_slot)
        self.runner.admit([_sequence(slot, [0], self.nowhere) for slot in slots], [])

    def decode(
        self, shape: StepShape, pages: list[list[int]], position: int, company: int = 0
    ) -> np.ndarray:
        """What follows `tokens[: position + 1]`, the last token in a row behind its company's."""
        return self.step(shape, pages, position, company=company)[0]

    def prefill(
        self, shape: StepShape, pages: list[list[int]], length: int, ahead: int = 0, start: int = 0
    ) -> np.ndarray:
        """What follows `tokens[:length]`, computed from `start` in pieces as the chunk allows."""
        while True:
            size = min(shape.chunk - ahead, length - start)
            bits = self.step(shape, piece=(pages, start, size), ahead=ahead)[1]
            start += size
            if start == length:
                return bits

    def step(
        self,
        shape: StepShape,
        pages: list[list[int]] | None = None,
        position: int = 0,
        piece: tuple[list[list[int]], int, int] | None = None,
        company: int = 0,
        ahead: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One step: the probe's token at `position`, if `pages` are given, behind rows of company;
        and a piece (pages, start, length) of it behind `ahead` tokens of another prompt.

        Returns what follows either; nothing that matters where it was not asked for.
        """
        slots = iter(range(self.runner.null_slot))
        plan = StepPlan(0)
        if ahead:
            other = _sequence(next(slots), self._random(ahead), self.nowhere)
            plan.pieces.append(Piece(other, 0, ahead, True))
        if piece is not None:
            where, start, length = piece
            it = _sequence(next(slots), self.tokens, where)
            known = min(start + length, len(self.tokens) - 1)  # what follows the others is not
            plan.pieces.append(Piece(it, start, length, True, range(start, known)))
        plan.admitted = [p.sequence for p in plan.pieces]
        if pages is not None:
            own = next(slots)
            company = min(company, shape.rows - 1)
            for slot, _ in zip(slots, range(company)):
                tokens = self._random(int(self._rng.integers(1, self.prompt_len + self.outputs)))
                plan.decodes.append(_sequence(slot, tokens, self.nowhere))
            plan.decodes.append(_sequence(own, self.tokens[: position + 1], pages))
        plan.admitted += plan.decodes
        plan.resumed = plan.decodes
        result = self.runner.collect(self.runner.dispatch(plan, shape))
        self.scored = result.scored
        return _bits(result, len(plan.decodes) - 1), _bits(result, -1)

    def _random(self, count: int) -> list[int]:
        return self._rng.integers(0, self.vocab_size, count).tolist()


def invariant_ways(
    probe: Probe, shapes: tuple[StepShape, ...]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """(how, which of `said`, bits) of the probe in each program: as one row, and as a prompt.

    Keys and values that a program wrote show in what another one says next.
    """
    first = probe.prompt_len
    compiled = [shape for shape in probe.runner.programs.forward if not shape.chunk]
    fewest = min(compiled, key=lambda shape: shape.rows)
    for shape in shapes:
        name = f"{shape.rows} rows and a chunk of {shape.chunk}"
        if not shape.chunk:
            for i in range(probe.outputs):  # in company, and alone
                company = shape.rows if i == 0 else 0
                bits = probe.decode(shape, probe.here, first + i, company)
                yield f"a row of {shape.rows}", 1 + i, bits
            continue
        pages = probe.there or probe.here
        end, ahead = first + probe.outputs - 1, probe.ahead(shape)
        row = (shape, probe.here, first)
        size = min(shape.chunk - ahead, end)
        piece = (pages, 0, size)
        if probe.there is None or probe.runner.null_slot < 3:
            yield f"a row among {name}", 1, probe.step(*row, company=shape.rows)[0]
            _, bits = probe.step(shape, piece=piece, ahead=ahead)
        else:
            decoded, bits = probe.step(*row, piece, company=shape.rows, ahead=ahead)
            yield f"a row among {name}", 1, decoded
            if probe.outputs > 1:
                after = probe.decode(fewest, probe.here, first + 1)
                yield f"what follows a row among {name}", 2, after
        if size < end:
            bits = probe.prefill(shape, pages, end, ahead, start=size)
        yield f"a prompt in {name}", end - first, bits
        if probe.scored is not None:
            of_last = np.concatenate([[probe.tokens[end]], probe.scored[-1]]).astype(np.int32)
            yield f"what is said of a prompt in {name}", end - first, of_last
        yield f"what follows a prompt in {name}", probe.outputs, probe.decode(fewest, pages, end)


def fixed_ways(
    probe: Probe, all_rows: StepShape, chunk: StepShape
) -> Iterator[tuple[str, int, np.ndarray]]:
    """The same for programs that are only compared with themselves."""
    first = probe.prompt_len
    for i in range(probe.outputs):
        company = all_rows.rows if i == 0 else 0
        bits = probe.decode(all_rows, probe.here, first + i, company)
        yield f"a row of {all_rows.rows} in company", 1 + i, bits
    ahead = probe.ahead(chunk)
    if first > 1:
        probe.prefill(chunk, probe.here, first // 2)
    bits = probe.prefill(chunk, probe.here, first, ahead, start=first // 2)
    yield f"a prompt cut in two in a chunk of {chunk.chunk}", 0, bits
    for i in range(probe.outputs):
        yield "what follows it", 1 + i, probe.decode(all_rows, probe.here, first + i)


def _sequence(slot: int, tokens: list[int], pages: list[list[int]]) -> Sequence:
    """A sequence that nothing ends."""
    request = Request("probe", (), _PARAMS, max_new_tokens=1 << 30, seed=5)
    return Sequence(request, tokens=list(tokens), slot=slot, pages=pages)


def _bits(result: StepResult, row: int) -> np.ndarray:
    """Token and logprobs of one row as int32."""
    assert result.logprobs is not None
    return np.concatenate([[result.tokens[row]], result.logprobs[row]]).astype(np.int32)


def _difference(what: str, expected: np.ndarray, found: np.ndarray) -> Difference:
    """How far apart two rows of `_bits` are in the logprobs of the tokens that both name."""
    top = (len(expected) - 3) // 2
    by_token = [
        dict(zip(bits[3 : 3 + top].tolist(), bits[3 + top :].view(np.float32).tolist()))
        for bits in (expected, found)
    ]
    common = by_token[0].keys() & by_token[1].keys()
    return Difference(
        what, max((abs(by_token[0][t] - by_token[1][t]) for t in common), default=np.inf)
    )
