"""Hugging Face config.json → ModelConfig: the family is chosen by `model_type`.

What we do not compute is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxinfer.config import ModelConfig, MoeConfig, RopeConfig
from jaxinfer.models import family_of
from jaxinfer.models.hf_quantization import fp8_block
from jaxinfer.models.rope_config import rope_config

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
    # GPT-2's name for the same thing is from before there was a common one.
    if architectures and not any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures):
        raise ValueError(f"architectures = {architectures}: only ...ForCausalLM models are served")
    fp8_block(hf)  # refuses what no reader knows
    for key in ("num_hidden_layers", "n_layer"):  # before a list of so many is made
        count, limit = hf.get(key, 1), _LIMITS["num_layers"]
        if type(count) is int and count > limit:
            raise ValueError(f"num_layers = {count}, expected an integer from 1 to {limit}")
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
    if c.head_dim % 2 and any(c.kind(i).rope != "none" for i in range(c.num_layers)):
        raise ValueError(f"head_dim = {c.head_dim} is odd; RoPE rotates pairs")
    _check_positive("rms_norm_eps", c.rms_norm_eps)
    for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier", "scale"):
        _check_positive(name, getattr(c, name))
    for name in ("attention_soft_cap", "logit_soft_cap", "qkv_clip"):
        if getattr(c, name) is not None:
            _check_positive(name, getattr(c, name))
    if c.rotary_dim is not None and not (0 < c.rotary_dim < c.head_dim and c.rotary_dim % 2 == 0):
        raise ValueError(f"{c.rotary_dim} of {c.head_dim} values of a head rotate; expected pairs")
    for kind in c.kinds:
        if kind.window is not None and (type(kind.window) is not int or kind.window < 1):
            raise ValueError(f"sliding_window = {kind.window!r}, expected a positive integer")
    for rope in (c.rope, c.local_rope):
        if rope is not None:
            _check_rope(rope, (c.rotary_dim or c.head_dim) // 2)
    if c.moe is not None:
        _check_moe(c.moe)


def _check_moe(m: MoeConfig) -> None:
    limits = {"num_experts": 1 << 16, "top_k": m.num_experts, "intermediate_size": 1 << 22}
    for name, limit in limits.items():
        value = getattr(m, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"experts: {name} = {value!r}, expected an integer from 1 to {limit}")
    if type(m.shared_size) is not int or not 0 <= m.shared_size <= 1 << 22:
        raise ValueError(f"experts: shared_size = {m.shared_size!r}, expected a size or 0")
    if m.swiglu_limit is not None:
        _check_positive("swiglu_limit", m.swiglu_limit)
        _check_positive("swiglu_alpha", m.swiglu_alpha)


def _check_rope(rope: RopeConfig, pairs: int) -> None:
    for name, value in dataclasses.asdict(rope).items():
        numbers = value if isinstance(value, tuple) else [value]
        if name not in ("scaling", "truncate") and value is not None:
            for number in numbers:
                _check_positive(f"RoPE {name}", number)
    if rope.theta <= 1:
        raise ValueError(f"RoPE theta = {rope.theta}, expected more than 1")
    for divisors in (rope.divisors, rope.long_divisors):
        if divisors and len(divisors) != pairs:
            raise ValueError(f"{len(divisors)} RoPE divisors, expected {pairs}")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(
            f"RoPE low_freq_factor = {rope.low_freq_factor} is not below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name} = {value!r}, expected a positive number")
