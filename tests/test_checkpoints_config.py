"""Hugging Face RoPE settings in old and new spelling, and inspection from headers alone."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny_checkpoint import ORACLE, hf_config, hf_folder, write_gguf, write_tokenizer

from jaxinfer.checkpoints import CheckpointError, convert, describe, inspect_checkpoint
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.hf_config import model_config, rope_config
from jaxinfer.models.rope import inverse_frequencies, rope_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("hf", "wanted"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(scaling="linear", factor=2)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 512}
                | LLAMA3,
            },
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 4096),  # the model's own length
        ),
        (
            {
                "original_max_position_embeddings": 256,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None},
            },
            RopeConfig(scaling="yarn", factor=4.0, original_max_position=256),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_slow": 2,
                    "truncate": False,
                    "attention_factor": 1.5,
                    "original_max_position_embeddings": 64,
                }
            },
            RopeConfig(
                scaling="yarn",
                factor=4.0,
                original_max_position=64,
                beta_slow=2,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
    ],
)
def test_rope_settings(hf: dict[str, Any], wanted: RopeConfig) -> None:
    assert rope_config({"max_position_embeddings": 4096} | hf) == wanted


def test_yarn_magnitudes() -> None:
    """With mscale and mscale_all_dim the factor on cos and sin is the ratio of the two."""
    hf = {
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    }
    ratio = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert rope_config(hf).attention_factor == pytest.approx(ratio)
    both = hf["rope_scaling"] | {"mscale_all_dim": 1.0}  # type: ignore[operator]
    assert rope_config(hf | {"rope_scaling": both}).attention_factor == 1.0
    _, plain = inverse_frequencies(RopeConfig(scaling="yarn", factor=40.0), 16)
    assert plain == pytest.approx(0.1 * math.log(40) + 1)


def test_rope_tables_hold_angles_in_radians() -> None:

    cos, sin = rope_tables(RopeConfig(theta=100.0), 4, jnp.array([0, 3], jnp.int32))
    for row, position in enumerate((0, 3)):
        for column, frequency in enumerate((1.0, 0.1)):
            assert cos[row, column] == pytest.approx(math.cos(position * frequency), abs=1e-6)
            assert sin[row, column] == pytest.approx(math.sin(position * frequency), abs=1e-6)


@pytest.mark.parametrize("variant", ["default", "llama3", "yarn"])
def test_values_of_any_kind_are_taken_or_refused(variant: str) -> None:
    """No value in config.json gives anything but a usable config or a ValueError."""
    hf = hf_config(variant)
    odd: list[Any] = [
        None,
        True,
        "x",
        -1,
        0,
        1.5,
        math.nan,
        math.inf,
        10**30,
        [],
        [1],
        {},
        {"a": 1},
    ]
    for key, value in ((key, value) for key in hf for value in odd):
        changed = [hf | {key: value}]
        if key == "rope_parameters":
            changed += [hf | {key: hf[key] | {inner: value}} for inner in hf[key]]
        for config in changed:
            try:
                found = model_config(config)
            except ValueError:
                continue
            inv, factor = inverse_frequencies(found.rope, found.head_dim)
            assert np.isfinite(inv).all() and math.isfinite(factor), config


def test_config_fields() -> None:
    hf = hf_config("default")
    config = model_config(hf)
    assert (config.num_heads, config.num_kv_heads, config.group_size, config.head_dim) == (
        4,
        2,
        2,
        16,
    )
    assert model_config(hf | {"num_key_value_heads": None}).num_kv_heads == 4
    assert model_config(hf | {"head_dim": None}).head_dim == 8
    assert ModelConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(ModelConfig.from_json(config.to_json()))


def test_inspection_agrees_between_formats(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    kind = gguf.GGMLQuantizationType.Q8_0
    paths = {
        "bfloat16": folder,
        "float32": write_gguf(tmp_path / "tiny.gguf", quantisation=kind),
        "float16": convert(folder, tmp_path / "orbax", dtype="float16"),
    }
    numbers = 2 * 96 * 32 + 2 * (32 + 128 * 32 + 32 * 64 + 32 + 3 * 64 * 32) + 32
    for dtype, path in paths.items():
        info = inspect_checkpoint(path, quantization="none")
        assert info.parameters == numbers
        assert info.dtype == dtype
        assert (info.tokenizer_size, info.chat_template) == (96, True)
        width = 4 if dtype == "float32" else 2
        assert info.weight_bytes(dtype) == numbers * width
        assert info.kv_bytes_per_token(dtype) == 2 * 2 * 2 * 16 * width
        assert info.to_json()["kv_bytes_per_token"] == info.kv_bytes_per_token(dtype)
    assert inspect_checkpoint(paths["bfloat16"]).stored == {"BF16": numbers * 2}
    assert inspect_checkpoint(paths["float16"]).stored == {"float16": numbers * 2}
    norms = 5 * 32
    q8_0 = {"F32": norms * 4, "Q8_0": (numbers - norms) // 32 * 34}
    assert inspect_checkpoint(paths["float32"]).stored == q8_0


def test_inspection_refuses_what_could_not_be_loaded(tmp_path: Path) -> None:
    convert(hf_folder(tmp_path / "hf"), tmp_path / "orbax")
    (tmp_path / "orbax" / "params" / "embed" / "0.0").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"params/embed/0\.0: expected 6144 bytes, found 0"):
        inspect_checkpoint(tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="missing"):
        inspect_checkpoint(
            write_gguf(tmp_path / "x.gguf", tensors={"model.norm.weight": np.ones(32, np.float32)})
        )


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen2_moe", "2 of 4 a token, MLP 32, beside one of MLP 48, in 1 of 2 layers"),
        ("qwen3_moe", "3 of 8 a token, MLP 16"),
    ],
)
def test_what_experts_there_are(tmp_path: Path, family: str, experts: str) -> None:
    folder = shutil.copytree(ORACLE.parent / family, tmp_path / family)
    write_tokenizer(folder)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(describe(inspect_checkpoint(folder)))
    (row,) = [line for line in console.export_text().splitlines() if line.startswith("│ experts")]
    assert row.strip("│ ").split("│")[1].strip() == experts


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("gpt2", {"positions": "learned, 64 of them"}),
        ("smollm3", {"RoPE": "theta 1000, scaling none", "without RoPE": "1 of 2 layers"}),
        ("gemma2", {"RoPE": "theta 1000, scaling none"}),
    ],
)
def test_how_positions_enter(tmp_path: Path, family: str, wanted: dict[str, str]) -> None:
    folder = shutil.copytree(ORACLE.parent / family, tmp_path / family)
    write_tokenizer(folder)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(describe(inspect_checkpoint(folder)))
    rows = [line.strip("│ ").split("│") for line in console.export_text().splitlines()]
    shown = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    names = ("positions", "RoPE", "without RoPE")
    assert {name: shown[name] for name in names if name in shown} == wanted
