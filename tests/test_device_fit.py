"""What fits on a device that is not there is what the server's own plan says."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import jax
import pytest
from rich.console import Console
from tiny_checkpoint import hf_folder

from jaxinfer.checkpoints import describe, inspect_checkpoint
from jaxinfer.checkpoints.device_fit import AbsentDevice, DeviceFit, device_fit
from jaxinfer.config import EngineConfig, LayerKind, ModelConfig
from jaxinfer.kv_pool import pages_for
from jaxinfer.memory_plan import plan_memory, state_bytes, workspace_bytes
from jaxinfer.models import family_of
from jaxinfer.params import param_bytes
from jaxinfer.slot_state import empty_history, empty_options, empty_slots

GIB = 1 << 30
LENGTH = 131_072
MODEL = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, max_position=LENGTH)
WINDOW = dataclasses.replace(MODEL, kinds=(LayerKind(), *(LayerKind(1024),) * 7) * 4)
TOKEN = 2 * 8 * 128 * 2  # bytes of one token in one layer, bfloat16


def test_state_is_counted_without_making_it():
    config = EngineConfig(max_num_seqs=4, dtype="float32")
    small = dataclasses.replace(WINDOW, vocab_size=96, max_position=640)
    made = (empty_slots(4, (10, 10)), empty_options(4, 96), empty_history(4, 96))
    assert state_bytes(small, config, 640) == sum(x.nbytes for x in jax.tree.leaves(made))


def test_the_plan_is_the_servers():
    fit, config = device_fit(MODEL, "bfloat16", 80 * GIB), EngineConfig(dtype="bfloat16")
    weights = param_bytes(family_of("llama").param_specs(MODEL), "bfloat16")
    kept = state_bytes(MODEL, config, LENGTH)
    plan = plan_memory(MODEL, config, LENGTH, weights, kept, AbsentDevice(80 * GIB))
    assert (fit.plan, fit.groups, fit.problem, fit.max_model_len) == (*plan, "", LENGTH)
    assert fit.plan.workspace_bytes == workspace_bytes(MODEL, config, 2)
    assert fit.plan.weights_bytes == weights and fit.plan.slot_bytes == kept
    whole = fit.plan.pool_bytes + weights + kept + fit.plan.workspace_bytes
    assert whole + fit.free == fit.plan.usable_bytes and 0 <= fit.free < 17 * 64 * 32 * TOKEN


def test_layers_with_a_window_keep_no_more_than_that():
    """28 of 32 layers: what is left for the others holds far more tokens than if all kept all."""
    every, most = (device_fit(model, "bfloat16", 80 * GIB) for model in (MODEL, WINDOW))
    (alone,), (whole, window) = every.groups, most.groups
    assert whole.capacity > 3 * alone.capacity > 9 * LENGTH
    assert window.capacity == (2 * 32 * 18 + 2 * 16) * 64, "two for each slot, and two chunks"
    lines = "\n".join(most.lines())
    assert "KV pool for 4 layers" in lines and "24.3 sequences at the full 131072" in lines
    assert "at a window of 1024 tokens" in lines


def test_a_length_that_fits_is_named_where_the_models_does_not():
    fit = device_fit(MODEL, "bfloat16", 22 * GIB)
    assert "one sequence of max_model_len 131072 needs 16" in fit.problem
    assert "22" not in fit.problem.split("KV pool")[0] and "usable" in fit.problem
    assert 0 < fit.max_model_len < LENGTH and fit.max_model_len % 64 == 0
    (group,) = fit.groups
    assert pages_for(fit.max_model_len, 64) < group.num_pages
    longer = dataclasses.replace(MODEL, max_position=fit.max_model_len + 64)
    assert device_fit(longer, "bfloat16", 22 * GIB).problem
    assert f"with --max-model-len {fit.max_model_len}:" in list(fit.lines())
    nothing = device_fit(MODEL, "bfloat16", 8 * GIB)
    assert nothing.plan is None and "weights 14.96 GiB" in nothing.problem


def shown(folder: Path, size: int) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(describe(inspect_checkpoint(folder), size))
    return console.export_text()


def test_what_is_shown(tmp_path: Path):
    text = shown(hf_folder(tmp_path), GIB)
    assert "on 1 GiB, bfloat16" in text and "workspace 64" in text
    assert "stay free, for more sequences (--max-num-seqs)" in text
    assert "What else uses the device is not known" in " ".join(text.split())
    assert "on 976.6 KiB, bfloat16" in shown(tmp_path, 10**6)
    assert "does not fit" in shown(tmp_path, 10**6)


@pytest.mark.parametrize("size", [8 * GIB, 22 * GIB, 80 * GIB])
def test_json(size: int):
    fit = device_fit(WINDOW, "bfloat16", size)
    fields = fit.to_json()
    assert isinstance(fit, DeviceFit) and fields["bytes"] == size
    assert ("pool_bytes" in fields) == (fit.plan is not None)
    if fit.plan:
        assert [pool["window"] for pool in fields["kv_pools"]] == [None, 1024]
        assert [pool["layers"] for pool in fields["kv_pools"]] == [4, 28]
