"""Penalties and bias: what was said is counted, uploaded and taken into account."""

from __future__ import annotations

import numpy as np
import reference_sampler as reference
from sampling import ROWS, VOCAB, Row, jit_load_history, random_logits, run

from jaxinfer.request import MAX_LOGIT_BIAS, SamplingParams
from jaxinfer.slot_state import MAX_COUNT, pack_history


def test_penalties_count_what_was_sampled_as_well_as_what_was_uploaded():
    """A history that grew step by step equals one that was uploaded whole, as after preemption."""
    logits = random_logits(9)
    params = SamplingParams(
        temperature=0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2
    )
    rows = [Row(params, prompt=(i, 5)) for i in range(ROWS)]
    rows[3].live = False
    history, outputs = None, [[] for _ in rows]
    for _ in range(12):
        result = run(logits, rows, "full", history)
        history = result.history
        for i, row in enumerate(rows):
            if row.live:
                outputs[i].append(int(result.tokens[i]))
                row.outputs = tuple(outputs[i])
    uploaded = run(logits, rows, "full").tokens
    np.testing.assert_array_equal(run(logits, rows, "full", history).tokens, uploaded)
    for i, row in enumerate(rows):
        for step in range(len(outputs[i])):
            wrong = reference.problem(
                outputs[i][step], logits[i], params, 0, list(row.prompt), outputs[i][:step], 1e-5
            )
            assert not wrong, (i, step, wrong)
    assert len(set(outputs[0])) > 1, "the penalties do change the output"


def test_history_of_a_long_sequence_takes_several_uploads():
    logits = random_logits(2, 2)
    best = int(logits[0].argmax())
    params = SamplingParams(temperature=0, frequency_penalty=0.01)
    few = Row(params, prompt=(4,) * 700, outputs=(best,) * 1300)
    np.testing.assert_array_equal(
        run(logits[:1], [few], "full").tokens,
        [reference.edited(logits[0], params, [4], [best] * 1300).argmax()],
    )
    # An earlier owner of the slot leaves nothing behind.
    dirty = run(logits[:1], [few], "full").history
    clean = Row(params, prompt=(8, 8), slot=few.slot)
    for upload in pack_history(clean.sequence()):
        dirty = jit_load_history(dirty, upload)
    assert int(dirty.output_counts[clean.slot].sum()) == 0
    assert np.flatnonzero(dirty.in_prompt[clean.slot]).tolist() == [8]


def test_counts_saturate_instead_of_turning_negative():
    logits = np.zeros((1, VOCAB), np.float32)
    params = SamplingParams(temperature=0, frequency_penalty=-0.001)
    row = Row(params, prompt=(1,), outputs=(7,) * (MAX_COUNT + 700))
    result = run(logits, [row], "full")
    assert result.tokens[0] == 7
    assert int(result.history.output_counts[row.slot, 7]) == MAX_COUNT
    assert run(logits, [row], "full", result.history).tokens[0] == 7


def test_logit_bias_reaches_every_id():
    logits = random_logits(6, 4)
    force = [0, 1, VOCAB - 1]
    rows = [Row(SamplingParams(temperature=0, logit_bias=((t, 100.0),))) for t in force]
    ban = tuple((int(t), -100.0) for t in np.argsort(logits[3])[-MAX_LOGIT_BIAS:])
    rows.append(Row(SamplingParams(temperature=0, logit_bias=ban)))
    tokens = run(logits, rows, "full").tokens
    assert tokens[:3].tolist() == force
    left = np.delete(np.arange(VOCAB), [t for t, _ in ban])
    assert logits[3, tokens[3]] == logits[3, left].max() and tokens[3] in left
