"""A mixture of experts with the kernels in it, interpreted, says what it says by XLA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import byte_tokenizer
from tiny_engine import TINY, dense_logits, drive

from jaxinfer import startup
from jaxinfer.checkpoints import LoadedModel
from jaxinfer.config import EngineConfig, LayerKind, MoeConfig
from jaxinfer.experts import choose_experts, largest_copied, run_experts
from jaxinfer.generation import GenerationDefaults
from jaxinfer.models import family_of
from jaxinfer.models.moe import moe, moe_specs
from jaxinfer.params import ParamSpec, init_params
from jaxinfer.quantization.kinds import Layout
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.quantization.weight import quantised_specs, specs_of
from jaxinfer.request import Request, SamplingParams
from jaxinfer.sharding import make_mesh, param_shardings
from jaxinfer.startup import build_engine
from jaxinfer.step_model import StepModel
from pallas_kernels.dispatch import Device

MIXTURES = {
    "Mixtral": MoeConfig(8, 2, 64),
    "gpt-oss": MoeConfig(6, 3, 128, bias=True, swiglu_limit=7.0, swiglu_alpha=1.7),
    "DeepSeek V3": MoeConfig(8, 2, 64, scoring="sigmoid", shared_size=64),
}


@pytest.mark.parametrize(
    ("name", "ways", "kind"),
    [*((name, ways, "none") for name in MIXTURES for ways in (1, 2)),
     ("Mixtral", 2, "int4"), ("DeepSeek V3", 2, "fp8-block"), ("Mixtral", 2, "fp8"),
     ("gpt-oss", 2, "mxfp4")],
)  # fmt: skip
def test_kernels_say_what_xla_says(name, ways, kind):
    mixture = MIXTURES[name]
    config = dataclasses.replace(TINY, hidden_size=64, moe=mixture)
    specs = moe_specs(config, mixture)
    params = quantise_params(init_params(specs, "float32"), specs, kind, "float32")
    specs = specs_of(params, specs)
    for bias in ("experts_gate_up_bias", "experts_down_bias"):
        if bias in params:
            ramp = jnp.arange(params[bias].size, dtype=jnp.float32)
            params[bias] = jnp.sin(ramp).reshape(params[bias].shape)
    mesh = make_mesh(jax.devices(), ways) if ways > 1 else None
    segments = "segments_static"  # where kernels do not multiply
    x = jnp.asarray(np.random.default_rng(0).normal(size=(13, 64)), jnp.float32)
    wanted = jax.jit(functools.partial(moe, c=config, m=mixture))(params, x=x)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(specs, mesh))
    for body in ("triton_interpreted", *([segments] if ways > 1 else [])):
        step = StepModel(config, (), "reference", mesh, experts=body)
        run = functools.partial(run_experts, step)
        found = jax.jit(functools.partial(moe, c=config, m=mixture, run_experts=run))(params, x=x)
        np.testing.assert_allclose(found, wanted, atol=3e-5)


H200 = Device("gpu", "NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("device", "moe_config", "dtype", "ways", "body", "why"),
    [
        (Device("cpu", "cpu"), MoeConfig(8, 2, 64), "float32", 1, "segments", ""),
        (H200, MoeConfig(128, 8, 768), "bfloat16", 8, "triton", ""),
        (H200, MoeConfig(8, 2, 64), "float32", 1, "segments_static", "round float32"),
        (H200, MoeConfig(60, 4, 1408), "bfloat16", 4, "triton", ""),
        (H200, MoeConfig(60, 4, 1408), "bfloat16", 8, "segments_static", "176 columns"),
    ],
)
def test_the_body_follows_from_device_and_widths(device, moe_config, dtype, ways, body, why):
    config = dataclasses.replace(TINY, hidden_size=2048, moe=moe_config)
    chosen = choose_experts(device, moe_specs(config, moe_config), dtype, ways)
    assert chosen.implementation == body and why in chosen.why and bool(chosen.why) == bool(why)


A100 = Device("gpu", "NVIDIA A100", (8, 0))
INT4, FLOAT8, E2M1 = Layout("int4", 32), Layout("float8_e4m3fn"), Layout("float4_e2m1fn", 32)


@pytest.mark.parametrize(
    ("device", "gate_up", "down", "why"),
    [
        (H200, INT4, INT4, ""),
        (A100, INT4, INT4, ""),
        (H200, E2M1, E2M1, ""),
        (H200, dataclasses.replace(INT4, zeros="float32"), INT4, ""),
        (A100, FLOAT8, FLOAT8, "need a newer GPU"),
        (A100, INT4, FLOAT8, "need a newer GPU"),
        (H200, dataclasses.replace(INT4, group=16), INT4, "groups of 16"),
        (H200, INT4, dataclasses.replace(E2M1, group=16), "groups of 16"),
    ],
)
def test_the_body_follows_from_how_every_matrix_is_stored(device, gate_up, down, why):
    """One that a kernel does not take has all be computed by XLA, and is why."""
    mixture = MoeConfig(8, 2, 768)
    config = dataclasses.replace(TINY, hidden_size=2048, moe=mixture)
    layouts = {"0.experts_gate_up": INT4, "0.experts_down": INT4,
               "1.experts_gate_up": gate_up, "1.experts_down": down}  # fmt: skip
    plain = [moe_specs(config, mixture)] * 2
    specs = quantised_specs(plain, "int4", "bfloat16", layouts)
    found = choose_experts(device, specs, "bfloat16")
    assert found.implementation == ("segments_static" if why else "triton")
    assert why in found.why and bool(found.why) == bool(why)
    assert largest_copied(specs, "bfloat16") == 4 * 2 * 768 * 2048
    assert largest_copied(plain, "bfloat16") == 2 * 2 * 768 * 2048


def test_models_without_experts_have_no_body():
    plain = {"up": ParamSpec((64, 32), ("mlp", "embed"), inputs=1)}
    assert choose_experts(H200, plain, "bfloat16") is None and largest_copied(plain, "float32") == 0


def test_a_gpu_without_kernels_starts_with_a_warning_each_and_says_the_same(monkeypatch, caplog):
    """The device is a CPU's that says it is one: no program can tell."""
    config = dataclasses.replace(
        TINY,
        family="mixtral",
        vocab_size=64,
        num_layers=1,
        kinds=(LayerKind(moe=True),),
        moe=MoeConfig(4, 2, 64),
    )
    specs = family_of("mixtral").param_specs(config)
    params = quantise_params(init_params(specs, "float32"), specs, "mxfp4", "float32")
    model = LoadedModel(config, params, byte_tokenizer(), GenerationDefaults(()), "float32", "")
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, kv_pool_bytes=1 << 20)
    gpu = Device("rocm", "AMD Instinct MI300X")
    monkeypatch.setattr(startup, "_device", lambda _: gpu)
    with caplog.at_level("WARNING"):
        started = build_engine(model, engine)
    warned = [record.getMessage() for record in caplog.records]
    for what in ("attention is", "weights are", "experts are", "tokens are"):
        (line,) = [line for line in warned if line.startswith(what)]
        assert "by XLA, not by" in line and "NVIDIA GPUs only, not for rocm" in line
    prompt = [1, 2, 3]
    requests = [Request("one", tuple(prompt), SamplingParams(temperature=0), 8, seed=0)]
    said = drive(started, requests)["one"].tokens
    logits = dense_logits(params, jnp.array([*prompt, *said[:-1]]), config=config)
    assert said == jnp.argmax(logits[len(prompt) - 1 :], axis=-1).tolist()
