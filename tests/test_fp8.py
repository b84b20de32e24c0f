"""Float8 checkpoints with a scale a block: what they stand for, what they need, what is refused."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_families import family_folder

from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model
from jaxinfer.checkpoints.load import open_source
from jaxinfer.checkpoints.source import load_params
from jaxinfer.params import named_leaves

BLOCK = (8, 16)  # smaller than most matrices, and no divisor of some
FLOAT8 = jnp.dtype("float8_e4m3fn")
QUANTISED = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}  # fmt: skip
Q_B = "model.layers.1.self_attn.q_b_proj.weight"


def quantised(weight: np.ndarray, block=BLOCK) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 values, a scale a block, and the numbers they stand for: block by block, by hand."""
    weight = weight.astype(np.float32)
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block))
    stored, scales = np.zeros(weight.shape, FLOAT8), np.zeros((rows, columns), np.float32)
    meant = np.zeros_like(weight)
    for i, j in np.ndindex(rows, columns):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(weight[part]).max() / 448
        stored[part] = (weight[part] / scales[i, j]).astype(FLOAT8)
        meant[part] = stored[part].astype(np.float32) * scales[i, j]
    return stored, scales, meant


def is_projection(name: str) -> bool:
    return name.endswith(("proj.weight", "with_mqa.weight"))


def quantise_folder(
    folder: Path, family: str = "deepseek_v3", change: Any = None
) -> dict[str, np.ndarray]:
    """A family's oracle with float8 projections; the numbers that its tensors stand for.

    `change` is made to the tensors before they are written.
    """
    family_folder(folder, family)
    held, meant = load_file(folder / "model.safetensors"), {}
    for name in list(held):
        meant[name] = held[name].astype(np.float32)
        if is_projection(name):
            held[name], held[name + "_scale_inv"], meant[name] = quantised(held[name])
    if change:
        change(held)
    save_file(held, folder / "model.safetensors")
    change_config(folder, quantization_config=QUANTISED)
    return meant


def change_config(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(data))


def change_tensors(folder: Path, change: Any) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_weights_are_what_they_stand_for(tmp_path, dtype):
    """Bit for bit the checkpoint that holds the same numbers in float32, converted or not."""
    meant = quantise_folder(tmp_path / "fp8")
    plain = family_folder(tmp_path / "plain", "deepseek_v3")
    save_file(meant, plain / "model.safetensors")
    wanted = dict(named_leaves(load_model(plain, dtype=dtype).params))
    loaded = load_model(tmp_path / "fp8", dtype=dtype, quantization="none")
    target = convert(tmp_path / "fp8", tmp_path / "orbax", dtype, quantization="none")
    converted = load_model(target)
    for params in (loaded.params, converted.params):
        found = dict(named_leaves(params))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    original = load_model(family_folder(tmp_path / "bf16", "deepseek_v3"), dtype=dtype).params
    assert (original["layers"][1]["q"] != loaded.params["layers"][1]["q"]).any()
    assert load_model(tmp_path / "fp8").dtype == "bfloat16", "as the config says"


def test_any_family_may_be_stored_so(tmp_path):
    meant = quantise_folder(tmp_path, "qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    model = load_model(tmp_path, dtype="float32", quantization="none")
    down = model.params["layers"][1]["down"]
    np.testing.assert_array_equal(down, meant[name])


def test_inspect_names_what_is_stored(tmp_path):
    quantise_folder(tmp_path)
    stored = inspect_checkpoint(tmp_path).stored
    held = load_file_sizes(tmp_path)
    float8 = [name for name in held if is_projection(name)]
    assert stored["F8_E4M3"] == sum(held[n] + held[n + "_scale_inv"] for n in float8)
    assert sum(stored.values()) == sum(held.values())


def load_file_sizes(folder: Path) -> dict[str, int]:
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    spans = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}


