"""Hugging Face config.json → ModelConfig: the family is chosen by `model_type`, RoPE read here.

transformers 5 writes `rope_parameters` (theta included); older files `rope_theta` and
`rope_scaling`. Both are read; what we do not compute is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models import family_of
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
    "divisors": {"divisors": "divisors"},  # ours: what GGUF files carry instead of llama3's
}
_LIMITS = {  # far above any model there is: larger ones are damaged files
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position": 1 << 30,
}
_REQUIRED = {"factor", "low_freq_factor", "high_freq_factor", "divisors"}


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a parsed config.json.

    Raises ValueError naming the key: unknown model_type or architecture, missing keys, features
    the family does not compute, quantised storage, contradictory sizes.
    """
    try:
        config = _model_config(hf)
        check_sizes(config)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json has a value of the wrong kind: {error}") from error
    return config


def _model_config(hf: dict[str, Any]) -> ModelConfig:
    model_type = hf.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json has no model_type")
    family = family_of(model_type)
    architectures = hf.get("architectures") or []
    if architectures and not any(a.endswith("ForCausalLM") for a in architectures):
        raise ValueError(f"architectures = {architectures}: only ...ForCausalLM models are served")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config: weights stored as {method!r} cannot be read; take the "
            "unquantised checkpoint or a GGUF file"
        )
    return family.config_from_hf(hf, rope_config(hf))


def check_sizes(c: ModelConfig) -> None:
    """Raise ValueError for sizes that no model can have, or that contradict one another."""
    for name, limit in _LIMITS.items():
        value = getattr(c, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} = {value!r}, expected an integer from 1 to {limit}")
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"num_kv_heads = {c.num_kv_heads} does not divide num_heads = {c.num_heads}"
        )
    if c.head_dim % 2:
        raise ValueError(f"head_dim = {c.head_dim} is odd; RoPE rotates pairs")
    _check_positive("rms_norm_eps", c.rms_norm_eps)
    for name, value in dataclasses.asdict(c.rope).items():
        numbers = value if isinstance(value, tuple) else [value]
        if name not in ("scaling", "truncate") and value is not None:
            for number in numbers:
                _check_positive(f"RoPE {name}", number)
    if c.rope.theta <= 1:
        raise ValueError(f"RoPE theta = {c.rope.theta}, expected more than 1")
    if c.rope.scaling == "divisors" and len(c.rope.divisors) != c.head_dim // 2:
        raise ValueError(f"{len(c.rope.divisors)} RoPE divisors, expected {c.head_dim // 2}")
    if c.rope.scaling == "llama3" and c.rope.low_freq_factor >= c.rope.high_freq_factor:
        raise ValueError(
            f"RoPE low_freq_factor = {c.rope.low_freq_factor} is not below "
            f"high_freq_factor = {c.rope.high_freq_factor}"
        )


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name} = {value!r}, expected a positive number")


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """The RoPE settings of a config.json, old or new style.

    Raises ValueError for a rope_type or key we do not compute.
    """
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters: per-layer settings ({', '.join(rope)}) not supported")
    if kind not in _FIELDS:
        raise ValueError(f"rope_type {kind!r} is not supported; known: {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    if unknown := rope.keys() - fields.keys() - _SHARED:
        raise ValueError(f"rope_type {kind!r}: unknown keys {sorted(unknown)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {rope['partial_rotary_factor']} not supported")
    if missing := [key for key in fields.keys() & _REQUIRED if rope.get(key) is None]:
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
    if kind == "divisors":
        values["divisors"] = tuple(values["divisors"])
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    return RopeConfig(theta=theta, scaling="none" if kind == "default" else kind, **values)


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
