"""The sampler in plain NumPy float64, written from the documentation of `SamplingParams`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.request import SamplingParams


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], outputs: list[int]
) -> np.ndarray:
    """Logits after bias and penalties: one token after the other, as a person would."""
    logits = logits.astype(np.float64).copy()
    for token, value in params.logit_bias:
        logits[token] += np.float32(value)
    for token in {*prompt, *outputs}:
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(outputs):
        logits[token] -= np.float32(params.presence_penalty)
        logits[token] -= np.float32(params.frequency_penalty) * outputs.count(token)
    return logits


def kept_weights(logits: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Probabilities (not normalised, the largest is 1) after temperature, min-p, top-k and top-p.

    `slack` moves every threshold a little: a float32 sampler may round a near tie either way.
    """
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    weights[weights < np.float32(params.min_p) * (1 - slack)] = 0
    if 0 < params.top_k < len(weights):
        threshold = np.sort(weights)[-params.top_k]
        weights[weights < threshold * (1 - slack)] = 0
    if params.top_p < 1:
        target = np.float32(params.top_p) * (1 + slack) * weights.sum()
        ordered = np.sort(weights)[::-1]
        needed = int(np.argmax(np.cumsum(ordered) >= min(target, ordered.sum() * (1 - 1e-12))))
        weights[weights < ordered[needed] * (1 - abs(slack))] = 0
    return weights


def uniform(seed: int, position: int) -> float:
    """The number that the draw at this position of a request uses."""
    words = jnp.asarray(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32))
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return float(jax.random.uniform(jax.random.fold_in(key, position)))


def problem(
    token: int,
    logits: np.ndarray,
    params: SamplingParams,
    seed: int,
    prompt: list[int],
    outputs: list[int],
    tolerance: float = 1e-4,
) -> str:
    """Why `token` is not what follows prompt and outputs; "" if it is, within rounding.

    `tolerance` bounds the error of logits and of the running sum of probabilities.
    """
    final = edited(logits, params, prompt, outputs)
    if params.temperature == 0:
        lost = final.max() - final[token]
        return "" if lost <= tolerance else f"{token} is {lost:.2e} below the best"
    number = uniform(seed, len(prompt) + len(outputs))
    found = []
    for slack in (0.0, tolerance, -tolerance):
        weights = kept_weights(final, params, slack)
        running = np.cumsum(weights) / weights.sum()
        low, high = running[token] - weights[token] / weights.sum(), running[token]
        room = tolerance / min(params.temperature, 1.0)
        if weights[token] > 0 and low - room <= number <= high + room:
            return ""
        found.append(f"[{low:.6f}, {high:.6f}] weight {weights[token]:.2e}")
    return f"{token} covers {' or '.join(found)}, drawn {number:.6f}"
