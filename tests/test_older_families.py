"""Families with layer norms, plain MLPs, learned positions and halves side by side.

Beside what `test_families.py` asks of every family: settings that change what the same weights
compute, each feature switched off, their published configs and files, several devices.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from test_families import (
    NOTICED,
    ORACLES,
    TOLERANCE,
    difference,
    family_folder,
    kinds,
    oracle,
    without,
)
from tiny_checkpoint import dense_logits

from jaxinfer import startup
from jaxinfer.checkpoints import CheckpointError, LoadedModel, inspect_checkpoint, load_model
from jaxinfer.config import EngineConfig, ModelConfig, RopeConfig
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config
from jaxinfer.params import named_leaves
from jaxinfer.sharding import ShardingError, make_mesh, param_shardings

FAMILIES = [
    *("arcee", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "glm", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gptj", "nemotron", "olmo", "olmo3", "opt", "phi", "seed_oss", "stablelm"),
    "starcoder2",
]
FORM_NOTICED = 1.5e-4  # of GELU's two forms, which are never further apart than 5e-4
VARIANTS = [
    (family, name)
    for family in FAMILIES
    if (ORACLES / family / "variants.json").is_file()
    for name in json.loads((ORACLES / family / "variants.json").read_text())
]


pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("families")
    return {
        family: load_model(family_folder(folder / family, family), dtype="float32")
        for family in FAMILIES
    }


def hf_config(family: str) -> dict[str, Any]:
    return json.loads((ORACLES / family / "config.json").read_text())


def tensors_of(family: str) -> dict[str, np.ndarray]:
    with safe_open(ORACLES / family / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_a_setting_changes_what_it_changes_in_transformers(models, family, variant):
    changes = json.loads((ORACLES / family / "variants.json").read_text())[variant]
    config = model_config(hf_config(family) | changes)
    assert config != models[family].config
    with np.load(ORACLES / family / "expected.npz") as data:
        tokens, plain, wanted = data["tokens"], data["logits"], data[variant]
    found = dense_logits(config, models[family].params, tokens)
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    least = FORM_NOTICED if variant == "exact gelu" else NOTICED
    assert np.abs(plain - wanted).max() > least * np.abs(wanted).max()


def one_after_the_other(c: ModelConfig) -> ModelConfig:
    return without(norms="pre", parallel=False)(c)


FEATURES = {
    "gpt2": {
        "positions": without(learned_positions=False),
        "layer norm": without(norm_type="rms"),
        "tanh form": without(activation="gelu"),
        "epsilon": without(rms_norm_eps=1e-5),
        "no rope": kinds(rope="global"),
    },
    "gpt_neox": {
        "parallel": without(parallel=False),
        "part that rotates": without(rotary_dim=None),
        "rope base": without(rope=RopeConfig()),
        "exact form": without(activation="gelu_tanh"),
    },
    "gemma": {
        "embedding scale": without(embedding_multiplier=1.0),
        "norm offset": without(norm_offset=0.0),
        "tanh form": without(activation="gelu"),
    },
    "starcoder2": {"window": kinds(window=None), "layer norm": without(norm_type="rms")},
    "stablelm": {"part that rotates": without(rotary_dim=None)},
    "phi": {
        "halves side by side": one_after_the_other,
        "head's bias": without(head_bias=False),
        "part that rotates": without(rotary_dim=None),
    },
    "cohere": {
        "halves side by side": one_after_the_other,
        "pairs": without(rope_pairs="halves"),
        "logit scale": without(logit_multiplier=1.0),
    },
    "cohere2": {
        "window": kinds(window=None),
        "layers without rope": kinds(rope="global"),
        "which layers": lambda c: without(kinds=c.kinds[::-1])(c),
    },
    "gpt_bigcode": {"positions": without(learned_positions=False)},
    "gptj": {
        "halves side by side": one_after_the_other,
        "head's bias": without(head_bias=False),
        "pairs": without(rope_pairs="halves"),
        "part that rotates": without(rotary_dim=None),
    },
    "falcon": {"parallel": without(parallel=False), "exact form": without(activation="gelu_tanh")},
    "nemotron": {
        "norm offset": without(norm_offset=0.0),
        "layer norm": without(norm_type="rms"),
        "squared": without(activation="relu"),
        "part that rotates": without(rotary_dim=None),
    },
    "arcee": {"squared": without(activation="relu")},
    "ernie4_5": {"pairs": without(rope_pairs="halves")},
    "glm": {"pairs": without(rope_pairs="halves"), "part that rotates": without(rotary_dim=None)},
    "olmo3": {
        "windows": kinds(window=None),
        "rope of windows": kinds(rope="global"),
        "which layers": lambda c: without(kinds=c.kinds[::-1])(c),
    },
    "olmo": {"layer norm": without(norm_type="rms", norm_weight=False)},
    "opt": {
        "activation": without(activation="gelu"),
        "positions": without(learned_positions=False),
    },
}


@pytest.mark.parametrize(
    ("family", "feature"), [(f, name) for f, features in FEATURES.items() for name in features]
)
def test_the_oracle_notices_a_feature_that_is_switched_off(models, family, feature):
    model, changed = models[family], FEATURES[family][feature](models[family].config)
    assert changed != model.config
    params = model.params
    if changed.norms != model.config.norms:  # the halves' norms are alike
        biases = {"mlp_norm_bias": "attn_norm_bias"} if changed.norm_bias else {}
        copies = {"mlp_norm": "attn_norm"} | biases
        layers = [p | {new: p[old] for new, old in copies.items()} for p in params["layers"]]
        params = dict(params, layers=layers)
    if changed.norm_type == "rms" and not changed.norm_weight:  # RMSNorm has a weight
        ones = jnp.ones(changed.hidden_size)
        layers = [dict(layer, attn_norm=ones, mlp_norm=ones) for layer in params["layers"]]
        params = dict(params, layers=layers, final_norm=ones)
    least = FORM_NOTICED if feature.endswith("form") else NOTICED
    assert difference(changed, params, family) > least


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_notices_every_bias_and_norm_that_is_left_out(models, family):
    model = models[family]
    layers, names = model.params["layers"], [n for n in model.params["layers"][-1] if "_norm" in n]
    names += [name for name in layers[-1] if name.endswith("_bias") and name not in names]
    assert family == "olmo" or len(names) > 0
    for name in names:
        blank = jnp.full_like(layers[-1][name], 0.0 if name.endswith("_bias") else 1.0)
        changed = dict(model.params, layers=[*layers[:-1], dict(layers[-1], **{name: blank})])
        assert difference(model.config, changed, family) > NOTICED, name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_bigcode"])
def test_sharded_over_two_devices_it_is_the_same_model(models, family):
    model = models[family]
    specs = family_of(family).param_specs(model.config)
    placement = param_shardings(specs, make_mesh(jax.devices(), 2))
    sharded = jax.device_put(model.params, placement)
    split = {
        name.rpartition(".")[2]
        for name, array in named_leaves(sharded)
        if array.addressable_shards[0].data.size < array.size
    }
    inner = {"gate_up", "down"} if model.config.gated else {"up", "down"}
    assert {"embed", "qkv", "o"} | inner <= split
    assert not model.config.mlp_bias or {"up_bias", "gate_up_bias"} & split
    assert model.config.qk_norm != "each" or {"q_norm", "k_norm"} <= split
    assert difference(model.config, sharded, family) < TOLERANCE


def test_one_key_head_for_all_queries_cannot_be_split(models):
    specs = family_of("gpt_bigcode").param_specs(models["gpt_bigcode"].config)
    with pytest.raises(ShardingError, match=r"'kv_heads' of size 1 does not divide over the 2"):
        param_shardings(specs, make_mesh(jax.devices(), 2))


ODD: list[Any] = [None, True, "x", -1, 0, 1.5, math.nan, math.inf, 10**30, [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_any_kind_are_taken_or_refused(family):
    """No value in config.json gives anything but a usable config or a ValueError."""
    hf = hf_config(family)
    for key, value in ((key, value) for key in hf for value in ODD):
        try:
            config = model_config(hf | {key: value})
        except ValueError:
            continue
        assert ModelConfig.from_json(config.to_json()) == config, (key, value)
        assert type(config.tie_embeddings) is bool and math.isfinite(config.rms_norm_eps)
        hash(config)


def rewritten(folder: Path, family: str, change: Any) -> Path:
    """A family's folder whose tensors went through `change`."""
    shutil.rmtree(folder, ignore_errors=True)
    family_folder(folder, family)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in change(tensors_of(family)).items()},
        folder / "model.safetensors",
    )
    return folder


