"""How evenly the tokens of a mixture spread over its experts, as plain data.

The step counts on the device, and the counts come with the tokens of the step, which are read
anyway. Rows that are done and padding do not count.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxinfer.config import ModelConfig

ACCEPTABLE, PROBLEM = 1.5, 2.0  # imbalance below and above which it is so; 1.0 is ideal


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens that went to each expert since the start. Never changed in place: any thread may look.

    Attributes:
        layers: numbers of the layers that have experts.
        top_k: experts of a token.
        tokens: int64[layers, experts].
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: np.ndarray

    @classmethod
    def none_yet(cls, config: ModelConfig) -> ExpertLoad | None:
        """Of a model that just started; None for one without experts."""
        layers = tuple(i for i in range(config.num_layers) if config.kind(i).moe)
        if config.moe is None or not layers:
            return None
        tokens = np.zeros((len(layers), config.moe.num_experts), np.int64)
        return cls(layers, config.moe.top_k, tokens)

    def plus(self, tokens: np.ndarray) -> ExpertLoad:
        """With the tokens of one more step."""
        return dataclasses.replace(self, tokens=self.tokens + tokens)


def imbalance(tokens: np.ndarray) -> float | None:
    """Of one layer's tokens by expert: the busiest over the mean of all; None without tokens."""
    total = int(tokens.sum())
    return int(tokens.max()) * len(tokens) / total if total else None
