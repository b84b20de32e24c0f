"""Making quantised checkpoints: rounding by what weights meet, and a command that can be killed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxinfer_service.cli import app
from test_families import family_folder, oracle
from tiny_checkpoint import dense_logits, hf_folder
from typer.testing import CliRunner

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints import CheckpointError, load_model
from jaxinfer.checkpoints.packed import numbers
from jaxinfer.models import family_of
from jaxinfer.params import named_leaves
from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.making.awq import folds, rounded_by_range, scale_layer
from jaxinfer.quantization.making.calibration import Calibration, sequences
from jaxinfer.quantization.making.gptq import gptq
from jaxinfer.quantization.making.make import Settings, quantise_checkpoint
from jaxinfer.quantization.rounding import round_matrix
from jaxinfer.quantization.weight import largest_made

pytestmark = pytest.mark.usefixtures("quick_compiler")
INT4 = Layout("int4", 16, zeros="uint8")
RNG = np.random.default_rng(3)
# Activations as models have them: columns belong together, and some are large.
SIZES = np.exp(RNG.normal(size=64)).astype(np.float32)
ROWS = RNG.normal(size=(600, 24)) @ RNG.normal(size=(24, 64)) + 0.3 * RNG.normal(size=(600, 64))
ROWS = (ROWS * SIZES).astype(np.float32)
MOMENTS = ROWS.T @ ROWS / len(ROWS)
WEIGHT = RNG.normal(size=(40, 64)).astype(np.float32)


def error_of(matrix: Any, layout: Layout = INT4) -> float:
    return float(np.square((numbers(matrix, layout) - WEIGHT) @ ROWS.T).mean())


@pytest.fixture(autouse=True)
def logging_stays(monkeypatch):
    """Commands set up logging for the whole process."""
    monkeypatch.setattr("jaxinfer_service.cli.console.set_up_logging", lambda level, form: None)


@pytest.mark.parametrize("layout", [INT4, Layout("int4", zeros="uint8"), Layout("int8", 16)])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_leaves_much_less_of_the_error(layout, act_order):
    nearest = error_of(round_matrix(WEIGHT, layout), layout)
    by_range = error_of(rounded_by_range(WEIGHT, MOMENTS, layout), layout)
    found = error_of(gptq(WEIGHT, MOMENTS, layout, 0.01, act_order), layout)
    assert found < 0.5 * nearest and by_range <= nearest * 1.001


def test_without_anything_to_make_up_gptq_is_the_nearest():
    """Of independent activations, no column can make up for another."""
    one = gptq(WEIGHT, np.eye(64, dtype=np.float32), INT4, 0.01, False)
    two = rounded_by_range(WEIGHT, np.eye(64, dtype=np.float32), INT4)
    np.testing.assert_allclose(numbers(one, INT4), numbers(two, INT4), atol=1e-5)


def test_columns_that_nothing_meets_do_no_harm():
    moments = MOMENTS.copy()
    moments[5], moments[:, 5] = 0, 0
    made = numbers(gptq(WEIGHT, moments, INT4, 0.01, True), INT4)
    assert np.isfinite(made).all() and np.abs(made[:, 5] - WEIGHT[:, 5]).max() < 0.5


def plain(folder: Path, family: str) -> Any:
    path = hf_folder(folder) if family == "llama" else family_folder(folder, family)
    return load_model(path, dtype="float32")


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v2", "phi", "gpt2"]
)
def test_calibration_computes_what_the_model_does(family, tmp_path):
    model, tokens = plain(tmp_path, family), oracle("qwen3")[0]
    run = Calibration(model.config, model.params, tokens[None])
    for i, layer in enumerate(model.params["layers"]):
        run.advance(i, layer)
    found = family_of(family).unembed(model.params, model.config, jnp.asarray(run._states[0]))
    wanted = dense_logits(model.config, model.params, tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 4), ("gemma2", 4), ("phi", 2), ("gpt2", 3), ("olmo2", 2),
                          ("qwen2", 4), ("qwen3_moe", 2)]
)  # fmt: skip
def test_scaled_layers_compute_the_same(family, count, tmp_path):
    """Factors go in before the rounding and out again in what comes before."""
    model, tokens = plain(tmp_path, family), oracle("qwen3")[0]
    specs = family_of(family).param_specs(model.config)["layers"]
    layers = []
    for i, layer in enumerate(model.params["layers"]):
        run = Calibration(model.config, model.params, tokens[None])
        names = [n for n, spec in specs[i].items() if spec.inputs]
        params = {name: np.asarray(array) for name, array in layer.items()}
        assert len(folds(model.config, params)) == count
        moments = run.moments(i, layer, names)
        scaled, _ = scale_layer(
            model.config, params, moments, dict.fromkeys(names, Layout("int4", zeros="uint8"))
        )
        assert any(not np.allclose(scaled[name], params[name]) for name in names)
        layers.append({name: jnp.asarray(array) for name, array in scaled.items()})
    found = dense_logits(model.config, {**model.params, "layers": layers}, tokens)
    wanted = dense_logits(model.config, model.params, tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max(), rtol=0)


def test_scaling_leaves_less_of_the_error(tmp_path):
    model, tokens = plain(tmp_path, "llama"), oracle("qwen3")[0]
    params = {name: np.asarray(array) for name, array in model.params["layers"][0].items()}
    names = ("qkv", "gate_up", "o", "down")
    run = Calibration(model.config, model.params, tokens[None])
    moments = run.moments(0, model.params["layers"][0], names)

    def error(params: Any, moments: Any, rounded: Any) -> float:
        total = 0.0
        for name in names:
            matrix = params[name].reshape(-1, len(moments[name]))
            left = numbers(rounded(matrix, moments[name]), INT4) - matrix
            total += float(np.vdot(left @ moments[name], left))
        return total

    before = error(params, moments, lambda matrix, _: round_matrix(matrix, INT4))
    scaled = scale_layer(model.config, params, moments, dict.fromkeys(names, INT4))
    assert error(*scaled, lambda m, h: rounded_by_range(m, h, INT4)) < 0.9 * before


# -- checkpoints -----------------------------------------------------------------------------------

TEXTS = ["the thin then in the a " * 30, "in a then the thing there " * 30]


def leaves(path: Path) -> dict[str, np.ndarray]:
    params = load_model(path, quantization="int4").params
    return {n: np.asarray(array) for n, array in named_leaves(params)}


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_made_is_served(method, bits, tmp_path):
    source = hf_folder(tmp_path / "hf")
    settings = Settings(method, bits, 16)
    target = quantise_checkpoint(source, tmp_path / "q", settings, TEXTS)
    kind = "int4" if bits == 4 else "int8"
    model = load_model(target, quantization=kind)
    assert model.quantization == kind
    qkv = model.params["layers"][0]["qkv"]
    assert qkv.layout.bits == bits and qkv.layout.group == 16
    assert not (tmp_path / ".q.quantize").exists()
    reference, tokens = load_model(source, dtype="float32"), oracle("qwen3")[0]
    wanted = dense_logits(reference.config, reference.params, tokens)
    found = dense_logits(model.config, model.params, tokens)
    apart = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < apart < (0.5 if bits == 4 else 0.05)


def test_an_engine_serves_what_was_made(tmp_path):
    """XLA makes numbers of its vocabulary too, which is in 8 bits: that is planned for."""
    target = quantise_checkpoint(hf_folder(tmp_path / "hf"), tmp_path / "q", Settings("rtn", 4, 16))
    model, tokens = load_model(target, quantization="int4"), list(range(5, 25))
    embed = model.params["embed"]
    assert largest_made({"embed": embed}) == 2 * math.prod(embed.shape), "bfloat16"
    llm = LLM(
        str(target), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, page_size=8,
        kv_pool_bytes=1 << 20, quantization="int4",
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    (answer,) = llm.generate([tokens], greedy)
    for token in answer.token_ids:
        assert token == dense_logits(model.config, model.params, np.array(tokens))[-1].argmax()
        tokens.append(token)


def test_a_run_that_was_killed_goes_on(tmp_path):
    source, settings = family_folder(tmp_path / "hf", "gemma2"), Settings("gptq", 4, 16)
    whole = leaves(quantise_checkpoint(source, tmp_path / "whole", settings, TEXTS))

    def killed(what: str, done: int, total: int) -> None:
        if what == "quantising layers" and done == 1:
            raise KeyboardInterrupt

    target, work = tmp_path / "q", tmp_path / ".q.quantize"
    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(source, target, settings, TEXTS, killed)
    assert not target.exists() and (work / "layer-0.npz").exists()
    before = (work / "layer-0.npz").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="was begun from another checkpoint, text or options"):
        quantise_checkpoint(source, target, Settings("awq", 4, 16), TEXTS)
    assert (work / "layer-0.npz").stat().st_mtime_ns == before
    again = leaves(quantise_checkpoint(source, target, settings, TEXTS))
    assert again.keys() == whole.keys() and not work.exists()
    for name, array in whole.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_experts_are_made_too(tmp_path):
    source = family_folder(tmp_path / "hf", "qwen3_moe")
    target = quantise_checkpoint(source, tmp_path / "q", Settings("gptq", 4, 16), TEXTS)
    params = load_model(target, quantization="int4").params
    experts = params["layers"][1]["experts_gate_up"]
    assert experts.layout.bits == 4 and experts.scales.shape[0] == 8


def test_what_cannot_be_made_is_refused(tmp_path):
    source = hf_folder(tmp_path / "hf")
    with pytest.raises(ValueError, match="calibration text has 3 tokens; give at least 32"):
        quantise_checkpoint(source, tmp_path / "q", Settings(), ["the the"])
    with pytest.raises(ValueError, match="bits is 3; choose 4 or 8"):
        Settings(bits=3)
    with pytest.raises(ValueError, match="group_size is 7; choose an even number from 16"):
        Settings(group_size=7)
    with pytest.raises(ValueError, match="method is 'hqq'; choose rtn, awq, gptq"):
        Settings("hqq")  # type: ignore[arg-type]
    made = quantise_checkpoint(source, tmp_path / "made", Settings("rtn"))
    with pytest.raises(CheckpointError, match="exists already"):
        quantise_checkpoint(source, made, Settings("rtn"))
    with pytest.raises(CheckpointError, match="stored as int4 already; take the original"):
        quantise_checkpoint(made, tmp_path / "twice", Settings("rtn"))


def test_calibration_text_is_cut_into_pieces_of_one_length():
    pieces = sequences([list(range(300)), list(range(300, 700))], 600)
    assert pieces.shape == (2, 256) and pieces[1, 0] == 256
    assert sequences([list(range(40))], 1000).shape == (1, 40)


def test_nothing_is_calibrated_on_what_is_evaluated():
    from jaxinfer.evaluation.cases import DEFAULT_TEXTS as EVALUATED
    from jaxinfer.evaluation.cases import read_texts
    from jaxinfer.quantization.making.texts import DEFAULT_TEXTS

    ours, theirs = (list(read_texts(path).values()) for path in (DEFAULT_TEXTS, EVALUATED))
    sentences = {s.strip() for text in theirs for s in text.split(".") if len(s.strip()) > 20}
    assert len(ours) > 20 and not any(s in text for s in sentences for text in ours)


def test_the_command(tmp_path):
    source, target = hf_folder(tmp_path / "hf"), tmp_path / "q"
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    command = ["quantize", str(source), str(target), "--method", "awq", "--group-size", "16",
               "--calibration", str(text)]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert jax.tree.leaves(load_model(target).params)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "exists already" in result.output
