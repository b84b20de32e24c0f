"""Sets of `EngineConfig` values for common uses. Whatever is given besides wins."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["online", "batch", "mixed"]

PRESETS: dict[Preset, dict[str, Any]] = {
    # Few tokens a step beside running streams: low time between tokens, and a short queue that
    # refuses early rather than late.
    "online": {
        "max_num_batched_tokens": 256,
        "tpot_target_ms": 100.0,
        "max_queued_requests": 256,
    },
    # Large steps, many sequences, a long queue: tokens a second and nothing else.
    "batch": {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "tpot_target_ms": None,
        "max_queued_requests": 16384,
    },
    # Interactive requests as in `online`; the batch class (priority 1 and up) fills what is left
    # and never takes the last quarter of slots and pages.
    "mixed": {
        "max_num_batched_tokens": 512,
        "tpot_target_ms": 100.0,
        "interactive_reserve": 0.25,
        "max_queued_requests": 4096,
    },
}


def preset_values(name: str) -> dict[str, Any]:
    """What a preset sets. Raises ValueError for a name that is none."""
    for known, values in PRESETS.items():
        if name == known:
            return dict(values)
    raise ValueError(f"preset is {name!r}; choose one of {', '.join(PRESETS)}")
