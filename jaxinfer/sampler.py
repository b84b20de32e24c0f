"""Chooses the next token of every row: the second program of a step.

Options are masked data, so requests with different ones share a batch. Four members of one closed
set keep the cost of rare options off everyone else; a step runs the least that covers its rows:

    greedy   first maximum
    draw     + temperature: inverse-CDF draw keyed by (seed, position)
    filter   + min-p, top-k, top-p
    full     + logit bias, penalties, logprobs

All of them compute the same thing for a row that needs less. Order of options: forbidden tokens,
bias, penalties, temperature, min-p, top-k, top-p; logprobs are of the model's own logits.

Where some row may not take every token, `forbid` runs between `forward` and `sample`, so other
steps pay nothing for it.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.logprobs import logprob_columns
from jaxinfer.sampler_outcomes import (
    AT_LIMIT,
    FREE,
    HELD,
    IDLE,
    NOT_FINITE,
    RUNNING,
    STOPPED,
)
from jaxinfer.slot_state import MAX_COUNT, History, Options, Slots
from pallas_kernels.sampling_threshold import Implementation, sampling_threshold

Variant = Literal["greedy", "draw", "filter", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "draw", "filter", "full")

DRAW_BLOCK = 256  # entries of one block of the two-level draw


class SampleRows(NamedTuple):
    """The rows logits were computed for: their slots, and whether each yields a token."""

    slots: Int[Array, " R"]
    live: Bool[Array, " R"]


@functools.partial(jax.jit, donate_argnames=("slots",))
def forbid(
    logits: Float[Array, "R V"],
    rows: SampleRows,
    slots: Slots,
    options: Options,
    rules: Int[Array, " R"],
) -> tuple[Float[Array, "R V"], SampleRows, Slots]:
    """Logits without what rows may not take, by `rules` (FREE, RULED or HELD a row).

    A forbidden token has -inf, but NaN and +inf stay: they are the model's failure. HELD rows yield
    nothing, and stay where they were before this step's `forward`.
    """
    words = options.allowed[rows.slots]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] > 0
    stays = allowed | (rules == FREE)[:, None] | ~(logits < jnp.inf)
    held = rows.live & (rules == HELD)
    position = slots.position.at[rows.slots].add(-held.astype(jnp.int32), mode="promise_in_bounds")
    kept = SampleRows(rows.slots, rows.live & (rules != HELD))
    return jnp.where(stays, logits, -jnp.inf), kept, slots._replace(position=position)


@functools.partial(
    jax.jit,
    static_argnames=("variant", "implementation"),
    donate_argnames=("slots", "history"),
)
def sample(
    logits: Float[Array, "R V"],
    rows: SampleRows,
    slots: Slots,
    options: Options,
    history: History | None,
    own: Float[Array, "R V"] | None,
    *,
    variant: Variant,
    implementation: Implementation,
) -> tuple[Slots, History | None, Int[Array, "R columns"]]:
    """Next tokens, and the slots that carry them into the next step.

    `implementation` is what finds the thresholds of the filters.

    The int32 result has a token and an outcome a row and, for `full`, the token's
    `logprob_columns`. `history` is None but for `full`, and so is `own`: the model's logits as they
    were before `forbid`.
    """
    edited = logits
    if variant == "full":
        edited = _penalise(_add_bias(logits, rows.slots, options), rows.slots, options, history)
    tokens = _first_maximum(edited)
    positions = slots.position[rows.slots]
    if variant != "greedy":
        temperature = options.number("temperature", rows.slots)
        weights = _tempered(edited, temperature)
        if variant != "draw":
            filters = (options.number(name, rows.slots) for name in ("min_p", "top_k", "top_p"))
            limit = sampling_threshold(edited, temperature, *filters, implementation=implementation)
            weights = jnp.where(_distance(edited) <= limit[:, None], weights, 0.0)
        drawn = _draw(weights, _uniform(rows.slots, positions, options))
        tokens = jnp.where(temperature > 0, drawn, tokens)
    outcome = _outcome(logits, tokens, positions, rows, options)
    columns = [tokens[:, None], outcome[:, None]]
    if variant == "full":
        assert own is not None
        columns += logprob_columns(own, tokens)
        history = _count(history, rows, tokens)
    return _advance(slots, rows, tokens, outcome), history, jnp.concatenate(columns, axis=1)


def _first_maximum(x: Float[Array, "R V"]) -> Int[Array, " R"]:
    """argmax with ties to the lowest id; on CPUs two reductions beat jnp.argmax fourfold.

    A row without a maximum (NaN) yields the last id, which is in range.
    """
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)
    best = jnp.where(x == _maximum(x)[:, None], ids, x.shape[1] - 1)
    return best.min(-1)


def _maximum(x: Float[Array, "R V"]) -> Float[Array, " R"]:
    """The largest entry, or inf if there is a NaN: XLA's own max may pass over those."""
    return jnp.where(jnp.isnan(x), jnp.inf, x).max(-1)


