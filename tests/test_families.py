"""Every family against transformers' logits, and proof that each of its features is noticed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoint import dense_logits, write_tokenizer

from jaxinfer.checkpoints import LoadedModel, load_model
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import FAMILIES

pytestmark = pytest.mark.usefixtures("quick_compiler")

ORACLES = Path(__file__).parent / "fixtures" / "oracles"
ORACLE_FAMILIES = sorted(f.parent.name for f in ORACLES.glob("*/config.json"))
TOLERANCE, NOTICED = 1e-4, 4e-4  # of the largest logit


def family_folder(folder: Path, family: str) -> Path:
    """A Hugging Face folder of a family's oracle."""
    shutil.copytree(ORACLES / family, folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder


def oracle(family: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(ORACLES / family / "expected.npz") as data:
        return data["tokens"], data["logits"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("families")
    return {
        family: load_model(family_folder(folder / family, family), dtype="float32")
        for family in ORACLE_FAMILIES
    }


def difference(config: ModelConfig, params: Any, family: str) -> float:
    tokens, wanted = oracle(family)
    found = dense_logits(config, params, tokens)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_every_family_has_an_oracle():
    families = {name for name, family in FAMILIES.items() if isinstance(family, ModuleType)}
    assert families - {"llama"} == set(ORACLE_FAMILIES), "llama's is in test_llama_oracle.py"


@pytest.mark.parametrize("family", ORACLE_FAMILIES)
def test_logits_equal_transformers(models, family):
    model = models[family]
    assert difference(model.config, model.params, family) < TOLERANCE
    assert ModelConfig.from_json(json.loads(json.dumps(model.config.to_json()))) == model.config


def without(**changes: Any) -> Any:
    return lambda c: dataclasses.replace(c, **changes)


def kinds(**changes: Any) -> Any:
    return lambda c: dataclasses.replace(
        c, kinds=tuple(dataclasses.replace(kind, **changes) for kind in c.kinds)
    )


def rope(**changes: Any) -> Any:
    return lambda c: dataclasses.replace(c, rope=dataclasses.replace(c.rope, **changes))


def moe(**changes: Any) -> Any:
    return lambda c: dataclasses.replace(c, moe=dataclasses.replace(c.moe, **changes))


FEATURES = {
    "mistral": {"window": kinds(window=None), "its size": kinds(window=9)},
    "qwen2": {"windows": kinds(window=None), "which layers": kinds(window=8)},
    "gemma2": {
        "windows": kinds(window=None),
        "which layers": lambda c: dataclasses.replace(c, kinds=c.kinds[::-1]),
        "scale": without(attention_scale=None),
        "attention cap": without(attention_soft_cap=None),
        "logit cap": without(logit_soft_cap=None),
        "embedding scale": without(embedding_multiplier=1.0),
        "norm offset": without(norm_offset=0.0),
        "activation": without(activation="silu"),
        "tanh form": without(activation="gelu"),
    },
    "gemma3_text": {
        "windows": kinds(window=None),
        "local rope": kinds(rope="global"),
        "rope scaling": rope(scaling="none"),
        "scale": without(attention_scale=None),
    },
    "phi3": {
        "window": kinds(window=None),
        "long factors": lambda c: dataclasses.replace(c, rope=c.rope.served(16)),
        "attention factor": rope(attention_factor=1.0),
    },
    "granite": {
        "embedding multiplier": without(embedding_multiplier=1.0),
        "residual multiplier": without(residual_multiplier=1.0),
        "attention multiplier": without(attention_scale=None),
        "logit multiplier": without(logit_multiplier=1.0),
    },
    "smollm3": {
        "layers without rope": kinds(rope="global"),
        "which layers": lambda c: dataclasses.replace(c, kinds=c.kinds[::-1]),
    },
    "mixtral": {
        "window": kinds(window=None),
        "how many experts": lambda c: dataclasses.replace(
            c, moe=dataclasses.replace(c.moe, top_k=1)
        ),
        "normalised weights": lambda c: dataclasses.replace(
            c, moe=dataclasses.replace(c.moe, normalised=False)
        ),
    },
    "qwen2_moe": {
        "weights as they are": lambda c: dataclasses.replace(
            c, moe=dataclasses.replace(c.moe, normalised=True)
        ),
        "shared expert": lambda c: dataclasses.replace(
            c, moe=dataclasses.replace(c.moe, shared_size=0)
        ),
    },
    "qwen3_moe": {
        "normalised weights": lambda c: dataclasses.replace(
            c, moe=dataclasses.replace(c.moe, normalised=False)
        ),
    },
    "deepseek_v2": {
        "scale": without(attention_scale=16**-0.5),
        "rope scaling": rope(scaling="none"),
        "attention factor": rope(attention_factor=1.0),
        "pairs": without(rope_pairs="halves"),
        "groups": moe(groups=1, top_groups=1),
        "their best expert": moe(groups=2, top_groups=1),
        "weights as they are": moe(normalised=True),
        "weight scale": moe(weight_scale=1.0),
        "shared experts": moe(shared_size=0),
    },
    "deepseek_v3": {
        "scale": without(attention_scale=16**-0.5),
        "rope scaling": rope(scaling="none"),
        "pairs": without(rope_pairs="halves"),
        "groups": moe(groups=1, top_groups=1),
        "sigmoid": moe(scoring="softmax"),
        "normalised weights": moe(normalised=False),
        "weight scale": moe(weight_scale=1.0),
        "shared expert": moe(shared_size=0),
    },
    "gpt_oss": {
        "windows": kinds(window=None),
        "which layers": lambda c: dataclasses.replace(c, kinds=c.kinds[::-1]),
        "rope scaling": rope(scaling="none"),
        "attention factor": rope(attention_factor=1.0),
        "bounds not rounded": rope(truncate=True),
        "bounds": rope(beta_fast=32.0),
        "how many experts": moe(top_k=1),
        "softmax of the best": moe(normalised=False),
        "biases of experts": moe(bias=False),
        "clamped swiglu": moe(swiglu_limit=None),
        "its limit": moe(swiglu_limit=7.0),
        "its sigmoid": moe(swiglu_alpha=1.0),
    },
    "glm4": {"pairs": without(rope_pairs="halves"), "part that rotates": without(rotary_dim=None)},
    "glm4_moe": {
        "pairs": without(rope_pairs="neighbours"),
        "part that rotates": without(rotary_dim=None),
        "norms of heads": without(qk_norm="none"),
        "groups": moe(groups=1, top_groups=1),
        "sigmoid": moe(scoring="softmax"),
        "normalised weights": moe(normalised=False),
        "weight scale": moe(weight_scale=1.0),
        "shared expert": moe(shared_size=0),
    },
    "dots1": {
        "windows": kinds(window=None),
        "norms of heads": without(qk_norm="none"),
        "groups": moe(groups=1, top_groups=1),
        "sigmoid": moe(scoring="softmax"),
        "normalised weights": moe(normalised=False),
        "weight scale": moe(weight_scale=1.0),
        "shared experts": moe(shared_size=0),
    },
}


@pytest.mark.parametrize(
    ("family", "feature"), [(f, name) for f, features in FEATURES.items() for name in features]
)
def test_the_oracle_notices_a_feature_that_is_switched_off(models, family, feature):
    model = models[family]
    changed = FEATURES[family][feature](model.config)
    assert changed != model.config
    assert difference(changed, model.params, family) > NOTICED


@pytest.mark.parametrize(
    ("family", "weight", "value"),
    [
        ("qwen2", "qkv_bias", 0.0),
        ("glm4", "qkv_bias", 0.0),
        ("qwen3", "q_norm", 1.0),
        ("qwen3", "k_norm", 1.0),
        ("olmo2", "q_norm", 1.0),
        ("olmo2", "k_norm", 1.0),
        ("olmo2", "attn_post_norm", 1.0),
        ("olmo2", "mlp_post_norm", 1.0),
        ("gemma2", "attn_post_norm", 0.0),
        ("gemma2", "mlp_norm", 0.0),
        ("gemma3_text", "q_norm", 0.0),
        ("gemma3_text", "mlp_post_norm", 0.0),
        ("olmoe", "q_norm", 1.0),
        ("olmoe", "k_norm", 1.0),
        ("qwen3_moe", "q_norm", 1.0),
        ("qwen2_moe", "shared_gate", 0.0),
        ("qwen2_moe", "router", 0.0),
        ("deepseek_v2", "kv_a_bias", 0.0),
        ("deepseek_v2", "o_bias", 0.0),
        ("deepseek_v2", "kv_a_norm", 1.0),
        ("deepseek_v3", "q_a_norm", 1.0),
        ("deepseek_v3", "q_a_bias", 0.0),
        ("deepseek_v3", "kv_a_norm", 1.0),
        ("deepseek_v3", "correction", 0.0),
        ("gpt_oss", "sinks", -1e9),
        ("gpt_oss", "qkv_bias", 0.0),
        ("gpt_oss", "o_bias", 0.0),
        ("gpt_oss", "router_bias", 0.0),
        ("gpt_oss", "experts_gate_up_bias", 0.0),
        ("gpt_oss", "experts_down_bias", 0.0),
        ("glm4_moe", "qkv_bias", 0.0),
        ("glm4_moe", "correction", 0.0),
        ("dots1", "correction", 0.0),
        ("glm4", "attn_post_norm", 1.0),
        ("glm4", "mlp_post_norm", 1.0),
    ],
)
def test_the_oracle_notices_a_weight_that_is_left_out(models, family, weight, value):
    model = models[family]
    layers = [dict(layer) for layer in model.params["layers"]]
    layers[-1][weight] = jnp.full_like(layers[-1][weight], value)
    changed = dict(model.params, layers=layers)
    assert difference(model.config, changed, family) > NOTICED


def test_longrope_chooses_by_the_length_it_is_served_at(models):
    config = models["phi3"].config
    assert config.rope.served(17) == config.rope
    short = config.rope.served(16)
    assert (short.scaling, short.divisors) == ("divisors", config.rope.divisors)
    assert short.attention_factor == config.rope.attention_factor
    with np.load(ORACLES / "phi3" / "expected.npz") as data:
        tokens, wanted, long = data["tokens"][:16], data["short"], data["logits"][:16]
    served = dataclasses.replace(config, rope=short)
    found = dense_logits(served, models["phi3"].params, tokens)
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    assert np.abs(long - wanted).max() > NOTICED * np.abs(wanted).max()


def test_kinds_of_layers(models):
    assert models["gemma3_text"].config.kinds == (
        LayerKind(8, "local"), LayerKind(8, "local"), LayerKind(),
    )  # fmt: skip
    assert models["qwen2"].config.kinds == (LayerKind(), LayerKind(8))
    assert models["dots1"].config.kinds == (
        LayerKind(), LayerKind(moe=True), LayerKind(8, moe=True),
    )  # fmt: skip
    for family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        assert [kind.moe for kind in models[family].config.kinds] == [False, True, True]
