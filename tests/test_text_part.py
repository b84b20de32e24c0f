"""Models that take pictures too: their text part, in the layouts that its files have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_families import ORACLES, oracle
from tiny_checkpoint import dense_logits, write_tokenizer
from tiny_packed import CHANNEL, compressed_config, int8_rows, is_projection

from jaxinfer.checkpoints import CheckpointError, inspect_checkpoint, load_model
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config
from jaxinfer.params import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compiler")

# As published for google/gemma-3-4b-it and mistralai/Mistral-Small-3.1-24B-Instruct-2503.
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
MISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
}
# What names of the text part and of its head begin with, and those of vision.
LAYOUTS = {
    "first": ("language_model.model.", "language_model.lm_head.", ""),
    "later": ("model.language_model.", "lm_head.", "model."),
}


def whole_folder(folder: Path, whole: str, part: str, layout: str, **changes: Any) -> Path:
    """The oracle of a family as the text part of a model that takes pictures."""
    folder.mkdir(exist_ok=True)
    hf = json.loads((ORACLES / part / "config.json").read_text())
    names = hf.pop("architectures")
    hf |= changes
    outer = {
        "model_type": whole,
        "architectures": [names[0].replace("ForCausalLM", "ForConditionalGeneration")],
        "dtype": hf.pop("dtype"),
        "tie_word_embeddings": True,  # transformers writes it, whatever the part has
        "text_config": hf,
        "vision_config": {"hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(outer))
    model, head, pictures = LAYOUTS[layout]
    held = {
        name.replace("model.", model, 1) if name.startswith("model.") else f"{head}weight": value
        for name, value in load_file(ORACLES / part / "model.safetensors").items()
    }
    for name in ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"):
        held[pictures + name] = np.ones(8, np.float32)
    save_file(held, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("whole", "part"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
def test_the_text_part_is_served(tmp_path: Path, whole: str, part: str, layout: str) -> None:
    model = load_model(whole_folder(tmp_path, whole, part, layout), dtype="float32")
    assert (model.config.family, model.config.tie_embeddings) == (part, False)
    tokens, wanted = oracle(part)
    found = dense_logits(model.config, model.params, tokens)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_part_in_few_bits_stays_so(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path, "mistral3", "mistral", "first")
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if is_projection(name)]:
        parts, _ = int8_rows(held.pop(name).astype(np.float32))
        held |= {f"{name.removesuffix('weight')}{suffix}": a for suffix, a in parts.items()}
    save_file(held, folder / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"] = compressed_config(CHANNEL)
    (folder / "config.json").write_text(json.dumps(hf))
    info = inspect_checkpoint(folder)
    assert info.quantization == "int8" and info.layouts is not None
    assert {"layers.0.qkv", "layers.1.down"} <= info.layouts.keys()
    tokens, wanted = oracle("mistral")
    model = load_model(folder, dtype="float32")
    found = dense_logits(model.config, model.params, tokens)
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.04


def test_a_head_that_is_not_there_is_tied(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path, "mistral3", "mistral", "first", tie_word_embeddings=False)
    held = load_file(folder / "model.safetensors")
    del held["language_model.lm_head.weight"]
    save_file(held, folder / "model.safetensors")
    assert inspect_checkpoint(folder).config.tie_embeddings


def test_parts_that_nobody_knows_are_named(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path, "mistral3", "mistral", "later")
    held = load_file(folder / "model.safetensors")
    save_file(held | {"audio_tower.weight": np.ones(8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight: not a tensor of a mistral"):
        inspect_checkpoint(folder)
    del held["model.language_model.norm.weight"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: missing"):
        inspect_checkpoint(folder)


@pytest.mark.parametrize(
    ("hf", "parameters"),
    [(GEMMA, 3_880_263_168), (MISTRAL, 23_572_403_200)],
    ids=["gemma3", "mistral3"],
)
def test_parameters_of_the_text_part(hf: dict[str, Any], parameters: int) -> None:
    config = model_config(hf)
    specs = family_of(config.family).param_specs(config)
    assert sum(math.prod(spec.shape) for _, spec in named_leaves(specs)) == parameters


def test_what_published_files_leave_out() -> None:
    config = model_config(GEMMA)
    assert (config.max_position, config.num_heads, config.num_kv_heads) == (131072, 8, 4)
    assert config.local_rope is not None
    assert (config.rope.theta, config.rope.factor, config.local_rope.theta) == (1e6, 8.0, 1e4)
    assert [kind.window for kind in config.kinds[:6]] == [1024] * 5 + [None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "ministral3"}}, "text_config: model_type 'ministral3' is"),
        ({"text_config": 3}, "text_config = 3, expected settings by name"),
        ({"text_config": {}}, "text_config: config.json lacks"),
        ({"architectures": ["Mistral3ForSequenceClassification"]}, "only ...ForConditionalGen"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "weights stored as 'bitsandbytes'",
        ),
        ({"model_type": "qwen2_vl"}, "model_type 'qwen2_vl' is not supported"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(MISTRAL | changes)