def _distance(logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """How far each token is below the most likely one."""
    return logits.max(-1, keepdims=True) - logits


def _tempered(logits: Float[Array, "R V"], temperature: Float[Array, " R"]) -> Float[Array, "R V"]:
    """Unnormalised probabilities; the most likely token has 1, whatever the temperature."""
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.exp(-_distance(logits) / scale)


def _uniform(
    rows: Int[Array, " R"], positions: Int[Array, " R"], options: Options
) -> Float[Array, " R"]:
    """One number in [0, 1) a row, a function of (seed, position) alone."""
    seeds = jnp.stack([options.number("seed_high", rows), options.number("seed_low", rows)], axis=1)

    def one(seed: Int[Array, " 2"], position: Int[Array, ""]) -> Float[Array, ""]:
        words = lax.bitcast_convert_type(seed, jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seeds, positions)


def _draw(weights: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
    """Inverse-CDF draw in two levels: pick a block by its sum, then an entry of the block."""
    padded = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % DRAW_BLOCK)))
    blocks = padded.reshape(weights.shape[0], -1, DRAW_BLOCK)
    mass = blocks.sum(-1)
    cumulative = jnp.cumsum(mass, axis=1)
    target = uniform * cumulative[:, -1]
    block = _first_above(mass, cumulative, target)
    before = jnp.where(
        block > 0, jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0
    )
    entries = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    entry = _first_above(entries, jnp.cumsum(entries, axis=1), target - before)
    return (block * DRAW_BLOCK + entry).astype(jnp.int32)


def _first_above(
    weights: Float[Array, "R N"], cumulative: Float[Array, "R N"], target: Float[Array, " R"]
) -> Int[Array, " R"]:
    """First index with weight whose running sum exceeds the target, or else the last with weight.

    Asking for weight matters: running sums are added up in a tree, so rounding can make them grow
    a little where there is none.
    """
    ids = jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
    weighty = weights > 0
    last = jnp.where(weighty, ids, 0).max(-1)
    above = weighty & (cumulative > target[:, None])
    return jnp.minimum(jnp.where(above, ids, weights.shape[1]).min(-1), last)


def _add_bias(
    logits: Float[Array, "R V"], rows: Int[Array, " R"], options: Options
) -> Float[Array, "R V"]:
    lines = jnp.arange(logits.shape[0])[:, None]
    return logits.at[lines, options.bias_ids[rows]].add(options.bias_values[rows])


def _penalise(
    logits: Float[Array, "R V"], rows: Int[Array, " R"], options: Options, history: History | None
) -> Float[Array, "R V"]:
    """Repetition penalty on tokens of prompt and output, presence and frequency on the output's."""
    assert history is not None
    counts = history.output_counts[rows].astype(jnp.float32)
    repetition = options.number("repetition_penalty", rows)[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history.in_prompt[rows] | (counts > 0), penalised, logits)
    frequency = options.number("frequency_penalty", rows)[:, None]
    presence = options.number("presence_penalty", rows)[:, None]
    return logits - frequency * counts - jnp.where(counts > 0, presence, 0.0)


def _count(history: History | None, rows: SampleRows, tokens: Int[Array, " R"]) -> History:
    """Count the chosen tokens of live rows; a count stays at MAX_COUNT once there."""
    assert history is not None
    seen = history.output_counts[rows.slots, tokens]
    one = (rows.live & (seen < MAX_COUNT)).astype(seen.dtype)
    return history._replace(output_counts=history.output_counts.at[rows.slots, tokens].add(one))


def _outcome(
    logits: Float[Array, "R V"],
    tokens: Int[Array, " R"],
    positions: Int[Array, " R"],
    rows: SampleRows,
    options: Options,
) -> Int[Array, " R"]:
    stops = (options.stop_ids[rows.slots] == tokens[:, None]).any(-1)
    at_limit = positions + 1 >= options.number("limit", rows.slots)
    outcome = jnp.where(stops, STOPPED, jnp.where(at_limit, AT_LIMIT, RUNNING))
    outcome = jnp.where(jnp.isfinite(_maximum(logits)), outcome, NOT_FINITE)
    return jnp.where(rows.live, outcome, IDLE).astype(jnp.int32)


def _advance(
    slots: Slots, rows: SampleRows, tokens: Int[Array, " R"], outcome: Int[Array, " R"]
) -> Slots:
    """Live rows carry their token on; whatever did not end goes on decoding."""
    old_token, old_done = slots.token[rows.slots], slots.done[rows.slots]
    token = jnp.where(rows.live, tokens, old_token)
    done = jnp.where(rows.live, outcome != RUNNING, old_done)
    return slots._replace(
        token=slots.token.at[rows.slots].set(token, mode="promise_in_bounds"),
        done=slots.done.at[rows.slots].set(done, mode="promise_in_bounds"),
    )