def test_gpt2_files_without_the_prefix_and_with_buffers(models, tmp_path):
    """As the published files are: saved without the head, masks among the weights."""

    def published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
        made |= {f"h.{i}.attn.bias": mask for i in range(2)}
        return made | {"h.0.attn.masked_bias": np.float32([-1e4])}

    loaded = load_model(rewritten(tmp_path / "gpt2", "gpt2", published), dtype="float32")
    assert difference(loaded.config, loaded.params, "gpt2") < TOLERANCE
    sizes = [array.size for _, array in named_leaves(loaded.params)]
    assert inspect_checkpoint(tmp_path / "gpt2").parameters == sum(sizes)


def test_copies_of_the_tied_head_are_taken_and_other_heads_refused(tmp_path):
    def with_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}

    def other_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"][::-1]}

    load_model(rewritten(tmp_path / "copy", "gpt2", with_head))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: it differs from the emb"):
        load_model(rewritten(tmp_path / "other", "gpt2", other_head))


def test_pythia_files_with_buffers(tmp_path):
    def published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        layer = "gpt_neox.layers.0.attention."
        return tensors | {
            f"{layer}bias": np.tril(np.ones((1, 1, 64, 64), bool)),
            f"{layer}masked_bias": np.float32(-1e9).reshape(()),
            f"{layer}rotary_emb.inv_freq": np.ones(4, np.float32),
        }

    loaded = load_model(rewritten(tmp_path, "gpt_neox", published), dtype="float32")
    assert difference(loaded.config, loaded.params, "gpt_neox") < TOLERANCE


