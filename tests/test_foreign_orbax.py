"""Orbax checkpoints as other projects write them give the logits of the Hugging Face original."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jaxinfer_service.cli import app as cli
from safetensors.numpy import save_file
from test_families import oracle
from tiny_checkpoint import dense_logits, expected
from tiny_foreign import (
    flax,
    gemma,
    gemma_linen,
    maxtext,
    nested,
    nnx_state,
    oracle_model,
    save,
    tunix,
    write_config,
)
from typer.testing import CliRunner

from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model

MAXTEXT = [
    "llama_default", "llama_llama3", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma2",
    "gemma3_text",
]  # fmt: skip
runner = CliRunner()
EXACT = 2e-5  # of the largest logit


def logits(path: Path, family: str) -> np.ndarray:
    model = load_model(path, dtype="float32")
    tokens = expected("default")[0] if family.startswith("llama") else oracle(family)[0]
    return dense_logits(model.config, model.params, tokens)


def wanted(tmp_path: Path, family: str) -> np.ndarray:
    """Those of the same model in safetensors."""
    hf, tensors = oracle_model(family)
    write_config(tmp_path / "hf", hf)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    return logits(tmp_path / "hf", family)


def same(found: np.ndarray, exact: np.ndarray) -> bool:
    return bool(np.abs(found - exact).max() < EXACT * np.abs(exact).max())


def folder_with_config(tmp_path: Path, family: str) -> Path:
    write_config(tmp_path / "model", oracle_model(family)[0])
    return tmp_path / "model"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    return str(caught.value)


@pytest.mark.parametrize("family", MAXTEXT)
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
def test_maxtext(tmp_path: Path, family: str, scanned: bool) -> None:
    """A training state: parameters two deep, an optimizer's beside them, under a step's items."""
    folder = folder_with_config(tmp_path, family)
    state = {
        "params": {"params": maxtext(family, scanned, padding=32)},
        "opt_state": [{"mu": jnp.ones(3)}, None],
        "step": 7,
    }
    save(folder / "7" / "items", state)
    assert same(logits(folder, family), wanted(tmp_path, family))


def test_maxtext_stacked_along_the_first_axis(tmp_path: Path) -> None:
    """`param_scan_axis: 0`: layers come before experts too."""
    folder = folder_with_config(tmp_path, "mixtral")
    save(folder / "0" / "items", {"params": maxtext("mixtral", scanned=True, axis=0)})
    assert same(logits(folder, "mixtral"), wanted(tmp_path, "mixtral"))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("form", ["linen", "nested", "other order", "nnx"])
def test_gemma(tmp_path: Path, family: str, form: str) -> None:
    flat = gemma(family, transposed=form != "other order")
    if form == "nnx":
        flat = {path.replace("layer_", "layers."): value for path, value in flat.items()}
    tree = {
        "linen": lambda: gemma_linen(family),
        "nested": lambda: {"params": {"transformer": nested(flat)}},
        "other order": lambda: nested(flat),
        "nnx": lambda: nnx_state(flat),
    }[form]()
    folder = folder_with_config(tmp_path, family)
    save(folder / "tree", tree)
    assert same(logits(folder / "tree", family), wanted(tmp_path, family))


@pytest.mark.parametrize(
    ("project", "family"),
    [(tunix, "llama_default"), (tunix, "qwen2"), (tunix, "qwen3"), (flax, "qwen2"),
     (flax, "llama_default"), (flax, "mistral")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["state", "pure", "in a model"])
def test_nnx(tmp_path: Path, project: Any, family: str, form: str) -> None:
    """nnx.State, whose leaves are variables with a `.value`, and the plain dict of it."""
    state = nnx_state(project(family))
    tree = {
        "state": lambda: state,
        "pure": lambda: nnx.to_pure_dict(state),
        "in a model": lambda: {"model": state, "opt_state": {"count": jnp.zeros(())}},
    }[form]
    folder = folder_with_config(tmp_path, family)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "state").absolute(), tree())
    assert same(logits(folder / "state", family), wanted(tmp_path, family))


@pytest.mark.parametrize(
    "options", [{"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}]
)
def test_ways_of_storing(tmp_path: Path, options: dict[str, bool]) -> None:
    folder = folder_with_config(tmp_path, "qwen3")
    save(folder / "tree", nested(tunix("qwen3")), **options)
    assert same(logits(folder / "tree", "qwen3"), wanted(tmp_path, "qwen3"))


def test_a_manager_of_checkpoints(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path, "qwen3")
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(1, args=ocp.args.StandardSave(nested(tunix("qwen3"))))
    assert same(logits(folder, "qwen3"), wanted(tmp_path, "qwen3"))
    shutil.copytree(folder / "1", folder / "20")
    assert "several steps: 1, 20; name one" in refusal(folder)
    assert same(logits(folder / "20", "qwen3"), wanted(tmp_path, "qwen3"))


def test_dtype_config_and_conversion(tmp_path: Path) -> None:
    """bfloat16 stays; a config is named, or lies beside; what is converted needs neither."""
    hf, _ = oracle_model("llama_default")
    half = {
        path: jnp.asarray(value, jnp.bfloat16) for path, value in tunix("llama_default").items()
    }
    tree = save(tmp_path / "alone", nested(half))
    assert "needs the model's config.json" in refusal(tree)
    write_config(tmp_path / "elsewhere", hf)
    config = tmp_path / "elsewhere" / "config.json"
    info = inspect_checkpoint(tree, config)
    assert info.dtype == "bfloat16" and set(info.stored) == {"bfloat16"}
    assert info.stored_bytes == 2 * info.parameters
    ours = convert(tree, tmp_path / "ours", config_file=config)
    assert load_model(ours).dtype == "bfloat16"
    exact, tokens = expected("default")[1], expected("default")[0]
    model = load_model(ours, dtype="float32")
    assert same(dense_logits(model.config, model.params, tokens), exact)
    for path in (ours, tmp_path / "elsewhere"):
        with pytest.raises(CheckpointError, match="config of its own; leave out"):
            inspect_checkpoint(path, config)


def test_a_config_is_named_on_the_command_line(tmp_path: Path) -> None:
    write_config(tmp_path / "elsewhere", oracle_model("qwen3")[0])
    config = str(tmp_path / "elsewhere" / "config.json")
    tree = str(save(tmp_path / "tree", nested(tunix("qwen3"))))
    facts = json.loads(runner.invoke(cli, ["inspect", tree, "--config", config, "--json"]).stdout)
    assert facts["config"]["family"] == "qwen3" and "of Tunix" in facts["description"]
    ours = str(tmp_path / "ours")
    done = runner.invoke(cli, ["convert", tree, ours, "--config", config])
    assert done.exit_code == 0 and f"jaxinfer serve {ours}" in done.stdout, done.output
    assert same(logits(tmp_path / "ours", "qwen3"), wanted(tmp_path, "qwen3"))
    for file in Path(config).parent.glob("tokenizer*"):
        file.unlink()
    shown = runner.invoke(cli, ["inspect", tree, "--config", config])
    assert shown.exit_code == 0 and "save the model" in shown.stdout
    done = runner.invoke(cli, ["convert", tree, str(tmp_path / "none"), "--config", config])
    assert done.exit_code == 1 and "tokenizer.json: missing" in done.output
    again = runner.invoke(cli, ["convert", tree, str(tmp_path / "other")])
    assert again.exit_code == 1 and "--config FILE" in again.output


def broken(tmp_path: Path, change: Any) -> str:
    folder, flat = folder_with_config(tmp_path, "qwen3"), tunix("qwen3")
    change(flat)
    save(folder / "tree", nested(flat), use_ocdbt=False)
    return refusal(folder / "tree")


def test_trees_with_defects(tmp_path: Path) -> None:
    """Missing, extra, misshapen and NaN parameters, each by its name."""
    down = "layers.1.mlp.down_proj.kernel"
    cases = {
        "missing": (lambda f: f.pop(down), ["model.layers.1.mlp.down_proj.weight: missing"]),
        "extra": (lambda f: f.update({"layers.9.x.w": np.ones(2)}), ["layers.9.x.w", "not a ten"]),
        "turned": (
            lambda f: f.update({down: f[down].T}),
            [down, "expected shape [64, 32], found [32, 64]"],
        ),
        "NaN": (
            lambda f: f.update({down: f[down] * np.nan}),
            [down, "2048 of 2048 values are NaN"],
        ),
        "of integers": (
            lambda f: f.update({down: f[down].astype(np.int8)}),
            [down, "stored as int8, expected floating point"],
        ),
    }
    for name, (change, words) in cases.items():
        message = broken(tmp_path / name, change)
        assert all(word in message for word in words), message


def test_damaged_files(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path, "qwen3")
    tree = save(folder / "tree", nested(tunix("qwen3")), use_ocdbt=False)
    chunk = next(tree.glob("layers.1.mlp.down_proj.kernel/0*"))
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    assert "layers.1.mlp.down_proj.kernel: cannot be read" in refusal(tree)
    chunk.unlink()  # zarr's readers take it for zeros
    assert "layers.1.mlp.down_proj.kernel: cannot be read" in refusal(tree)
    shutil.rmtree(tree / "final_norm.w")
    assert "final_norm.w" in refusal(tree)
    (tree / "_METADATA").write_text("{}")
    assert "tree: cannot be read" in refusal(tree)
    (tree / "_METADATA").unlink()
    assert "neither jaxinfer.json nor config.json nor an Orbax tree" in refusal(tree)


def test_a_tree_in_a_folder_below_is_named(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path, "llama_default")
    save(folder / "trained", {"params": maxtext("llama_default", True)})
    assert f"did you mean {folder / 'trained'}?" in refusal(folder)
    assert load_model(folder / "trained").config.family == "llama"


def test_trees_of_nobody_we_know(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path, "qwen3")
    tree = {"wte": {"kernel": np.ones((96, 32))}, "blocks": [{"attn": np.ones(5)}] * 9}
    message = refusal(save(folder / "tree", tree))
    assert "none of the known projects (MaxText, gemma, Tunix" in message
    assert "blocks.0.attn: [5]" in message and "and 2 more" in message
    write_config(folder, oracle_model("olmo2")[0])
    message = refusal(save(folder / "other", nested(tunix("qwen3"))))
    assert "trees of Tunix are known for llama, qwen2, qwen3, not for olmo2" in message
    (folder / "config.json").write_text(json.dumps({"model_type": "hyena"}))
    assert "'hyena'" in refusal(folder / "other")
