"""The sampler against a plain NumPy one, and what must not matter to it: company, row, variant."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sampler as reference
from scipy import stats

from jaxinfer import sampler_outcomes as outcomes
from jaxinfer.request import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_IDS, Request, SamplingParams
from jaxinfer.runner import sampling_level
from jaxinfer.sampler import VARIANTS, SampleRows, _draw, sample
from jaxinfer.sequence import Sequence
from jaxinfer.slot_state import (
    MAX_COUNT,
    OPTIONS_SIZE,
    admit,
    empty_history,
    empty_options,
    empty_slots,
    load_history,
    pack_history,
    pack_options,
)

VOCAB = 1000  # four draw blocks, the last one partial
ROWS = 16
SLOTS = 24

jit_admit, jit_load_history = jax.jit(admit), jax.jit(load_history)


@dataclasses.dataclass
class Row:
    """A row of a batch: its options and what was said so far."""

    params: SamplingParams
    seed: int = 0
    prompt: tuple[int, ...] = (1, 2, 3)
    outputs: tuple[int, ...] = ()
    max_new_tokens: int = 100
    stop_ids: tuple[int, ...] = ()
    slot: int | None = None
    live: bool = True

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def sequence(self) -> Sequence:
        request = Request(
            "r", self.prompt, self.params, self.max_new_tokens, self.seed, self.stop_ids
        )
        return Sequence(request, tokens=[*self.prompt, *self.outputs], slot=self.slot)


@dataclasses.dataclass
class Sampled:
    """What `sample` returned, unpacked."""

    tokens: np.ndarray
    outcomes: np.ndarray
    slots: object
    history: object
    logprob: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top: np.ndarray | None = None


def run(logits: np.ndarray, rows: list[Row], variant: str, history=None) -> Sampled:
    """Sample a batch through everything a real step uses: packed options and uploaded history."""
    num_slots, padded = max(SLOTS, len(rows)), max(ROWS, len(rows))
    for i, row in enumerate(rows):
        row.slot = i if row.slot is None else row.slot
    slots, options = empty_slots(num_slots, (1,)), empty_options(num_slots)
    packed = pack_options([row.sequence() for row in rows], padded, num_slots)
    assert packed.shape == (padded, OPTIONS_SIZE)
    slots, options = jit_admit(slots, options, packed)
    if variant == "full" and history is None:
        history = empty_history(num_slots, logits.shape[1])
        for row in rows:
            for upload in pack_history(row.sequence()):
                history = jit_load_history(history, upload)
    used = np.array([row.slot for row in rows] + [num_slots] * (padded - len(rows)), np.int32)
    position = np.zeros(num_slots + 1, np.int32)
    position[used[: len(rows)]] = [row.position for row in rows]
    live = np.array([row.live for row in rows] + [False] * (padded - len(rows)))
    full = np.zeros((padded, logits.shape[1]), np.float32)
    full[: len(rows)] = logits
    slots = slots._replace(position=jnp.asarray(position))
    new_slots, history, out = sample(
        jnp.asarray(full),
        SampleRows(jnp.asarray(used), jnp.asarray(live)),
        slots,
        options,
        history if variant == "full" else None,
        variant=variant,
    )
    out = np.asarray(out)[: len(rows)]
    result = Sampled(out[:, 0], out[:, 1], new_slots, history)
    if variant == "full":
        width = (out.shape[1] - 3) // 2
        result.logprob = out[:, 2].copy().view(np.float32)
        result.top_ids = out[:, 3 : 3 + width]
        result.top = out[:, 3 + width :].copy().view(np.float32)
    return result


def variants_for(params: SamplingParams) -> tuple[str, ...]:
    """The member a request needs and all above it."""
    return VARIANTS[sampling_level(params) :]


def random_logits(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> np.ndarray:
    """Quantised, so that ties are many and exact."""
    rng = np.random.default_rng(seed)
    return np.round(rng.normal(scale=3, size=(rows, vocab)) * 4).astype(np.float32) / 4


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Every option on or off, in any mixture."""

    def maybe(value, off, chance=0.5):
        return value if rng.random() < chance else off

    bias = [(int(t), float(rng.normal(scale=3))) for t in rng.choice(VOCAB, 5, replace=False)]
    return SamplingParams(
        temperature=float(maybe(rng.choice([0.1, 0.7, 1.0, 1.5, 5.0]), 0.0, 0.85)),
        top_k=int(maybe(rng.choice([1, 2, 10, 50, 999]), 0)),
        top_p=float(maybe(rng.choice([0.1, 0.5, 0.9, 0.99]), 1.0)),
        min_p=float(maybe(rng.choice([0.01, 0.2]), 0.0, 0.3)),
        repetition_penalty=float(maybe(rng.choice([0.7, 1.3]), 1.0)),
        presence_penalty=float(maybe(rng.choice([-1.0, 0.8]), 0.0)),
        frequency_penalty=float(maybe(rng.choice([-0.3, 0.4]), 0.0)),
        logit_bias=tuple(maybe(bias, ())),
    )