def test_a_config_that_contradicts_its_tensors_is_refused_by_name(tmp_path):
    folder = family_folder(tmp_path, "gpt2")
    hf = hf_config("gpt2")
    for change, message in (
        ({"n_positions": 128}, r"transformer\.wpe\.weight: expected shape \[128, 32\]"),
        ({"n_inner": 64}, r"h\.0\.mlp\.c_fc\.weight: expected shape \[32, 64\], found \[32, 48\]"),
        ({"n_layer": 3}, r"transformer\.h\.2\..*: missing"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: missing"),
    ):
        (folder / "config.json").write_text(json.dumps(hf | change))
        with pytest.raises(CheckpointError, match=message):
            load_model(folder)


def test_more_positions_than_the_table_has_are_refused_with_the_numbers(models):
    config = EngineConfig(max_model_len=65, kv_pool_bytes=1 << 20)
    with pytest.raises(ValueError, match="max_model_len is 65; the model allows 2 to 64"):
        startup.build_engine(models["gpt2"], config)


def test_idle_rows_one_past_the_table_are_finite(models):
    """A sequence that ended at the model's limit stands there until its slot is taken again."""
    model = models["gpt2"]
    tokens, positions = jnp.zeros(2, jnp.int32), jnp.array([63, 64], jnp.int32)
    rows = family_of("gpt2").embed(model.params, model.config, tokens, positions)
    np.testing.assert_array_equal(rows[0], rows[1])
    assert len(oracle("gpt2")[0]) < model.config.max_position
