"""Every defect of a checkpoint fails before serving and says where it is and what is wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import hf_folder, weights, write_gguf

from jaxinfer.checkpoints import (
    CheckpointError,
    convert,
    inspect_checkpoint,
    load_model,
)

DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
Defect = Callable[[Path], None]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    return str(caught.value)


# -- Hugging Face folders ---------------------------------------------------------------------


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Defect:
    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return apply


def config(**changes: Any) -> Defect:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text()) | changes
        data = {key: value for key, value in data.items() if value != "(absent)"}
        (folder / "config.json").write_text(json.dumps(data))

    return apply


def written(name: str, content: str) -> Defect:
    return lambda folder: (folder / name).write_text(content) and None


def cut(name: str, size: int) -> Defect:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def poisoned(name: str, value: float) -> Defect:
    def change(held: dict[str, np.ndarray]) -> None:
        held[name] = held[name].copy()
        held[name].flat[5] = value

    return tensors(change)


def index(weight_map: dict[str, str]) -> Defect:
    return written("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


ROPE = {"rope_theta": 1000.0}
HF_DEFECTS: dict[str, tuple[Defect, list[str]]] = {
    "missing tensor": (tensors(lambda t: t.pop(DOWN)), [DOWN, "missing", "[32, 64]"]),
    "extra tensor": (
        tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM]})),
        ["model.safetensors", "q_proj.bias", "not a tensor of a llama model"],
    ),
    "transposed tensor": (
        tensors(lambda t: t.update({DOWN: np.ascontiguousarray(t[DOWN].T)})),
        ["model.safetensors", DOWN, "expected shape [32, 64], found [64, 32]"],
    ),
    "NaN": (poisoned(NORM, np.nan), ["model.safetensors", NORM, "1 of 32 values are NaN or Inf"]),
    "Inf": (poisoned(DOWN, np.inf), ["model.safetensors", DOWN, "1 of 2048 values"]),
    "integers": (
        tensors(lambda t: t.update({DOWN: t[DOWN].astype(np.int8)})),
        ["model.safetensors", DOWN, "stored as I8, expected floating point"],
    ),
    "cut file": (cut("model.safetensors", 40000), ["model.safetensors (40000 bytes)"]),
    "cut header": (cut("model.safetensors", 100), ["model.safetensors (100 bytes)"]),
    "empty file": (cut("model.safetensors", 0), ["model.safetensors (0 bytes)"]),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ["no *.safetensors file"],
    ),
    "index names an absent file": (index({DOWN: "b.safetensors"}), ["b.safetensors", "missing"]),
    "index names a tensor the file lacks": (
        index({"lm_tail.weight": "model.safetensors"}),
        ["model.safetensors.index.json", "lm_tail.weight should be in model.safetensors"],
    ),
    "index leads out of the folder": (index({DOWN: "../x.safetensors"}), ["not a file name"]),
    "index is empty": (index({}), ["weight_map is missing or empty"]),
    "empty tokenizer": (cut("tokenizer.json", 0), ["tokenizer.json", "is empty"]),
    "cut tokenizer": (cut("tokenizer.json", 300), ["tokenizer.json", "cannot be read"]),
    "more tokens than embeddings": (
        config(vocab_size=90),
        ["tokenizer has 96 tokens, the model 90 embeddings"],
    ),
    "config is not JSON": (cut("config.json", 100), ["config.json", "not valid JSON"]),
    "config is a list": (written("config.json", "[]"), ["config.json", "JSON object"]),
    "more layers than tensors": (
        config(num_hidden_layers=3),
        ["layers.2", "missing", "and 1 more"],
    ),
    "fewer layers than tensors": (config(num_hidden_layers=1), ["layers.1", "not a tensor"]),
    "other hidden size": (config(hidden_size=48), [NORM, "expected shape [48], found [32]"]),
    "absurd layers": (config(num_hidden_layers=10**9), ["_layers = 1000000000", "4096"]),
    "zero heads": (config(num_attention_heads=0), ["config.json", "num_attention_heads = 0"]),
    "heads that do not divide": (config(num_key_value_heads=3), ["num_key_value_heads = 3", "= 4"]),
    "text for a number": (config(hidden_size="32"), ["config.json", "hidden_size = '32'"]),
    "missing key": (config(hidden_size="(absent)"), ["config.json", "lacks 'hidden_size'"]),
    "unknown family": (config(model_type="hyena"), ["config.json", "'hyena'", "llama"]),
    "no family": (config(model_type="(absent)"), ["config.json has no model_type"]),
    "classifier": (config(architectures=["LlamaForSequenceClassification"]), ["ForCausalLM"]),
    "quantised": (config(quantization_config={"quant_method": "quark"}), ["'quark'"]),
    "biases that are not there": (
        config(attention_bias=True),
        ["self_attn.q_proj.bias", "missing"],
    ),
    "other activation": (config(hidden_act="gelu"), ["hidden_act = 'gelu'"]),
    "unknown rope": (
        config(rope_parameters=ROPE | {"rope_type": "spiral"}),
        ["config.json", "rope_type 'spiral'", "yarn"],
    ),
    "unknown rope key": (
        config(rope_parameters=ROPE | {"rope_type": "linear", "factor": 2, "twist": 1}),
        ["config.json", "'twist'"],
    ),
    "rope without factor": (
        config(rope_parameters=ROPE | {"rope_type": "linear"}),
        ["rope_type 'linear' lacks ['factor']"],
    ),
    "text for a rope factor": (
        config(rope_parameters=ROPE | {"rope_type": "linear", "factor": "2x"}),
        ["config.json", "factor = '2x', expected a number"],
    ),
    "zero theta": (config(rope_parameters={"rope_theta": -1.0}), ["rope_theta = -1.0"]),
    "no epsilon": (config(rms_norm_eps=None), ["rms_norm_eps is null; expected"]),
    "odd rope": (
        config(rope_parameters=ROPE | {"partial_rotary_factor": 0.2}),
        ["partial_rotary_factor = 0.2", "only 1"],
    ),
    "rope by layer": (config(rope_parameters={"full": ROPE, "local": ROPE}), ["full, local"]),
    "tied, yet another head": (
        config(tie_word_embeddings=True),
        ["lm_head.weight", "differs from the embedding", "tie_word_embeddings"],
    ),
    "unknown dtype": (config(dtype="float8_e4m3fn"), ["'float8_e4m3fn'", "bfloat16"]),
}


@pytest.mark.parametrize("name", HF_DEFECTS)
def test_defects_of_hugging_face_folders(tmp_path: Path, name: str) -> None:
    defect, words = HF_DEFECTS[name]
    defect(hf_folder(tmp_path))
    message = refusal(tmp_path)
    assert all(word in message for word in words), message
    if name not in ("NaN", "Inf"):  # headers show it
        with pytest.raises(CheckpointError):
            inspect_checkpoint(tmp_path)


def test_harmless_extra_tensors_are_ignored(tmp_path: Path) -> None:
    def change(held: dict[str, np.ndarray]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    tensors(change)(hf_folder(tmp_path, "tied"))
    assert "head" not in load_model(tmp_path).params


def test_sharded_folder(tmp_path: Path) -> None:
    hf_folder(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(held)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in held.items() if weight_map[n] == file}, tmp_path / file)
    index(weight_map)(tmp_path)
    loaded, whole = load_model(tmp_path), load_model(hf_folder(tmp_path / "whole"))
    assert loaded.dtype == "bfloat16" == str(loaded.params["embed"].dtype)
    np.testing.assert_array_equal(loaded.params["embed"], whole.params["embed"])
    np.testing.assert_array_equal(
        loaded.params["layers"][1]["qkv"], whole.params["layers"][1]["qkv"]
    )


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    hf_folder(tmp_path)
    save_file({NORM: np.ones(32, np.float32)}, tmp_path / "more.safetensors")
    index({NORM: "more.safetensors", DOWN: "model.safetensors"})(tmp_path)
    message = refusal(tmp_path)
    assert NORM in message and "more.safetensors" in message and "in both" in message


def test_values_too_large_for_the_dtype(tmp_path: Path) -> None:
    poisoned(NORM, 1e6)(hf_folder(tmp_path / "hf"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_norm: 1 values.*float16"):
        load_model(tmp_path / "hf", dtype="float16")
    convert(tmp_path / "hf", tmp_path / "orbax")
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_norm.*too large for float16"):
        load_model(tmp_path / "orbax", dtype="float16")
    assert load_model(tmp_path / "orbax").dtype == "bfloat16"


# -- GGUF files -------------------------------------------------------------------------------


def test_truncated_gguf_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 24, 30, 100, 1000, 2000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        assert "cut.gguf" in refusal(path)
    assert "expected bytes" in refusal(path) and "the file ends at" in refusal(path)


def tensor_field(data: bytearray, name: str) -> int:
    """Where a tensor's number of dimensions is, in the header of a GGUF file."""
    return data.index(name.encode()) + len(name)


