"""What the methods of `LLM` take: options by name, one prompt or several, one thing for each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxinfer.config import EngineConfig
from jaxinfer.text import Prompt

FLAGS = {  # what the command line calls differently
    "kv_cache_memory": "kv_pool_bytes",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_offload_gib": "kv_offload_bytes",
    "no_overlap": "overlap",
    "tenant_weight": "tenant_weights",
}


def check_options(given: Mapping[str, Any]) -> None:
    """Require names of `EngineConfig`'s fields. Raises TypeError naming what was meant."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in given:
        if name in known:
            continue
        close = [FLAGS[name]] if name in FLAGS else difflib.get_close_matches(name, known, 2)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise TypeError(f"LLM has no option {name!r}{meant}; it has: {', '.join(sorted(known))}")


def several_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also when one was given bare: a text, token ids, or a conversation."""
    if isinstance(prompts, str):
        return [prompts]
    single = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)
    if single or (len(prompts) > 0 and isinstance(prompts[0], Mapping)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def one_each[T](
    prompts: Sequence[Prompt],
    given: T | Sequence[T] | None,
    default: T,
    name: str,
    kind: type | tuple[type, ...],
) -> Sequence[T]:
    """One for each prompt. Raises ValueError for a list of another length."""
    if given is None or isinstance(given, kind):
        return [default if given is None else cast("T", given)] * len(prompts)
    several = cast("Sequence[T]", given)
    if len(several) != len(prompts):
        raise ValueError(f"{len(several)} {name} for {len(prompts)} prompts; give one, or one each")
    return several
