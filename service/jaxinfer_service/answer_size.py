"""How much may be said of a prompt in one message: an answer is made whole before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.request import RequestError, Violation

MOST_ENTRIES = 1 << 18  # logprobs of a prompt in one answer: about 100 MB while it is made
LONG = 4096  # entries from which on an answer is made beside the event loop


def entries(prompts: Sequence[int], params: Mapping[str, Any]) -> int:
    """Logprobs that an answer has of prompts of so many tokens; each sample may repeat them."""
    top, n = params.get("prompt_logprobs"), params.get("n", 1)
    return 0 if top is None else n * (top + 1) * sum(tokens - 1 for tokens in prompts)


def check_entries(prompts: Sequence[int], params: Mapping[str, Any], instead: str) -> int:
    """`entries`. Raises RequestError where they are too many, saying what to do `instead`."""
    count = entries(prompts, params)
    if count > MOST_ENTRIES:
        why = (
            f"is {params['prompt_logprobs']}; of {sum(prompts)} prompt tokens that makes {count}"
            f" logprobs, and one answer has at most {MOST_ENTRIES}: ask for fewer, or {instead}"
        )
        raise RequestError([Violation("prompt_logprobs", why)])
    return count


async def aside[**P, T](count: int, work: Callable[P, T], *args: P.args, **how: P.kwargs) -> T:
    """What `work` gives; in a thread if it is about so many entries that others would wait."""
    if count < LONG:
        return work(*args, **how)
    return await asyncio.to_thread(work, *args, **how)
