"""How far one model's distributions are from another's, over the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.engine import Engine
from jaxinfer.evaluation.distributions import distributions


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `positions` of a text, or of several.

    Attributes:
        kl: Kullback-Leibler divergence of the model from the reference, in nats: what the
            reference's next token costs more with the model's probabilities.
        top1: share of positions whose most likely token is the same.
        nll / reference_nll: negative log-likelihood of the text itself, in nats a token.
    """

    positions: int
    kl: float
    top1: float
    nll: float
    reference_nll: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))

    @property
    def reference_perplexity(self) -> float:
        return float(np.exp(self.reference_nll))

    def to_json(self) -> dict[str, Any]:
        return {
            "positions": self.positions,
            "kl": self.kl,
            "top1": self.top1,
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
        }


def log_probabilities(logits: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
    """float64 log-softmax."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def compare(
    model: Engine, reference: Engine, texts: Sequence[Sequence[int]]
) -> tuple[Divergence, list[Divergence]]:
    """Of all texts together, and of each. Raises ValueError for different vocabularies, and where
    `distributions` does."""
    if model.limits.vocab_size != reference.limits.vocab_size:
        raise ValueError(
            f"the model has {model.limits.vocab_size} tokens, the reference "
            f"{reference.limits.vocab_size}: their distributions cannot be compared"
        )
    rows: list[list[tuple[float, ...]]] = [[] for _ in texts]
    for text, position, logits, other in _paired(model, reference, texts):
        found, wanted = log_probabilities(logits), log_probabilities(other)
        kl = float(np.exp(wanted) @ (wanted - found))
        same = float(found.argmax() == wanted.argmax())
        token = texts[text][position + 1]
        rows[text].append((kl, same, -found[token], -wanted[token]))
    return _mean([row for text in rows for row in text]), [_mean(text) for text in rows]


def _paired(
    model: Engine, reference: Engine, texts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(which text, position, logits, the reference's). Engines with as many pages compute in the
    same order; what the other one has not said yet is kept until it does."""
    sides = distributions(model, texts), distributions(reference, texts)
    waiting: tuple[dict[tuple[int, int], np.ndarray], ...] = ({}, {})
    for both in zip_longest(*sides):
        for side, said in enumerate(both):
            if said is not None:
                waiting[side][said[0], said[1]] = said[2]
        for text, position in [key for key in waiting[0] if key in waiting[1]]:
            yield text, position, waiting[0].pop((text, position)), waiting[1].pop((text, position))
    if waiting[0] or waiting[1]:
        raise ValueError("the two engines take chunks of different sizes: give both the same")


def _mean(rows: list[tuple[float, ...]]) -> Divergence:
    return Divergence(len(rows), *np.mean(rows, axis=0).tolist())
