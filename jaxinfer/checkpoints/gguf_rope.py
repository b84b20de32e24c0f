"""Rotary settings of a GGUF file: part of them metadata, part of them tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxinfer.checkpoints.gguf_reader import GgufFile

DIVISORS = "rope_freqs.weight"  # llama3 scaling, one divisor for each frequency
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # longrope
_KINDS = ("none", "linear", "yarn", "longrope")
ROPE_TENSORS = {DIVISORS, SHORT, LONG}


def rope_parameters(file: GgufFile, get: Callable[..., Any]) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them; `get(key, default)` reads metadata.

    Raises ValueError for scalings that contradict one another.
    """
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10000.0)}
    kind, original = get("rope.scaling.type", "none"), "rope.scaling.original_context_length"
    if kind not in _KINDS:
        raise ValueError(
            f"rope.scaling.type = {kind!r} is not supported; known: {', '.join(_KINDS)}"
        )
    if found := ROPE_TENSORS & file.tensors.keys():
        if kind not in ("none", "longrope") or found not in ({DIVISORS}, {SHORT, LONG}):
            raise ValueError(f"rope scaling {kind!r} together with {', '.join(sorted(found))}")
        if found == {DIVISORS}:
            return rope | {"rope_type": "divisors", "divisors": file.floats(DIVISORS)}
        rope |= {"rope_type": "longrope"}
        rope |= {"short_factor": file.floats(SHORT), "long_factor": file.floats(LONG)}
        return rope | _given(
            get,
            attention_factor="rope.scaling.attn_factor",
            original_max_position_embeddings=original,
        )
    if kind == "none":
        get(original, None)  # says something only of a scaling
        return rope | {"rope_type": "default"}
    if kind == "longrope":
        raise ValueError(f"rope scaling 'longrope' without {SHORT} and {LONG}")
    rope |= {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        rope |= _given(
            get,
            original_max_position_embeddings=original,
            beta_fast="rope.scaling.yarn_beta_fast",
            beta_slow="rope.scaling.yarn_beta_slow",
        )
    return rope


def _given(get: Callable[..., Any], **keys: str) -> dict[str, Any]:
    """Those of the keys that the file has, under their names in config.json."""
    values = {name: get(key, None) for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}