@pytest.mark.parametrize(
    ("offset_in_field", "value", "words"),
    [
        (4 + 16 + 4, 1 << 40, ["blk.1.ffn_down.weight", "expected bytes", "the file ends at"]),
        (4 + 16 + 4, 7, ["blk.1.ffn_down.weight", "offset 7 is not aligned to 32"]),
        (4, 1 << 50, ["blk.1.ffn_down.weight", "the file ends at"]),
        (4, 32, ["right after blk.1.ffn_down.weight", "gaps"]),
    ],
)
def test_lying_gguf_offsets_and_sizes(
    tmp_path: Path, offset_in_field: int, value: int, words: list[str]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    at = tensor_field(data, "blk.1.ffn_down.weight") + offset_in_field
    data[at : at + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)
    message = refusal(path)
    assert all(word in message for word in words), message


def test_damaged_gguf_headers_never_escape(tmp_path: Path) -> None:
    """A flipped byte in the header gives a CheckpointError or a model, quickly; nothing else."""
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    header = whole.index(b"output.weight")
    choose = random.Random(3)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        data[choose.randrange(header + 40)] ^= 1 << choose.randrange(8)
        path.write_bytes(data)
        try:
            load_model(path)
        except CheckpointError as error:
            refused += str(path) in str(error)
    assert refused > 40


def without(name: str) -> dict[str, np.ndarray]:
    return {k: v.astype(np.float32) for k, v in weights().items() if k != name}


def nan_norm() -> dict[str, np.ndarray]:
    return without("") | {NORM: np.full(32, np.nan, np.float32)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensors": without(DOWN)}, [DOWN, "missing"]),
        ({"tensors": nan_norm()}, ["blk.0.attn_norm.weight", NORM, "32 of 32 values"]),
        ({"metadata": {"general.architecture": "mamba"}}, ["general.architecture = 'mamba'"]),
        ({"metadata": {"tokenizer.ggml.pre": "unheard-of"}}, ["tokenizer.ggml.pre", "unheard-of"]),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, ["tokenizer.ggml.tokens is missing"]),
        ({"metadata": {"llama.block_count": None}}, ["llama.block_count is missing"]),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, ["without rope_factors_short"]),
    ],
)
def test_defects_of_gguf_files(tmp_path: Path, arguments: dict[str, Any], words: list[str]) -> None:
    message = refusal(write_gguf(tmp_path / "tiny.gguf", **arguments))
    assert "tiny.gguf" in message
    assert all(word in message for word in words), message


