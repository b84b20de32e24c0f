"""How likely a model thought the tokens of a prompt. Host only.

A long prompt has many of them, so they stay in one array until somebody reads an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from jaxinfer.request import TokenLogprobs

_NUMBERS = 2  # columns before the most likely ids: logprob and rank of the token itself


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs(Sequence[TokenLogprobs]):
    """Entries of consecutive tokens, each made when it is asked for.

    `columns` is int32[tokens, 2 + 2 * top]: as `logprobs.logprob_columns` has them, with `top` of
    the most likely tokens each.
    """

    columns: np.ndarray

    @classmethod
    def of_columns(cls, columns: np.ndarray, top: int) -> PromptLogprobs:
        """Those of the device, which have the most likely tokens that anybody may ask for."""
        width = (columns.shape[1] - _NUMBERS) // 2
        return cls(
            np.concatenate(
                [
                    columns[:, : _NUMBERS + top],
                    columns[:, _NUMBERS + width : _NUMBERS + width + top],
                ],
                axis=1,
            )
        )

    @property
    def finite(self) -> bool:
        """Whether all are numbers: if one is not, the model's logits were none."""
        return bool(np.isfinite(self.columns[:, :1].view(np.float32)).all())

    def then(self, later: PromptLogprobs) -> PromptLogprobs:
        """These and those that follow them."""
        return PromptLogprobs(np.concatenate([self.columns, later.columns]))

    def parts(self, most: int) -> Iterator[PromptLogprobs]:
        """The same in pieces of at most so many tokens."""
        for first in range(0, len(self), most):
            yield PromptLogprobs(self.columns[first : first + most])

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> PromptLogprobs: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | PromptLogprobs:
        if isinstance(index, slice):
            return PromptLogprobs(self.columns[index])
        return entry(self.columns[index], (self.columns.shape[1] - _NUMBERS) // 2)


def entry(line: np.ndarray, top: int) -> TokenLogprobs:
    """One token's columns, int32[2 + 2 * most], with `top` of the most likely tokens."""
    values = _NUMBERS + (len(line) - _NUMBERS) // 2  # where their logprobs begin
    floats = line.view(np.float32)
    likely = zip(line[_NUMBERS : _NUMBERS + top].tolist(), floats[values : values + top].tolist())
    return TokenLogprobs(float(floats[0]), tuple(likely), int(line[1]))
