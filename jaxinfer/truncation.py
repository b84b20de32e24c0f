"""Prompts that are to be cut rather than refused. Host only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.request import RequestError, SamplingParams, Violation
from jaxinfer.validation import EngineLimits

FITTING = -1  # as many tokens as fit
_FIELD = "truncate_prompt_tokens"


def truncated(
    prompt: Sequence[int], params: SamplingParams | Mapping[str, Any], limits: EngineLimits
) -> Sequence[int]:
    """The tokens of a prompt that `params` keep: all, or the last `truncate_prompt_tokens`.

    -1 leaves room for `max_new_tokens`, or for one token where nobody says how many. Raises
    RequestError for a number that keeps nothing, or more than a prompt may have.
    """
    given = params.get if isinstance(params, Mapping) else lambda name: getattr(params, name)
    keep, asked = given(_FIELD), given("max_new_tokens")
    if keep is None:
        return prompt
    most, whole = limits.max_tokens, isinstance(keep, int) and not isinstance(keep, bool)
    if not whole or not (keep == FITTING or 1 <= keep <= most):
        why = f"is {keep!r}; it must be from 1 to {most}, or {FITTING} for as many as fit"
        raise RequestError([Violation(_FIELD, why)])
    if keep == FITTING:
        outputs = asked if isinstance(asked, int) and 0 <= asked < most else 1
        keep = most - outputs
    return prompt[-keep:]
