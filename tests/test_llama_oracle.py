"""The llama family against transformers' logits, and proof that each feature is noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoint import (
    VARIANTS,
    dense_logits,
    expected,
    hf_folder,
    weights,
    write_gguf,
)

from jaxinfer.checkpoints import LoadedModel, convert, load_model
from jaxinfer.config import ModelConfig
from jaxinfer.models.rope import inverse_frequencies

TOLERANCE = 1e-4  # of the largest logit


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("oracles")
    return {v: load_model(hf_folder(folder / v, v), dtype="float32") for v in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(models: dict[str, LoadedModel], variant: str) -> None:
    tokens, wanted = expected(variant)
    model = models[variant]
    assert difference(dense_logits(model.config, model.params, tokens), wanted) < TOLERANCE


def rope_without(**changes: Any) -> Any:
    return lambda c: dataclasses.replace(c, rope=dataclasses.replace(c.rope, **changes))


@pytest.mark.parametrize(
    ("variant", "switched_off"),
    [
        ("default", rope_without(theta=10000.0)),
        ("default", lambda c: dataclasses.replace(c, rms_norm_eps=1e-5)),
        ("linear", rope_without(scaling="none")),
        ("linear", rope_without(factor=2.0)),
        ("llama3", rope_without(scaling="none")),
        ("llama3", rope_without(factor=4.0)),
        ("llama3", rope_without(low_freq_factor=2.0)),
        ("llama3", rope_without(high_freq_factor=2.0)),
        ("llama3", rope_without(original_max_position=64)),
        ("yarn", rope_without(scaling="none")),
        ("yarn", rope_without(scaling="linear")),
        ("yarn", rope_without(factor=2.0)),
        ("yarn", rope_without(attention_factor=1.0)),
        ("yarn", rope_without(truncate=False)),
        ("yarn", rope_without(beta_slow=0.25)),
        ("yarn", rope_without(original_max_position=64)),
    ],
)
def test_oracle_notices_a_switched_off_setting(
    models: dict[str, LoadedModel], variant: str, switched_off: Any
) -> None:
    tokens, wanted = expected(variant)
    model = models[variant]
    changed: ModelConfig = switched_off(model.config)
    assert difference(dense_logits(changed, model.params, tokens), wanted) > 20 * TOLERANCE


@pytest.mark.parametrize("what", ["norms", "kv heads", "value rows"])
def test_oracle_notices_changed_weights(models: dict[str, LoadedModel], what: str) -> None:
    tokens, wanted = expected("default")
    model = models["default"]
    params = dict(model.params, layers=[dict(layer) for layer in model.params["layers"]])
    layer = params["layers"][0]
    if what == "norms":
        layer["mlp_norm"] = jnp.ones_like(layer["mlp_norm"])
    elif what == "kv heads":  # the groups of query heads attend to each other's keys and values
        fused = layer["qkv"]
        layer["qkv"] = jnp.concatenate([fused[:, :-2], fused[::-1, -2:]], axis=1)
    else:
        layer["qkv"] = layer["qkv"].at[:, -1].set(layer["qkv"][:, -2])
    assert difference(dense_logits(model.config, params, tokens), wanted) > 20 * TOLERANCE


def test_a_tied_head_is_the_embedding(models: dict[str, LoadedModel]) -> None:
    assert "head" not in models["tied"].params
    assert "head" in models["default"].params
    assert difference(expected("tied")[1], expected("default")[1]) > 0.1


@pytest.mark.parametrize("variant", ["default", "linear", "yarn", "tied"])
def test_gguf_gives_the_same_logits(
    models: dict[str, LoadedModel], tmp_path: Path, variant: str
) -> None:
    tokens, _ = expected(variant)
    model = load_model(write_gguf(tmp_path / "tiny.gguf", variant))
    reference = models[variant]
    assert model.dtype == "float32"
    assert model.config == reference.config
    np.testing.assert_array_equal(
        dense_logits(model.config, model.params, tokens),
        dense_logits(reference.config, reference.params, tokens),
    )


def test_gguf_rope_divisors_are_llama3_scaling(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    tokens, wanted = expected("llama3")
    reference = models["llama3"].config.rope
    plain, _ = inverse_frequencies(dataclasses.replace(reference, scaling="none"), 16)
    scaled, _ = inverse_frequencies(reference, 16)
    tensors = {name: value.astype(np.float32) for name, value in weights().items()}
    tensors["rope_freqs.weight"] = plain / scaled
    model = load_model(write_gguf(tmp_path / "tiny.gguf", "llama3", tensors=tensors))
    assert model.config.rope.scaling == "divisors"
    assert difference(dense_logits(model.config, model.params, tokens), wanted) < TOLERANCE
    assert ModelConfig.from_json(model.config.to_json()) == model.config


def test_q8_0_is_dequantised_exactly(tmp_path: Path) -> None:
    """A Q8_0 file equals a safetensors file of the values it stands for."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    tokens, wanted = expected("default")
    rounded = {
        name: gguf.dequantize(gguf.quantize(value.astype(np.float32), q8), q8)
        if value.ndim > 1
        else value.astype(np.float32)
        for name, value in weights().items()
    }
    folder = hf_folder(tmp_path / "hf")
    save_file(rounded, folder / "model.safetensors")
    reference = load_model(folder, dtype="float32")
    path = write_gguf(tmp_path / "tiny.gguf", quantisation=q8)
    model = load_model(path, quantization="none")
    logits = dense_logits(model.config, model.params, tokens)
    np.testing.assert_array_equal(logits, dense_logits(reference.config, reference.params, tokens))
    assert 0 < difference(logits, wanted) < 0.2  # quantised: close, and not the same
    for kind in ("w8a8", "w16a16"):  # of one scale a row: made of the numbers
        again = load_model(path, quantization=kind).params
        other = load_model(folder, dtype="float32", quantization=kind).params
        for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(other)):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_kept_as_they_are_stored(tmp_path: Path, name: str) -> None:
    """And stand for what they are dequantised to, whatever rows are moved."""
    tokens, _ = expected("default")
    kind = gguf.GGMLQuantizationType[name]
    flat = {n: v.astype(np.float32) for n, v in weights().items()}
    flat["model.layers.0.mlp.down_proj.weight"][3] = 0.25  # a block of one number
    path = write_gguf(tmp_path / "tiny.gguf", quantisation=kind, tensors=flat)
    stored = "int8" if name == "Q8_0" else "int4"
    kept, plain = load_model(path, quantization=stored), load_model(path, quantization="none")
    assert kept.quantization == stored and load_model(path).quantization == "none", "on a CPU"
    assert plain.quantization == "none"
    qkv = kept.params["layers"][0]["qkv"]
    assert qkv.layout.group == 32 and kept.params["head"].layout.group == 32
    assert qkv.values.nbytes * (1 if name == "Q8_0" else 2) == np.prod(qkv.shape)
    found = dense_logits(kept.config, kept.params, tokens)
    wanted = dense_logits(plain.config, plain.params, tokens)
    assert difference(found, wanted) < 1e-5
    target = convert(path, tmp_path / "orbax")
    restored = load_model(target, quantization=stored)
    for one, two in zip(jax.tree.leaves(restored.params), jax.tree.leaves(kept.params)):
        np.testing.assert_array_equal(one, two)
    restored = load_model(target)  # as numbers
    for one, two in zip(jax.tree.leaves(restored.params), jax.tree.leaves(plain.params)):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", ["llama3", "tied"])
def test_orbax_gives_the_same_logits(
    models: dict[str, LoadedModel], tmp_path: Path, variant: str
) -> None:
    tokens, _ = expected(variant)
    convert(hf_folder(tmp_path / "hf", variant), tmp_path / "orbax", dtype="float32")
    model, reference = load_model(tmp_path / "orbax"), models[variant]
    assert model.config == reference.config
    np.testing.assert_array_equal(
        dense_logits(model.config, model.params, tokens),
        dense_logits(reference.config, reference.params, tokens),
    )
