"""What the device remembers of every slot between steps: pure pytrees, donated through the step.

Arrays have one row more than there are slots: the last row is the null slot, which padding works
on. It is always done, and its pages are null pages.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxinfer.request import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxinfer.sequence import Sequence

HISTORY_CHUNK = 512  # tokens of penalty history one upload carries
MASK_BATCH = 8  # slots whose mask one upload carries
NO_TOKEN = -1
MAX_COUNT = 2**15 - 1  # occurrences of a token that a penalty can count


class Slots(NamedTuple):
    """Decode progress. `done` rows compute nothing: idle, prefilling, or stopped."""

    token: Int[Array, " N"]  # the last token, input of the next decode step
    position: Int[Array, " N"]  # where it goes: tokens already in the pool
    done: Bool[Array, " N"]
    page_tables: tuple[Int[Array, "N W"], ...]  # by KV group


class Options(NamedTuple):
    """Sampling options of each slot, written when a sequence is admitted."""

    numbers: Int[Array, "N 10"]  # columns below; floats as their bits
    stop_ids: Int[Array, "N stops"]
    bias_ids: Int[Array, "N biases"]
    bias_values: Float[Array, "N biases"]
    allowed: UInt32[Array, "N words"]  # a bit a token: what a slot with rules may take next

    def number(self, name: str, rows: Int[Array, " R"]) -> Array:
        """One column at `rows`, floats as float32."""
        column = self.numbers[rows, COLUMNS[name]]
        return column if name in INTEGERS else lax.bitcast_convert_type(column, jnp.float32)


class History(NamedTuple):
    """Tokens seen by each slot, kept only for requests with penalties."""

    output_counts: Int[Array, "N V"]  # int16: times generated, at most MAX_COUNT
    in_prompt: Bool[Array, "N V"]


INTEGERS = ("top_k", "seed_low", "seed_high", "limit")
COLUMNS = {
    name: i
    for i, name in enumerate(
        (
            *INTEGERS,
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    )
}


def empty_slots(num_slots: int, table_widths: tuple[int, ...]) -> Slots:
    """All slots done, all pages null."""
    rows = num_slots + 1
    return Slots(
        token=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros(rows, jnp.int32),
        done=jnp.ones(rows, bool),
        page_tables=tuple(jnp.zeros((rows, width), jnp.int32) for width in table_widths),
    )


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit a token."""
    return -(-vocab_size // 32)


def empty_options(num_slots: int, vocab_size: int) -> Options:
    rows = num_slots + 1
    return Options(
        numbers=jnp.zeros((rows, len(COLUMNS)), jnp.int32),
        stop_ids=jnp.full((rows, MAX_STOP_IDS), NO_TOKEN, jnp.int32),
        bias_ids=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        allowed=jnp.zeros((rows, mask_words(vocab_size)), jnp.uint32),
    )


def empty_history(num_slots: int, vocab_size: int) -> History:
    shape = (num_slots + 1, vocab_size)
    return History(jnp.zeros(shape, jnp.int16), jnp.zeros(shape, bool))


START = 4  # slot, token, position, whether it decodes at once
_PARTS = (START, len(COLUMNS), MAX_STOP_IDS, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def admission_size(table_widths: tuple[int, ...]) -> int:
    """Integers that describe one admitted sequence to the device."""
    return sum(_PARTS) + sum(table_widths)


def pack_admissions(
    admitted: list[Sequence],
    resumed: list[Sequence],
    rows: int,
    null_slot: int,
    table_widths: tuple[int, ...],
) -> np.ndarray:
    """Admitted sequences as int32[rows, admission_size]: start, options, pages of each group.

    Resumed ones among them decode on from their last token; the others are prefilled first.
    """
    packed = np.zeros((rows, admission_size(table_widths)), np.int32)
    packed[:, 0] = null_slot
    start, numbers, stops, bias_ids, bias_values, *tables = np.split(
        packed, np.cumsum((*_PARTS, *table_widths))[:-1], axis=1
    )
    stops[:] = NO_TOKEN
    for i, sequence in enumerate(admitted):
        start[i] = sequence.slot, sequence.tokens[-1], len(sequence.tokens) - 1, sequence in resumed
        _pack_options(sequence, numbers[i], stops[i], bias_ids[i], bias_values[i])
        for table, pages in zip(tables, sequence.pages):
            table[i, : len(pages)] = pages
    return packed


def _pack_options(
    sequence: Sequence,
    numbers: np.ndarray,
    stops: np.ndarray,
    bias_ids: np.ndarray,
    bias_values: np.ndarray,
) -> None:
    request, params = sequence.request, sequence.request.params
    numbers[COLUMNS["top_k"]] = max(params.top_k, 0)
    low = COLUMNS["seed_low"]
    numbers[low : low + 2] = np.array([request.seed], np.int64).view(np.int32)
    numbers[COLUMNS["limit"]] = len(request.prompt) + request.max_new_tokens
    for name in COLUMNS.keys() - INTEGERS:
        numbers[COLUMNS[name]] = np.float32(getattr(params, name)).view(np.int32)
    stops[: len(request.stop_ids)] = request.stop_ids
    for i, (token, value) in enumerate(params.logit_bias):
        bias_ids[i] = token
        bias_values[i] = np.float32(value).view(np.int32)


def admit(slots: Slots, options: Options, packed: Int[Array, "A size"]) -> tuple[Slots, Options]:
    """Write the options and pages of admitted sequences; only resumed ones decode at once."""
    widths = [table.shape[1] for table in slots.page_tables]
    parts = jnp.split(packed, np.cumsum([*_PARTS, *widths])[:-1].tolist(), axis=1)
    start, numbers, stops, bias_ids, bias_values, *tables = parts
    rows = start[:, 0]

    def put(old: Array, new: Array) -> Array:
        return old.at[rows].set(new, mode="promise_in_bounds")

    values = lax.bitcast_convert_type(bias_values, jnp.float32)
    slots = Slots(
        token=put(slots.token, start[:, 1]),
        position=put(slots.position, start[:, 2]),
        done=put(slots.done, start[:, 3] == 0),
        page_tables=tuple(put(old, new) for old, new in zip(slots.page_tables, tables)),
    )
    options = Options(
        numbers=put(options.numbers, numbers),
        stop_ids=put(options.stop_ids, stops),
        bias_ids=put(options.bias_ids, bias_ids),
        bias_values=put(options.bias_values, values),
        allowed=options.allowed,
    )
    return slots, options


def pack_masks(masks: list[tuple[int, np.ndarray]], null_slot: int, words: int) -> np.ndarray:
    """Slots and what each may take next, as uint32[MASK_BATCH, 1 + words]."""
    packed = np.zeros((MASK_BATCH, 1 + words), np.uint32)
    packed[:, 0] = null_slot
    for line, (slot, mask) in zip(packed, masks):
        line[0], line[1:] = slot, mask
    return packed


def put_masks(options: Options, packed: UInt32[Array, "B size"]) -> Options:
    """Write what some slots may take next."""
    rows = packed[:, 0].astype(jnp.int32)
    allowed = options.allowed.at[rows].set(packed[:, 1:], mode="promise_in_bounds")
    return options._replace(allowed=allowed)


def pack_history(sequence: Sequence) -> list[np.ndarray]:
    """Uploads int32[2 + HISTORY_CHUNK] that rebuild a slot's history: slot, flags, tokens.

    Flag bit 0: clear the slot first; bit 1: these are outputs. Padding tokens are NO_TOKEN.
    """
    prompt_len = sequence.prompt_len
    uploads: list[np.ndarray] = []
    for tokens, flag in ((sequence.tokens[:prompt_len], 0), (sequence.tokens[prompt_len:], 2)):
        for first in range(0, len(tokens), HISTORY_CHUNK):
            part = tokens[first : first + HISTORY_CHUNK]
            upload = np.full(2 + HISTORY_CHUNK, NO_TOKEN, np.int32)
            upload[0], upload[1] = sequence.slot, flag | (not uploads)
            upload[2 : 2 + len(part)] = part
            uploads.append(upload)
    return uploads


def load_history(history: History, packed: Int[Array, " size"]) -> History:
    """Add one upload of `pack_history` to a slot's history."""
    slot, flags, tokens = packed[0], packed[1], packed[2:]
    clear, output = (flags & 1) > 0, (flags & 2) > 0
    real = tokens != NO_TOKEN
    where = jnp.maximum(tokens, 0)
    counts = jnp.where(clear, 0, history.output_counts[slot].astype(jnp.int32))
    seen = ~clear & history.in_prompt[slot]
    counts = counts.at[where].add((real & output).astype(jnp.int32))
    counts = jnp.minimum(counts, MAX_COUNT).astype(jnp.int16)
    seen = seen.at[where].max(real & ~output)
    return History(history.output_counts.at[slot].set(counts), history.in_prompt.at[slot].set(seen))
