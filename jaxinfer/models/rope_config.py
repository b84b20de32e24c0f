"""The RoPE settings of a config.json.

transformers 5 writes `rope_parameters` (theta included, and by kind of layer where they differ);
older files `rope_theta` and `rope_scaling`. Both are read; what we do not compute is refused by
name, never ignored.
"""

from __future__ import annotations

import math
from typing import Any

from jaxinfer.config import RopeConfig
from jaxinfer.field_rules import agreed
from jaxinfer.models.hf_fields import HfConfig
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
_WHERE = "rope_parameters or rope_scaling"
USUAL_BASE = 10000.0
# Families whose own default is another, which their files always state.
_OTHER_BASES = (
    "cohere", "cohere2", "ernie4_5", "gemma3_text", "gpt_oss", "mixtral", "olmo3", "seed_oss",
    "smollm3",
)  # fmt: skip
_SAME_KIND = {"su": "longrope"}  # what early files called it


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """The RoPE settings of a config.json, old or new style, of layers that see everything.

    Raises ValueError for a rope_type or key we do not compute, and for settings that contradict
    one another.
    """
    hf = HfConfig(hf)
    theta = _base(hf, "full_attention")
    if theta is None and hf.get("model_type", "") in _OTHER_BASES:
        raise ValueError(
            "config.json lacks 'rope_theta', in rope_parameters or beside it; it has no common "
            "default here"
        )
    return _parse(hf, rope_settings(hf), USUAL_BASE if theta is None else theta)


def local_rope_config(hf: HfConfig, theta: float) -> RopeConfig:
    """Those of layers that see a window; `theta` is their base where none is given."""
    rope = hf.settings("rope_parameters").settings("sliding_attention")
    given = {
        "rope_parameters: sliding_attention: rope_theta": rope.get("rope_theta"),
        "rope_local_base_freq": hf.get("rope_local_base_freq"),
    }
    return _parse(hf, rope, agreed(given, theta))


def rope_settings(hf: HfConfig) -> HfConfig:
    """What a config.json says of layers that see everything, under either name.

    Raises ValueError if it says two things that differ.
    """
    names = ("rope_parameters", "rope_scaling")
    new, old = (_of_kind(hf, name, "full_attention") for name in names)
    if _scaling(new) and _scaling(old) and _scaling(new) != _scaling(old):
        agreed({"rope_parameters": dict(new), "rope_scaling": dict(old)})
    return new | old


def _of_kind(hf: HfConfig, name: str, kind: str) -> HfConfig:
    """Settings of one kind of layers, where they are apart."""
    settings = hf.settings(name)
    return settings.settings(kind) if kind in settings else settings


def _scaling(rope: HfConfig) -> dict[str, Any]:
    """What settings say beyond what has names elsewhere too."""
    elsewhere = ("rope_theta", "partial_rotary_factor", "type", "rope_type")
    said = {key: value for key, value in rope.items() if key not in elsewhere and value is not None}
    kind = _kind(rope)
    return said | ({} if kind is None else {"rope_type": kind})


def _base(hf: HfConfig, kind: str) -> float | None:
    """The base of the frequencies, which may stand in several places; None: in none."""
    given = {
        f"{name}: rope_theta": _of_kind(hf, name, kind).get("rope_theta")
        for name in ("rope_parameters", "rope_scaling")
    }
    given["rope_theta"] = hf.get("rope_theta")
    if hf.get("model_type", "") == "gpt_neox":
        given["rotary_emb_base"] = hf.get("rotary_emb_base")
    base: float | None = agreed(given)
    return base


def _kind(rope: HfConfig) -> str | None:
    kind = agreed({"rope_type": rope.get("rope_type"), "type": rope.get("type")})
    return None if kind is None else _SAME_KIND.get(kind, kind)


def _parse(hf: HfConfig, rope: HfConfig, theta: float) -> RopeConfig:
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{_WHERE}: per-layer settings ({', '.join(rope)}) not supported")
    kind = _kind(rope) or "default"
    if kind not in _FIELDS:
        known = ", ".join(name for name in _FIELDS if name != "divisors")
        raise ValueError(f"{_WHERE}: rope_type {kind!r} is not supported; known: {known}")
    fields = _FIELDS[kind]
    if unknown := rope.keys() - fields.keys() - _SHARED:
        raise ValueError(f"{_WHERE}: rope_type {kind!r}: unknown keys {sorted(unknown)}")
    if missing := [key for key in _REQUIRED.get(kind, ()) if rope.get(key) is None]:
        raise ValueError(f"{_WHERE}: rope_type {kind!r} lacks {sorted(missing)}")
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
    return RopeConfig(theta=float(rope.get("rope_theta") or theta), scaling=scaling, **values)


def _longrope_attention_factor(hf: HfConfig, rope: HfConfig, values: dict[str, Any]) -> float:
    """As published with Phi-3: grows with how far the context was extended."""
    original = values["original_max_position"]
    if original < 2:
        raise ValueError(f"original_max_position_embeddings = {original}, expected more than 1")
    factor = rope.get("factor") or hf["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _as_float(value: Any) -> Any:
    """JSON does not tell 8 from 8.0."""
    return float(value) if type(value) is int else value


def _yarn_attention_factor(rope: HfConfig) -> dict[str, float]:
    """The ratio of the two magnitude scales some YaRN configs give; {} without them."""
    mscale, all_dim = _as_float(rope.get("mscale")), _as_float(rope.get("mscale_all_dim"))
    if not (mscale and all_dim):
        return {}
    factor = float(rope["factor"])
    return {"attention_factor": yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)}
