"""What a benchmark asks for: prompts of token ids and output lengths, all from a seed.

`synthetic` lengths are fixed. `sharegpt` lengths follow the quantiles of a set of real chats
(measured in SmolLM2's tokens), so no user's text is needed: many short prompts, a few very long
ones, answers of some hundred tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Dataset = Literal["synthetic", "sharegpt"]
DATASETS: tuple[Dataset, ...] = ("synthetic", "sharegpt")

# (share of requests, tokens at most): between two points the logarithm of the length is linear.
PROMPT_QUANTILES = ((0.0, 4), (0.5, 35), (0.9, 1058), (0.99, 3302), (1.0, 5000))
OUTPUT_QUANTILES = ((0.0, 4), (0.2, 60), (0.5, 255), (0.9, 646), (0.99, 935), (1.0, 1200))


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: the prompt's token ids and how many tokens to generate, EOS ignored."""

    prompt: tuple[int, ...]
    output_len: int


def make_workload(
    dataset: Dataset,
    num_prompts: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    max_tokens: int,
    seed: int = 0,
    scale: float = 1.0,
) -> list[WorkItem]:
    """`num_prompts` requests of random token ids. The same arguments give the same requests.

    `input_len` and `output_len` are the lengths of `synthetic`; `scale` multiplies those of
    `sharegpt`. `max_tokens` is prompt + output of one sequence: `synthetic` lengths beyond it are
    refused, `sharegpt` ones cut (prompt to half of it, then the output to what is left). Raises
    ValueError naming the bad argument.
    """
    if num_prompts < 1:
        raise ValueError(f"--num-prompts is {num_prompts}; it must be at least 1")
    if not 0 < scale <= 1:
        raise ValueError(f"--length-scale is {scale}; it must be above 0, at most 1")
    if dataset == "synthetic":
        _check_lengths(input_len, output_len, max_tokens)
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(num_prompts):
        if dataset == "sharegpt":
            input_len = min(_draw(rng, PROMPT_QUANTILES, scale), max(max_tokens // 2, 1))
            output_len = min(_draw(rng, OUTPUT_QUANTILES, scale), max_tokens - input_len)
        prompt = rng.integers(0, vocab_size, input_len)
        items.append(WorkItem(tuple(prompt.tolist()), output_len))
    return items


def _check_lengths(input_len: int, output_len: int, max_tokens: int) -> None:
    for flag, value in (("--input-len", input_len), ("--output-len", output_len)):
        if value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")
    if (total := input_len + output_len) > max_tokens:
        raise ValueError(
            f"--input-len {input_len} + --output-len {output_len} = {total} tokens;"
            f" one sequence can have {max_tokens}; ask for less"
        )


def _draw(rng: np.random.Generator, quantiles: tuple[tuple[float, int], ...], scale: float) -> int:
    """A length whose distribution has these quantiles, scaled."""
    shares, lengths = zip(*quantiles)
    drawn = float(np.exp(np.interp(rng.random(), shares, np.log(lengths))))
    return max(1, round(scale * drawn))
