"""A mixture of experts with the kernels in it, interpreted, says what it says by XLA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import TINY

from jaxinfer.config import MoeConfig
from jaxinfer.experts import choose_experts, run_experts
from jaxinfer.models.moe import moe, moe_specs
from jaxinfer.params import init_params
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.quantization.weight import specs_of
from jaxinfer.sharding import make_mesh, param_shardings
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
     ("Mixtral", 2, "int4"), ("DeepSeek V3", 2, "fp8-block"), ("Mixtral", 2, "fp8")],
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
    x = jnp.asarray(np.random.default_rng(0).normal(size=(13, 64)), jnp.float32)
    wanted = jax.jit(functools.partial(moe, c=config, m=mixture))(params, x=x)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(specs, mesh))
    step = StepModel(config, (), "reference", mesh, experts="triton_interpreted")
    run = functools.partial(run_experts, step)
    found = jax.jit(functools.partial(moe, c=config, m=mixture, run_experts=run))(params, x=x)
    np.testing.assert_allclose(found, wanted, atol=3e-5)


H200 = Device("gpu", "NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("device", "moe_config", "dtype", "ways", "body", "why"),
    [
        (Device("cpu", "cpu"), MoeConfig(8, 2, 64), "float32", 1, "segments", ""),
        (H200, MoeConfig(128, 8, 768), "bfloat16", 8, "triton", ""),
        (H200, MoeConfig(8, 2, 64), "float32", 1, "ragged", "round float32"),
        (H200, MoeConfig(60, 4, 1408), "bfloat16", 4, "triton", ""),
        (H200, MoeConfig(60, 4, 1408), "bfloat16", 8, "ragged", "176 columns"),
    ],
)
def test_the_body_follows_from_device_and_widths(device, moe_config, dtype, ways, body, why):
    config = dataclasses.replace(TINY, hidden_size=2048, moe=moe_config)
    chosen = choose_experts(device, config, dtype, ways)
    assert chosen.implementation == body and why in chosen.why and bool(chosen.why) == bool(why)


def test_the_body_follows_from_the_kind_of_weights_too():
    config = dataclasses.replace(TINY, hidden_size=2048, moe=MoeConfig(128, 8, 768))
    asked = (H200, config, "bfloat16", 8)
    assert choose_experts(*asked, "int4").implementation == "triton"
    old = (Device("gpu", "NVIDIA A100", (8, 0)), *asked[1:])
    assert choose_experts(*old, "int4").implementation == "triton"
    found = choose_experts(*old, "fp8")
    assert found.implementation == "ragged" and "need a newer GPU" in found.why


def test_models_without_experts_have_no_body():
    assert choose_experts(H200, TINY, "bfloat16") is None
