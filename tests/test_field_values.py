"""Whatever a field of config.json holds: the model is as it says, or it is refused by its name."""

from __future__ import annotations

import json
import math
import re
from typing import Any, ClassVar

import numpy as np
import pytest
from test_families import ORACLE_FAMILIES, ORACLES
from tiny_checkpoint import hf_config as llama_config

from jaxinfer.models import hf_config
from jaxinfer.models.hf_config import model_config
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.rope import inverse_frequencies

ODD: list[Any] = [None, True, 0, -1, 1.5, 1e30, 1e-30, math.nan, 2**70, "x", [], ["x"], {"a": 1}]
ABSENT = object()


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    if family == "llama":
        hf = llama_config("llama3")
    else:
        hf = json.loads((ORACLES / family / "config.json").read_text())
    return {key: value for key, value in (hf | changes).items() if value is not ABSENT}


class Recorder(HfConfig):
    """Remembers which fields were read."""

    fields: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        self.fields.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.fields.add(key)
        return super().get(key, default)


def fields_of(hf: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields that are read of a config."""
    Recorder.fields = set()
    with monkeypatch.context() as patched:
        patched.setattr(hf_config, "HfConfig", Recorder)
        model_config(hf)
    return Recorder.fields - {"full_attention", "sliding_attention"}  # within others


def check(hf: dict[str, Any], field: str, value: Any) -> None:
    """A config that the model's arithmetic can do with, or an error that names the field."""
    try:
        config = model_config(hf)
    except ValueError as error:
        names = [field, *(value if isinstance(value, dict) else [])]
        assert re.search(rf"\b({'|'.join(names)})\b", str(error)), f"{field} = {value!r}: {error}"
        return
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            inv, factor = inverse_frequencies(rope, config.rotary_dim or config.head_dim)
            assert np.isfinite(inv).all() and math.isfinite(factor), (field, value)


@pytest.mark.parametrize("family", ["llama", *ORACLE_FAMILIES])
def test_a_value_of_any_kind_is_taken_or_refused_by_the_fields_name(family, monkeypatch):
    hf = tiny(family)
    for field in sorted(fields_of(hf, monkeypatch)):
        for value in ODD:
            check(hf | {field: value}, field, value)
    rope = hf.get("rope_parameters") or {}
    apart = "full_attention" in rope
    inner = rope["full_attention"] if apart else rope
    for field in inner:
        for value in ODD:
            changed = inner | {field: value}
            rope = rope | {"full_attention": changed} if apart else changed
            check(hf | {"rope_parameters": rope}, field, value)


@pytest.mark.parametrize("family", ORACLE_FAMILIES)
def test_a_required_field_that_is_null_is_said_to_be(family):
    for field in ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer"):
        if field in tiny(family):
            with pytest.raises(ValueError, match=rf"^{field} is null; expected an integer from 1"):
                model_config(tiny(family, **{field: None}))


def test_a_field_without_a_rule_cannot_be_read():
    with pytest.raises(LookupError, match="no rule says what 'hiden_size' may be"):
        HfConfig({"hiden_size": 3}).get("hiden_size")


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}
LINEAR = {"type": "linear", "factor": 2.0}
REFUSED = [
    ("mistral", {"sliding_window": 0}, "sliding_window = 0, expected an integer from 1"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window = None, but layers want one"),
    ("gpt_oss", {"sliding_window": ABSENT}, "sliding_window = None, but layers want one"),
    (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
        "layers want one; give it .and use_sliding_window true",
    ),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for num_hidden_layers = 2"),
    ("smollm3", {"no_rope_layers": []}, "no_rope_layers has 0 entries"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers = .1, 2., expected a list, each"),
    ("smollm3", {"no_rope_layers": [True, False]}, "no_rope_layers = .True, False."),
    ("mistral", {"architectures": ["FooForCausalLM"]}, "contradicts model_type = 'mistral'"),
    ("mistral", {"architectures": "MistralForCausalLM"}, "architectures = .*expected a list"),
    ("mistral", {"num_key_value_heads": 0}, "num_key_value_heads = 0, expected"),
    ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
    ("falcon", {"num_kv_heads": -1}, "num_kv_heads = -1, expected"),
    ("mistral", {"head_dim": 0}, "head_dim = 0, expected"),
    ("mistral", {"rope_scaling": LINEAR, "rope_parameters": YARN}, "contradicts rope_scaling"),
    ("mistral", {"rope_theta": 5e5, "rope_parameters": YARN}, "contradicts rope_theta = 500000"),
    ("olmo2", {"rope_parameters": {"type": "yarn", **LINEAR, "rope_type": "yarn"}}, "contradicts"),
    ("gemma3_text", {"rope_local_base_freq": 77.0}, "contradicts rope_local_base_freq = 77"),
    ("gpt_neox", {"rotary_emb_base": 77.0}, "contradicts rotary_emb_base = 77"),
    ("phi", {"partial_rotary_factor": 0.25}, "partial_rotary_factor .* = 0.25 contradicts"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, expected a number"),
    ("gemma3_text", {"query_pre_attn_scalar": -3}, "query_pre_attn_scalar = -3, expected"),
    ("granite", {"logits_scaling": 0}, "logits_scaling = 0, expected a number from"),
    ("cohere", {"logit_scale": None}, "logit_scale is null; expected a number from"),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit is null; expected a number"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0, expected an integer"),
    ("deepseek_v2", {"n_routed_experts": None}, "n_routed_experts is null; expected an integer"),
    ("deepseek_v3", {"n_routed_experts": None}, "n_routed_experts is null; expected an integer"),
    ("qwen2", {"attention_dropout": 0, "tie_word_embeddings": "false"}, "tie_word_embeddings = 'f"),
]


@pytest.mark.parametrize(
    ("family", "changes", "message"), REFUSED, ids=[f"{f}-{'-'.join(c)}" for f, c, _ in REFUSED]
)
def test_what_was_accepted_or_unclear(family, changes, message):
    with pytest.raises(ValueError, match=message):
        model_config(tiny(family, **changes))


def test_factors_given_as_text():
    scaling = {"type": "longrope", "short_factor": "1, 2", "long_factor": [1.0] * 8}
    with pytest.raises(ValueError, match="short_factor = '1, 2', expected a list"):
        model_config(tiny("phi3", rope_parameters=ABSENT, rope_scaling=scaling))


def test_settings_that_agree_may_be_given_twice():
    both = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1000}
    plain = model_config(tiny("mistral", rope_parameters=YARN))
    assert model_config(tiny("mistral", rope_parameters=YARN, **both)) == plain
    named = model_config(tiny("mistral", architectures=["MistralForCausalLM"]))
    assert named == model_config(tiny("mistral", architectures=ABSENT))


def test_layers_that_do_not_rotate_see_the_window():
    """As transformers has it for files without layer_types."""
    hf = tiny("smollm3", layer_types=None, use_sliding_window=True, sliding_window=8)
    kinds = model_config(hf | {"no_rope_layers": [1, 0]}).kinds
    assert [(kind.window, kind.rope) for kind in kinds] == [(None, "global"), (8, "none")]
