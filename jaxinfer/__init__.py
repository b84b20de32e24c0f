"""A JAX/XLA runtime that serves language models.

Importing this package imports no JAX: what needs it is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxinfer.platform import prepare

if TYPE_CHECKING:
    from jaxinfer.completion import Completion
    from jaxinfer.llm import LLM
    from jaxinfer.request import FinishReason, SamplingParams, Scheduling
    from jaxinfer.structured import StructuredOutput

__all__ = [
    "LLM",
    "Completion",
    "FinishReason",
    "SamplingParams",
    "Scheduling",
    "StructuredOutput",
]

_HOME = {
    "LLM": "jaxinfer.llm",
    "Completion": "jaxinfer.completion",
    "FinishReason": "jaxinfer.request",
    "SamplingParams": "jaxinfer.request",
    "Scheduling": "jaxinfer.request",
    "StructuredOutput": "jaxinfer.structured",
}

prepare()  # before anything can import JAX


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