def test_loading_takes_no_more_than_was_promised(tmp_path):
    """At most the parameters and twice the largest of them, experts included."""
    family_folder(tmp_path, "deepseek_v3")
    sizes = {"moe_intermediate_size": 512, "intermediate_size": 4096, "hidden_size": 256}
    change_config(tmp_path, **sizes, quantization_config=QUANTISED)
    scale_up = {16: 512, 64: 4096, 32: 256}
    held, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    for name, value in list(held.items()):
        shape = tuple(
            scale_up[n] if n in scale_up and not keeps(name, axis) else n
            for axis, n in enumerate(value.shape)
        )
        if is_projection(name):
            held[name] = rng.integers(0, 100, shape).astype(np.uint8).view(FLOAT8)
            grid = tuple(-(-size // part) for size, part in zip(shape, BLOCK))
            held[name + "_scale_inv"] = np.full(grid, 1e-3, np.float32)
        else:
            held[name] = np.ones(shape, value.dtype)
    save_file(held, tmp_path / "model.safetensors")
    del held
    source = open_source(tmp_path)
    tracemalloc.start()
    params = load_params(source, "bfloat16", lambda array, spec: array)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrays = [array.nbytes for _, array in named_leaves(params)]
    assert max(arrays) == 8 * 2 * 512 * 256 * 2, "all experts of a layer"
    assert peak < sum(arrays) + 2 * max(arrays)


def keeps(name: str, axis: int) -> bool:
    """Sizes of attention stay as they are: only the residual stream's is another."""
    inner = {"q_b_proj": (0, 1), "kv_b_proj": (0, 1), "q_a_proj": (0,), "with_mqa": (0,)}
    inner |= {"o_proj": (1,), "kv_a_layernorm": (0,), "q_a_layernorm": (0,)}
    return any(part in name and axis in axes for part, axes in inner.items())


def without_scales(held: dict[str, np.ndarray]) -> None:
    del held[Q_B + "_scale_inv"]


def misshapen_scales(held: dict[str, np.ndarray]) -> None:
    held[Q_B + "_scale_inv"] = np.ones((3, 3), np.float32)


def lonely_scales(held: dict[str, np.ndarray]) -> None:
    held["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)


def poisoned_scales(held: dict[str, np.ndarray]) -> None:
    held[Q_B + "_scale_inv"][0, 0] = np.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, ["model.safetensors", Q_B, "its scales weight_scale_inv are missing"]),
        (misshapen_scales, [Q_B, "expected", "_scale_inv of shape [8, 1], found [3, 3]"]),
        (lonely_scales, ["model.norm.weight_scale_inv", "not a tensor of a deepseek_v3 model"]),
        (poisoned_scales, [Q_B, "values are NaN or Inf"]),
    ],
)
def test_defects(tmp_path, change, words):
    quantise_folder(tmp_path, change=change)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_block_size": None}, "expected weight_scale_inv of shape .+, found .8, 1."),
        ({"weight_block_size": [128, 0]}, "weight_block_size = .128, 0., expected"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static' is not supported"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"quant_method": "bitsandbytes"}, "stored as 'bitsandbytes' cannot be read"),
    ],
)
def test_other_ways_of_storing_are_refused(tmp_path, changes, words):
    quantise_folder(tmp_path)
    change_config(tmp_path, quantization_config=QUANTISED | changes)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


def test_float8_that_the_config_does_not_mention(tmp_path):
    quantise_folder(tmp_path)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="_scale_inv: not a tensor of a deepseek_v3 model"):
        load_model(tmp_path)


# -- Layers that predict further tokens ---------------------------------------------------------


def further(held: dict[str, np.ndarray], *names: str) -> None:
    for name in names:
        held[f"model.layers.3.{name}.weight"] = np.ones((32, 64), np.float32)


def test_layers_that_predict_further_tokens_are_ignored_and_named(tmp_path, caplog):
    family_folder(tmp_path, "deepseek_v3")
    without = load_model(tmp_path).params
    change_tensors(tmp_path, lambda held: further(held, "eh_proj", "enorm", "mlp.gate"))
    with caplog.at_level(logging.INFO, logger="jaxinfer"):
        params = load_model(tmp_path).params
    assert "model.layers.3: ignored: layers that predict further tokens" in caplog.text
    assert [n for n, _ in named_leaves(params)] == [n for n, _ in named_leaves(without)]


def test_other_layers_past_the_last_are_not(tmp_path):
    """A config that says fewer layers than there are does not cut the model short."""
    family_folder(tmp_path, "deepseek_v3")
    change_tensors(tmp_path, lambda held: further(held, "enorm", "mlp.gate"))
    with pytest.raises(CheckpointError, match=r"model.layers.3.enorm.weight: not a tensor"):
        load_model(tmp_path)
