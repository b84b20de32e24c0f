"""What an engine's own programs say about given texts, position by position.

A text is computed as one that is being generated: its first tokens as a prompt, the rest row by row
beside the other texts, each step told what the text's next token really is. So quantised weights,
pages and whatever else the engine does take part. The engine must be idle; it keeps nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from jaxinfer.engine import Engine
from jaxinfer.kv_pool import pages_for
from jaxinfer.policy import SchedulerLimits
from jaxinfer.programs import smallest_shape
from jaxinfer.request import Request, SamplingParams
from jaxinfer.runner import Runner
from jaxinfer.sequence import Sequence as Running
from jaxinfer.step_plan import MAX_PIECES, Piece, StepPlan, pack
from jaxinfer.window_pages import most_kept

Pages = list[list[int]]  # of one text, by KV group
PROMPT = 8  # tokens that are computed as a prompt, of a text that has as many
_PARAMS = SamplingParams(temperature=0)


def distributions(
    engine: Engine, texts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, Float[np.ndarray, " V"]]]:
    """(which text, position, float32 logits of what follows it) from the prompt's last token to the
    last but one of every text, in the order they are computed.

    Raises ValueError for a text that is too short, or longer than the engine takes.
    """
    runner = engine.runner
    assert isinstance(runner, Runner) and not engine.has_work
    most = min(engine.limits.max_model_len, engine.limits.kv_tokens)
    for i, text in enumerate(texts):
        if not 2 <= len(text) <= most:
            raise ValueError(f"text {i + 1} has {len(text)} tokens; 2 to {most} can be evaluated")
    limits, start = engine.scheduler.limits, 0
    while start < len(texts):
        batch: list[tuple[int, Pages]] = []
        taken = [1 for _ in limits.num_pages]
        for i in range(start, min(len(texts), start + MAX_PIECES, start + runner.null_slot)):
            own = [_pages_held(len(texts[i]), limits, group) for group in range(len(taken))]
            ends = [first + count for first, count in zip(taken, own)]
            if any(end > count for end, count in zip(ends, limits.num_pages)):
                break
            whole = range(pages_for(len(texts[i]), limits.page_size))
            pages = [[first + n % count for n in whole] for first, count in zip(taken, own)]
            batch.append((i, pages))
            taken = ends
        yield from _of_batch(runner, texts, batch)
        start += len(batch)


def _pages_held(length: int, limits: SchedulerLimits, group: int) -> int:
    """Pages that a text needs at once: where layers see a window, it takes them in turns."""
    whole = pages_for(length, limits.page_size)
    window = limits.windows[group] if limits.windows else None
    if window is None:
        return whole
    return min(whole, most_kept(window, limits.page_size) + pages_for(PROMPT, limits.page_size))


def _of_batch(
    runner: Runner, texts: Sequence[Sequence[int]], batch: list[tuple[int, Pages]]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Of texts side by side, each with a slot and pages of its own."""
    longest = max(shape.chunk for shape in runner.programs.forward) // MAX_PIECES
    lengths = {i: min(PROMPT, longest, len(texts[i]) - 1) for i, _ in batch}

    def running(slot: int, tokens: Sequence[int], pages: Pages) -> Running:
        request = Request("evaluated", (), _PARAMS, max_new_tokens=1 << 30, seed=0)
        return Running(request, tokens=list(tokens), slot=slot, pages=pages)

    plan = StepPlan(0)
    for slot, (i, pages) in enumerate(batch):
        sequence = running(slot, texts[i][: lengths[i]], pages)
        plan.pieces.append(Piece(sequence, 0, lengths[i], True))
    plan.admitted = [piece.sequence for piece in plan.pieces]
    for (i, _), row in zip(batch, _logits(runner, plan)):
        yield i, lengths[i] - 1, row
    step = 0
    while True:
        plan, rows = StepPlan(1 + step), []
        for slot, (i, pages) in enumerate(batch):
            position = lengths[i] + step
            if position < len(texts[i]) - 1:
                plan.decodes.append(running(slot, texts[i][: position + 1], pages))
                rows.append((i, position))
        if not rows:
            break
        plan.admitted = plan.resumed = plan.decodes
        for (i, position), row in zip(rows, _logits(runner, plan)):
            yield i, position, row
        step += 1
    none: Pages = [[] for _ in runner.slots.page_tables]
    runner.admit([running(slot, [0], none) for slot, _ in enumerate(batch)], [])  # all are done


def _logits(runner: Runner, plan: StepPlan) -> Float[np.ndarray, "rows V"]:
    """The step's logits, which the engine itself would sample from: decode rows, then pieces."""
    runner.admit(plan.admitted, plan.resumed)
    shapes = tuple(runner.programs.forward)
    shape = smallest_shape(shapes, len(plan.decodes), plan.chunk_tokens)
    packed = pack(plan, shape, runner.null_slot)
    runner.pools, runner.slots, _, logits, _, _ = runner.programs.forward[shape](
        runner.params, runner.pools, runner.slots, packed
    )
    rows = np.asarray(logits)
    decodes, pieces = rows[: len(plan.decodes)], rows[shape.rows :][: len(plan.pieces)]
    return np.concatenate([decodes, pieces])
