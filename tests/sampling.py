"""Runs the sampler on a batch of rows, through everything that a real step uses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.request import MAX_SEED, Request, SamplingParams
from jaxinfer.runner import sampling_level
from jaxinfer.sampler import VARIANTS, SampleRows, sample
from jaxinfer.sequence import Sequence
from jaxinfer.slot_state import (
    admission_size,
    admit,
    empty_history,
    empty_options,
    empty_slots,
    load_history,
    pack_admissions,
    pack_history,
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
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top: np.ndarray | None = None


def run(
    logits: np.ndarray, rows: list[Row], variant: str, history=None, implementation="reference"
) -> Sampled:
    """Sample a batch through everything a real step uses: packed options and uploaded history."""
    num_slots, padded = max(SLOTS, len(rows)), max(ROWS, len(rows))
    for i, row in enumerate(rows):
        row.slot = i if row.slot is None else row.slot
    slots, options = empty_slots(num_slots, (1,)), empty_options(num_slots, logits.shape[1])
    packed = pack_admissions([row.sequence() for row in rows], [], padded, num_slots, (1,))
    assert packed.shape == (padded, admission_size((1,)))
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
        jnp.asarray(full) if variant == "full" else None,
        variant=variant,
        implementation=implementation,
    )
    out = np.asarray(out)[: len(rows)]
    result = Sampled(out[:, 0], out[:, 1], new_slots, history)
    if variant == "full":
        width = (out.shape[1] - 4) // 2
        result.logprob = out[:, 2].copy().view(np.float32)
        result.rank = out[:, 3]
        result.top_ids = out[:, 4 : 4 + width]
        result.top = out[:, 4 + width :].copy().view(np.float32)
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