def test_gguf_types_are_dequantised(tmp_path: Path) -> None:
    """Block formats with an exact answer for constant weights, and half precision kept."""
    constant = {k: np.full(v.shape, 0.5, np.float32) for k, v in weights().items()}
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q4_0, kinds.Q4_1, kinds.Q5_0, kinds.Q8_0, kinds.BF16, kinds.F16):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", quantisation=kind, tensors=constant)
        model = load_model(path, quantization="none")
        wanted = {"BF16": "bfloat16", "F16": "float16"}.get(kind.name, "float32")
        assert model.dtype == wanted
        np.testing.assert_allclose(
            np.asarray(model.params["layers"][1]["down"], np.float32), 0.5, rtol=5e-3
        )


# -- our own folders --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax")
    return convert(hf_folder(folder / "hf"), folder / "orbax")


@pytest.fixture
def orbax(orbax_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(orbax_original, tmp_path / "orbax"))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Defect:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "jaxinfer.json").read_text())
        change(data)
        (folder / "jaxinfer.json").write_text(json.dumps(data))

    return apply


def flipped(name: str) -> Defect:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return apply


CHUNK = "params/layers.1.down/0.0"
ORBAX_DEFECTS: dict[str, tuple[Defect, list[str]]] = {
    "missing array": (lambda f: (f / CHUNK).unlink(), [CHUNK, "no file"]),
    "cut array": (cut(CHUNK, 100), [CHUNK, "expected 4096 bytes, found 100"]),
    "changed array": (flipped(CHUNK), [CHUNK, "changed since it was written", "CRC-32"]),
    "changed array metadata": (flipped("params/embed/.zarray"), ["params/embed/.zarray", "CRC"]),
    "changed tree metadata": (flipped("params/_METADATA"), ["params/_METADATA", "changed"]),
    "missing tensor": (
        manifest(lambda m: m["tensors"].pop("layers.1.down")),
        ["jaxinfer.json", "layers.1.down: missing"],
    ),
    "another config": (
        manifest(lambda m: m["config"].update(num_layers=3)),
        ["jaxinfer.json", "layers.2.qkv: missing"],
    ),
    "another size": (
        manifest(lambda m: m["config"].update(hidden_size=16)),
        ["final_norm: expected shape [16] of bfloat16, found [32] of bfloat16"],
    ),
    "unknown config field": (manifest(lambda m: m["config"].update(x=1)), ["jaxinfer.json", "'x'"]),
    "unknown family": (manifest(lambda m: m["config"].update(family="x")), ["'x'"]),
    "another format": (manifest(lambda m: m.update(format_version=99)), ["format_version = 99"]),
    "no config": (manifest(lambda m: m.pop("config")), ["jaxinfer.json", "config"]),
    "manifest cut": (cut("jaxinfer.json", 50), ["jaxinfer.json"]),
    "manifest gone": (lambda f: (f / "jaxinfer.json").unlink(), ["lacks jaxinfer.json", "again"]),
    "empty tokenizer": (cut("tokenizer/tokenizer.json", 0), ["tokenizer.json", "is empty"]),
}


@pytest.mark.parametrize("name", ORBAX_DEFECTS)
def test_defects_of_our_own_folders(orbax: Path, name: str) -> None:
    defect, words = ORBAX_DEFECTS[name]
    defect(orbax)
    message = refusal(orbax)
    assert all(word in message for word in words), message