def random_row(rng: np.random.Generator) -> Row:
    prompt = rng.integers(0, VOCAB, rng.integers(1, 40))
    outputs = rng.choice(prompt, rng.integers(0, 40)) if rng.random() < 0.5 else ()
    return Row(
        random_params(rng),
        int(rng.integers(0, MAX_SEED)),
        tuple(map(int, prompt)),
        tuple(map(int, outputs)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_options_equals_the_reference(seed):
    rng, logits = np.random.default_rng(seed), random_logits(seed)
    rows = [random_row(rng) for _ in range(ROWS)]
    result = run(logits, rows, "full")
    for i, row in enumerate(rows):
        wrong = reference.problem(
            result.tokens[i],
            logits[i],
            row.params,
            row.seed,
            list(row.prompt),
            list(row.outputs),
            2e-6,
        )
        assert not wrong, f"row {i}, {row.params}: {wrong}"


@pytest.mark.parametrize("seed", range(6))
def test_every_variant_that_covers_a_row_says_the_same(seed):
    rng, logits = np.random.default_rng(seed), random_logits(100 + seed)
    rows = [random_row(rng) for _ in range(ROWS)]
    for row in rows[:12]:  # most without what only the full variant can do
        row.params = dataclasses.replace(
            row.params,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
        )
    for row in rows[:6]:
        row.params = dataclasses.replace(row.params, top_k=0, top_p=1.0, min_p=0.0)
    by_variant = {variant: run(logits, rows, variant).tokens for variant in VARIANTS}
    for i, row in enumerate(rows):
        said = {int(by_variant[variant][i]) for variant in variants_for(row.params)}
        assert len(said) == 1, (i, row.params, said)


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_slot_and_company_do_not_matter(variant):
    rng, logits = np.random.default_rng(5), random_logits(5)
    rows = [random_row(rng) for _ in range(ROWS)]
    together = run(logits, rows, variant).tokens
    order = rng.permutation(ROWS)
    moved = [
        dataclasses.replace(rows[i], slot=int(s)) for i, s in zip(order, rng.permutation(SLOTS))
    ]
    np.testing.assert_array_equal(run(logits[order], moved, variant).tokens, together[order])
    for i in (0, 7, 15):
        alone = [dataclasses.replace(rows[i], slot=3)]
        assert run(logits[i : i + 1], alone, variant).tokens[0] == together[i]


def test_greedy_takes_the_first_of_equal_maxima():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, [30, 500, 999]] = 2
    logits[2] = -np.inf
    logits[2, 999] = -5
    logits[3, 0] = logits[3, 999] = 1
    for variant in VARIANTS:
        tokens = run(logits, [Row(SamplingParams(temperature=0)) for _ in range(4)], variant).tokens
        assert tokens.tolist() == [0, 30, 999, 0]


@pytest.mark.parametrize("temperature", [1e-12, 1e-9, 1e-6])
def test_a_tiny_temperature_draws_among_exact_maxima_only(temperature):
    logits = np.round(random_logits(3, 64) * 3)
    logits[::2, 5] = logits[::2].max(1) + 1e-3  # every other row has one best token, barely
    rows = [Row(SamplingParams(temperature=temperature), seed=i) for i in range(64)]
    result = run(logits, rows, "draw")
    assert (logits[np.arange(64), result.tokens] == logits.max(1)).all()
    assert (result.tokens[::2] == 5).all()
    assert (result.outcomes == outcomes.RUNNING).all()


def counts_of_draws(logits: np.ndarray, params: SamplingParams, draws: int = 4096) -> np.ndarray:
    """How often each token is drawn from one distribution, by seed and position."""
    variant = VARIANTS[sampling_level(params)]
    seen = np.zeros(len(logits), int)
    rows = [Row(params, seed=i // 4, prompt=(1,) * (1 + i % 4)) for i in range(draws)]
    tokens = run(np.tile(logits, (draws, 1)), rows, variant).tokens
    np.add.at(seen, tokens, 1)
    return seen


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.15),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits = np.random.default_rng(8).normal(scale=1.5, size=30).astype(np.float32)
    weights = reference.kept_weights(logits.astype(np.float64), params)
    seen = counts_of_draws(logits, params)
    assert (seen[weights == 0] == 0).all()
    wanted = seen.sum() * weights[weights > 0] / weights.sum()
    assert stats.chisquare(seen[weights > 0], wanted).pvalue > 1e-3


def drawn_tokens(logits: np.ndarray, params: SamplingParams) -> set[int]:
    return set(np.flatnonzero(counts_of_draws(logits, params, draws=512)).tolist())


def test_ties_at_a_threshold_all_stay():
    logits = np.full(40, -20, np.float32)
    logits[[3, 8, 20]] = 1.0
    logits[[5, 30, 31, 39]] = 0.5
    best, both = {3, 8, 20}, {3, 8, 20, 5, 30, 31, 39}
    draw = functools.partial(drawn_tokens, logits)
    assert draw(SamplingParams(top_k=1)) == best
    assert draw(SamplingParams(top_k=3)) == best
    assert draw(SamplingParams(top_k=4)) == both
    assert draw(SamplingParams(top_p=0.01)) == best
    mass = 3 / (3 + 4 * np.exp(-0.5))
    assert draw(SamplingParams(top_p=mass - 0.01)) == best
    assert draw(SamplingParams(top_p=mass + 0.01)) == both
    assert draw(SamplingParams(min_p=1.0)) == best
    assert draw(SamplingParams(min_p=0.6)) == both
    assert draw(SamplingParams(top_k=1, top_p=0.01, min_p=1.0)) == best


@pytest.mark.parametrize("off", [{"top_k": 40}, {"top_k": 10**6}, {"top_k": -1}, {"min_p": 0.0}])
def test_options_that_keep_everything_change_nothing(off):
    logits = random_logits(4, ROWS, 40)
    rows = [Row(SamplingParams(temperature=1.3), seed=i) for i in range(ROWS)]
    plain = run(logits, rows, "draw").tokens
    same = [dataclasses.replace(row, params=dataclasses.replace(row.params, **off)) for row in rows]
    np.testing.assert_array_equal(run(logits, same, "filter").tokens, plain)


def test_a_token_that_was_filtered_out_is_never_drawn():
    """At every number next to a step of the running sum, where rounding could slip."""
    rng = np.random.default_rng(0)
    drawn = 0
    for keep in (1, 3, 50, 400):
        weights = np.exp(-rng.exponential(3, VOCAB)).astype(np.float32)
        weights[rng.permutation(VOCAB)[keep:]] = 0
        steps = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
        near = np.round(np.unique(steps) * 2**23).astype(np.int64)[:, None] + np.arange(-3, 4)
        numbers = np.unique(near.clip(0, 2**23 - 1)).astype(np.float32) / 2**23
        numbers = np.resize(numbers, -(-len(numbers) // 256) * 256).reshape(-1, 256)
        for batch in numbers:
            tokens = jit_draw(jnp.asarray(np.tile(weights, (256, 1))), jnp.asarray(batch))
            assert (weights[np.asarray(tokens)] > 0).all()
            drawn += len(batch)
    assert drawn > 2000


jit_draw = jax.jit(_draw)


def test_draws_depend_on_seed_and_position_alone():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    params = SamplingParams(temperature=1.0)
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, MAX_SEED]
    by_seed = [Row(params, seed=seed) for seed in seeds]
    by_position = [Row(params, seed=1, prompt=(9,) * (4 + i)) for i in range(8)]
    tokens = run(logits, by_seed + by_position, "draw").tokens.tolist()
    assert len(set(tokens)) >= 15, "every seed and every position draws another number"
    for row, token in zip(by_seed + by_position, tokens):
        assert token == int(reference.uniform(row.seed, row.position) * VOCAB)
    # Prompt and output tokens share one count of positions, so a resumed sequence draws the same.
    split = Row(params, seed=1, prompt=(9,) * 4, outputs=(9,) * 3)
    assert run(logits[:1], [split], "draw").tokens[0] == tokens[8 + 3]


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_outcomes_and_what_the_slots_remember(variant):
    logits = np.full((6, VOCAB), -1, np.float32)
    logits[:, 7] = 1
    greedy = SamplingParams(temperature=0)
    many = tuple(range(100, 100 + MAX_STOP_IDS - 1))
    rows = [
        Row(greedy),
        Row(greedy, stop_ids=(7,)),
        Row(greedy, stop_ids=(*many, 7)),
        Row(greedy, stop_ids=(7,), max_new_tokens=1),
        Row(greedy, prompt=(1, 2), outputs=(3,), max_new_tokens=2),
        Row(greedy, prompt=(1, 2), outputs=(3,), max_new_tokens=3, stop_ids=(0, 1)),
    ]
    idle = Row(greedy, stop_ids=(7,), live=False)
    result = run(np.vstack([logits, logits[:1]]), [*rows, idle], variant)
    assert result.outcomes.tolist() == [
        outcomes.RUNNING,
        outcomes.STOPPED,
        outcomes.STOPPED,
        outcomes.STOPPED,
        outcomes.AT_LIMIT,
        outcomes.RUNNING,
        outcomes.IDLE,
    ]
    done = np.asarray(result.slots.done)
    assert done[:6].tolist() == [False, True, True, True, True, False]
    assert done[6:].all()
    token = np.asarray(result.slots.token)
    assert (token[:6] == 7).all() and (token[6:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_that_are_not_finite_fail_their_row_alone(variant, bad):
    rng, logits = np.random.default_rng(1), random_logits(11)
    rows = [random_row(rng) for _ in range(ROWS)]
    before = run(logits, rows, variant)
    broken = logits.copy()
    broken[4] = bad
    broken[9, 30] = np.nan
    result = run(broken, rows, variant)
    failed = result.outcomes == outcomes.NOT_FINITE
    assert np.flatnonzero(failed).tolist() == [4, 9]
    assert ((result.tokens >= 0) & (result.tokens < VOCAB)).all()
    np.testing.assert_array_equal(result.tokens[~failed], before.tokens[~failed])
    assert np.asarray(result.slots.done)[[4, 9]].all()


def test_single_tokens_ruled_out_by_the_model_are_no_failure():
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[:, [3, 4]] = 0
    rows = [Row(SamplingParams(temperature=t, top_p=0.9, min_p=0.1), seed=1) for t in (0.0, 1.0)]
    for variant in ("filter", "full"):
        result = run(logits, rows, variant)
        assert (result.outcomes == outcomes.RUNNING).all() and set(result.tokens) <= {3, 4}


def test_logprobs_are_of_the_models_own_logits():
    rng, logits = np.random.default_rng(2), random_logits(12)
    rows = [random_row(rng) for _ in range(ROWS)]
    result = run(logits, rows, "full")
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    lines = np.arange(ROWS)
    np.testing.assert_allclose(result.logprob, exact[lines, result.tokens], atol=1e-5)
    np.testing.assert_allclose(result.top, -np.sort(-exact, 1)[:, :20], atol=1e-5)
    np.testing.assert_allclose(result.top, exact[lines[:, None], result.top_ids], atol=1e-5)
    assert all(len(set(ids)) == 20 for ids in result.top_ids.tolist())
    for ids, values in zip(result.top_ids, result.top):  # equal ones by id
        assert all(a < b for a, b, x, y in zip(ids, ids[1:], values, values[1:]) if x == y)


def test_a_vocabulary_smaller_than_the_most_logprobs():
    logits = random_logits(1, 2, 7)
    result = run(logits, [Row(SamplingParams(temperature=0)) for _ in range(2)], "full")
    assert result.top.shape == (2, 7)
    assert sorted(result.top_ids[0].tolist()) == list(range(7))


def test_the_least_variant_that_honours_a_request():
    level = {
        SamplingParams(temperature=0): 0,
        SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1): 0,
        SamplingParams(temperature=1): 1,
        SamplingParams(top_k=5): 2,
        SamplingParams(top_p=0.9): 2,
        SamplingParams(min_p=0.1): 2,
        SamplingParams(temperature=0, logprobs=0): 3,
        SamplingParams(temperature=0, logit_bias=((1, 1.0),)): 3,
        SamplingParams(temperature=0, repetition_penalty=1.1): 3,
        SamplingParams(temperature=0, presence_penalty=0.1): 3,
        SamplingParams(temperature=0, frequency_penalty=0.1): 3,
    }
    assert {params: sampling_level(params) for params in level} == level
