"""Owns the device: parameters, KV pool, slot state and compiled programs.

`dispatch` sends a plan's programs to the device without waiting; `collect` waits for their result.
The engine keeps one step in flight, so the device never waits for Python.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinfer.page_transfer import PageTransfer
from jaxinfer.programs import Programs, smallest_shape
from jaxinfer.prompt_logprobs import entry
from jaxinfer.request import SamplingParams, TokenLogprobs
from jaxinfer.sampler import VARIANTS, SampleRows, Variant
from jaxinfer.sampler_outcomes import FREE, HELD, RULED
from jaxinfer.sequence import NO_SLOT, Sequence
from jaxinfer.slot_state import MASK_BATCH, pack_admissions, pack_history, pack_masks
from jaxinfer.step_plan import MAX_PIECES, StepPlan, StepShape, layout, pack, pack_scored


@dataclass(slots=True)
class StepResult:
    """Token and outcome (`sampler_outcomes`) by row: decode rows, then pieces, unpadded."""

    tokens: list[int]
    outcomes: list[int]
    logprobs: np.ndarray | None = None  # int32[rows, 2 + 2 * top], see logprob_columns
    expert_load: np.ndarray | None = None  # int32[layers, experts], see step.forward
    scored: np.ndarray | None = None  # as `logprobs`, of positions that the pieces have scored
    program: str = ""  # which of the forwards it was

    def row_logprobs(self, row: int, top: int) -> TokenLogprobs:
        """What is known of the chosen token, `top` others with it. Needs the full sampler."""
        assert self.logprobs is not None
        return entry(self.logprobs[row], top)


class StepRunner(Protocol):
    """What the engine needs of a device owner; tests give it one that computes by hand."""

    def dispatch(self, plan: StepPlan) -> Any: ...
    def collect(self, handle: Any) -> StepResult: ...


@dataclass(slots=True)
class Dispatched:
    """A step on its way: where its result will be."""

    number: int
    decodes: int
    pieces: int
    shape: StepShape
    variant: Variant
    out: Any  # int32[sample_rows, columns] on the device
    expert_load: Any  # int32[layers, experts] there, of a model with experts
    scored: list[Any]  # blocks int32[SCORED_ROWS, columns] there
    num_scored: int


class Runner:
    """Runs plans on one model replica. Not thread-safe: one engine owns it.

    `transfer` moves pages to host memory and back; without one, plans must not ask for it.
    """

    def __init__(
        self,
        programs: Programs,
        num_slots: int,
        state: tuple[Any, Any, Any, Any, Any],
        transfer: PageTransfer | None = None,
    ):
        self.transfer = transfer
        self.programs = programs
        self.null_slot = num_slots
        self.params, self.pools, self.slots, self.options, self.history = state
        self._levels = np.zeros(num_slots + 1, np.int8)  # by slot, see `sampling_level`
        self._table_widths = tuple(table.shape[1] for table in self.slots.page_tables)
        self._masks: dict[int, np.ndarray] = {}  # by slot: what the device has
        self._process = os.getpid()

    def dispatch(self, plan: StepPlan, shape: StepShape | None = None) -> Dispatched:
        """Send one step to the device, in the cheapest shape that holds it if none is named.

        Raises RuntimeError in a process that was forked since: it would wait for threads for ever.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine was made in process {self._process}, and forking it left behind the "
                "threads that compute; make an engine in each process, and start processes with "
                "multiprocessing's method 'spawn'"
            )
        if plan.page_outs or plan.page_ins:
            assert self.transfer is not None, "pages move, but host memory for them was not planned"
            self.pools = self.transfer.dispatch(self.pools, plan)
        self.admit(plan.admitted, plan.resumed)
        if shape is None:
            shape = smallest_shape(
                tuple(self.programs.forward), len(plan.decodes), plan.chunk_tokens
            )
        packed = pack(plan, shape, self.null_slot)
        self.pools, self.slots, rows, logits, load, hidden = self.programs.forward[shape](
            self.params, self.pools, self.slots, packed
        )
        own = logits
        if plan.rules is not None:
            plan.rules.settle(logits.is_ready)
            logits, rows = self._forbid(plan, shape, logits, rows)
        variant = self._variant(plan, packed[layout(shape)["rows"][0]])
        more = (self.history, own) if variant == "full" else (None, None)
        self.slots, history, out = self.programs.sample[shape.sample_rows, variant](
            logits, rows, self.slots, self.options, *more
        )
        if history is not None:
            self.history = history
        out.copy_to_host_async()
        if load is not None:
            load.copy_to_host_async()
        scored = self._score(plan, shape, hidden)
        sizes = (len(plan.decodes), len(plan.pieces))
        return Dispatched(plan.number, *sizes, shape, variant, out, load, scored, plan.num_scored)

    def _score(self, plan: StepPlan, shape: StepShape, hidden: Any) -> list[Any]:
        """What the model thought of the prompts that want to know, block by block."""
        blocks = []
        for packed in pack_scored(plan):
            block = self.programs.score[shape.chunk](self.params, hidden, packed)
            block.copy_to_host_async()
            blocks.append(block)
        return blocks

    def _forbid(
        self, plan: StepPlan, shape: StepShape, logits: Any, rows: SampleRows
    ) -> tuple[Any, SampleRows]:
        """What is left of logits and rows by the plan's rules, once they are settled."""
        assert plan.rules is not None
        kinds, changed = np.full(shape.sample_rows, FREE, np.int32), list[tuple[int, np.ndarray]]()
        padding = shape.rows - len(plan.decodes)

        def place(row: int) -> int:
            return row if row < len(plan.decodes) else row + padding

        for row, sequence in plan.sampled():
            mask = plan.rules.masks.get(row)
            if mask is None or sequence.slot == NO_SLOT:
                continue  # it may take anything, or ended meanwhile
            kinds[place(row)] = RULED
            if self._masks.get(sequence.slot) is not mask:
                self._masks[sequence.slot] = mask
                changed.append((sequence.slot, mask))
        kinds[[place(row) for row in plan.rules.held]] = HELD
        for batch in itertools.batched(changed, MASK_BATCH):
            packed = pack_masks(list(batch), self.null_slot, self.options.allowed.shape[1])
            self.options = self.programs.put_masks(self.options, packed)
        logits, rows, self.slots = self.programs.forbid[shape.sample_rows](
            logits, rows, self.slots, self.options, kinds
        )
        return logits, rows

    def collect(self, handle: Dispatched) -> StepResult:
        """Wait for a step and read its result."""
        out = np.asarray(handle.out)
        if self.transfer is not None:
            self.transfer.land(handle.number)
        if handle.pieces:
            first = handle.shape.rows
            out = np.concatenate([out[: handle.decodes], out[first : first + handle.pieces]])
        else:
            out = out[: handle.decodes]
        logprobs = out[:, 2:] if handle.variant == "full" else None
        load = None if handle.expert_load is None else np.asarray(handle.expert_load)
        scored = None
        if handle.scored:
            scored = np.concatenate([np.asarray(b) for b in handle.scored])[: handle.num_scored]
        tokens, outcomes = out[:, 0].tolist(), out[:, 1].tolist()
        program = f"{handle.shape.rows}+{handle.shape.chunk}"
        return StepResult(tokens, outcomes, logprobs, load, scored, program)

    def admit(self, admitted: list[Sequence], resumed: list[Sequence]) -> None:
        """Upload options and pages of admitted sequences, and the history penalties need."""
        for batch in itertools.batched(admitted, MAX_PIECES):
            packed = pack_admissions(
                list(batch), resumed, MAX_PIECES, self.null_slot, self._table_widths
            )
            self.slots, self.options = self.programs.admit(self.slots, self.options, packed)
        for sequence in admitted:
            self._levels[sequence.slot] = sampling_level(sequence.request.params)
            if sequence.request.params.penalised:
                for upload in pack_history(sequence):
                    self.history = self.programs.load_history(self.history, upload)

    def _variant(self, plan: StepPlan, rows: np.ndarray) -> Variant:
        """The least member of the sampler's set that covers every row of the plan, whose decodes
        are in the slots `rows`."""
        ends = [piece.sequence.slot for piece in plan.pieces if piece.last]
        return VARIANTS[max(self._levels[rows].max(initial=0), self._levels[ends].max(initial=0))]


def sampling_level(params: SamplingParams) -> int:
    """Index of the sampler member a request needs, see `sampler.VARIANTS`."""
    if params.penalised or params.logit_bias or params.logprobs is not None:
        return 3
    if not params.draws:
        return 0
    return 2 if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else 1
