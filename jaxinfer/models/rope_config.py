"""The RoPE settings of a config.json.

transformers 5 writes `rope_parameters` (theta included, and by kind of layer where they differ);
older files `rope_theta` and `rope_scaling`. Both are read; what we do not compute is refused by
name, never ignored.
"""

from __future__ import annotations

import math
from typing import Any

from jaxinfer.config import RopeConfig
from jaxinfer.models.rope import yarn_magnitude

_SHARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIELDS = {  # Hugging Face key -> RopeConfig field, for every rope_type we compute
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "original_max_position_embeddings": "original_max_position",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "mscale": "",  # folded into attention_factor
        "mscale_all_dim": "",
    },
    "longrope": {
        "short_factor": "divisors",
        "long_factor": "long_divisors",
        "factor": "",  # folded into attention_factor
        "attention_factor": "attention_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "divisors": {"divisors": "divisors"},  # ours: what GGUF files carry instead of llama3's
}
_REQUIRED = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
    "divisors": {"divisors"},
}
USUAL_BASE = 10000.0
# Families whose own default is another, which their files always state.
_OTHER_BASES = (
    "cohere", "cohere2", "ernie4_5", "gemma3_text", "gpt_oss", "mixtral", "olmo3", "seed_oss",
    "smollm3",
)  # fmt: skip
_SAME_KIND = {"su": "longrope"}  # what early files called it


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """The RoPE settings of a config.json, old or new style, of layers that see everything.

    Raises ValueError for a rope_type or key we do not compute.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {rope!r}, expected settings by name")
    rope = rope.get("full_attention", rope)
    theta = hf.get("rope_theta")
    stated = theta is not None or rope.get("rope_theta") is not None
    if not stated and hf.get("model_type") in _OTHER_BASES:
        raise ValueError("config.json lacks 'rope_theta', which has no common default here")
    return _parse(hf, rope, USUAL_BASE if theta is None else theta)


def local_rope_config(hf: dict[str, Any], theta: float) -> RopeConfig:
    """Those of layers that see a window; `theta` is their base where none is given."""
    rope = (hf.get("rope_parameters") or {}).get("sliding_attention", {})
    return _parse(hf, rope, hf.get("rope_local_base_freq") or theta)


def _parse(hf: dict[str, Any], rope: dict[str, Any], theta: float) -> RopeConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = _SAME_KIND.get(kind, kind)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters: per-layer settings ({', '.join(rope)}) not supported")
    if kind not in _FIELDS:
        raise ValueError(f"rope_type {kind!r} is not supported; known: {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    if unknown := rope.keys() - fields.keys() - _SHARED:
        raise ValueError(f"rope_type {kind!r}: unknown keys {sorted(unknown)}")
    if missing := [key for key in _REQUIRED.get(kind, ()) if rope.get(key) is None]:
        raise ValueError(f"rope_type {kind!r} lacks {sorted(missing)}")
    values = {
        ours: _as_float(rope[key])
        for key, ours in fields.items()
        if ours and rope.get(key) is not None
    }
    if "original_max_position_embeddings" in fields:
        outer = hf.get("original_max_position_embeddings")  # where Phi-3 style files keep it
        values["original_max_position"] = int(
            outer or values.get("original_max_position") or hf["max_position_embeddings"]
        )
    if kind == "yarn" and "attention_factor" not in values:
        values |= _yarn_attention_factor(rope)
    if kind == "longrope" and "attention_factor" not in values:
        values["attention_factor"] = _longrope_attention_factor(hf, rope, values)
    for name in ("divisors", "long_divisors"):
        if name in values:
            values[name] = tuple(float(value) for value in values[name])
    scaling: Any = "none" if kind == "default" else kind
    own = rope.get("rope_theta")
    base = float(theta if own is None else own)
    return RopeConfig(theta=base, scaling=scaling, **values)


def _longrope_attention_factor(
    hf: dict[str, Any], rope: dict[str, Any], values: dict[str, Any]
) -> float:
    """As published with Phi-3: grows with how far the context was extended."""
    original = values["original_max_position"]
    factor = rope.get("factor") or hf["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _as_float(value: Any) -> Any:
    """JSON does not tell 8 from 8.0."""
    return float(value) if type(value) is int else value


def _yarn_attention_factor(rope: dict[str, Any]) -> dict[str, float]:
    """The ratio of the two magnitude scales some YaRN configs give; {} without them."""
    mscale, all_dim = _as_float(rope.get("mscale")), _as_float(rope.get("mscale_all_dim"))
    if not (mscale and all_dim):
        return {}
    factor = float(rope["factor"])
    return {"attention_factor": yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)}
