"""Quantised parameters: what they stand for, every family with them, and the engine on them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_weights import with_body
from test_determinism import requests, same
from test_families import ORACLE_FAMILIES, family_folder, oracle
from tiny_checkpoint import dense_logits, hf_folder
from tiny_engine import TINY, Setup, built, check, drive, engine_for, tiny_params

from jaxinfer.checkpoints import load_model
from jaxinfer.config import EngineConfig
from jaxinfer.models import family_of
from jaxinfer.models.layers import embed, linear, linear_of_experts
from jaxinfer.params import ParamSpec, named_leaves
from jaxinfer.program_store import describe_arrays
from jaxinfer.quantization.kinds import KINDS, choose
from jaxinfer.quantization.multipliers import with_multipliers
from jaxinfer.quantization.quantise import quantise, quantise_params
from jaxinfer.quantization.weight import Quantised, quantised_specs
from jaxinfer.sharding import make_mesh, param_shardings
from pallas_kernels.dispatch import Device
from pallas_kernels.grouped_matmul import grouped_matmul

EACH = pytest.mark.parametrize("kind", KINDS)
# Of the largest value: roundings to 127 units, and to 127 * 254 where there are two terms.
WEIGHTS = {
    "int8": 4e-3, "w8a8": 4e-3, "w8a8-hl": 4e-3, "w16a16": 2e-5, "int4": 0.072, "mxfp4": 0.26,
    "fp8": 0.065, "fp8-block": 0.065, "w8a8-fp8": 0.065,
}  # fmt: skip
PRODUCTS = dict.fromkeys(KINDS, 1e-5) | {
    "w8a8": 2e-2, "w8a8-hl": 1e-4, "w16a16": 1e-4, "w8a8-fp8": 6e-2
}  # fmt: skip
HEADS = ParamSpec((4, 6, 24), ("kv_heads", None, "embed"), inputs=1)
OUT = ParamSpec((24, 4, 6), ("embed", "kv_heads", None), inputs=2)
SQUARE = ParamSpec((256, 160), ("mlp", "embed"), inputs=1)
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EXPERTS = ParamSpec((3, 8, 2, 24), ("experts", "mlp", None, "embed"), inputs=1)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(weight: Quantised) -> np.ndarray:
    """The parameter that it stands for, in float64."""
    columns = int(np.prod(weight.shape[-weight.inputs :]))
    lead = weight.shape[:1] if weight.experts else ()
    group, rows = weight.layout.group or columns, int(np.prod(weight.shape)) // columns
    values = np.asarray(weight.values).reshape(-1, columns * weight.layout.bits // 8)
    if weight.layout.bits == 4:
        packed = values.reshape(rows, -1, group // 2)
        values = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
    values = np.where(values > 7, -MXFP4[values & 7], MXFP4[values & 7]) if (
        weight.layout.values == "float4_e2m1fn") else values.astype(np.float64)  # fmt: skip
    if weight.low is not None:
        values = values + np.asarray(weight.low, np.float64).reshape(values.shape) / 254

    def spread(array) -> np.ndarray:
        by_row = np.asarray(array, np.float64).swapaxes(-1, -2)
        by_row = np.repeat(by_row, weight.layout.rows, axis=-2)
        each = by_row[..., : rows // int(np.prod(lead)), :]
        return np.repeat(each, group, axis=-1).reshape(rows, columns)

    if weight.layout.values == "int4":
        values = values - (8 if weight.zeros is None else spread(weight.zeros))
    return (values * spread(weight.scales)).reshape(weight.shape)


@EACH
@pytest.mark.parametrize(
    "spec", [HEADS, OUT, EXPERTS, SQUARE], ids=["heads", "out", "experts", "square"]
)
def test_a_quantised_parameter_stands_for_its_array(kind, spec):
    scales = np.logspace(-3, 2, spec.shape[0]).astype(np.float32)
    if "block" in kind:
        scales[:] = 1  # rows share them
    array = random(*spec.shape) * scales.reshape(-1, *[1] * (len(spec.shape) - 1))
    array[0, 0] = 0
    weight = quantise(array, spec, kind, "float32")
    assert weight.shape == spec.shape
    largest = np.abs(array).max(axis=tuple(range(-spec.inputs, 0)), keepdims=True)
    assert (np.abs(dense(weight) - array) <= WEIGHTS[kind] * largest).all()
    if kind != "w16a16":
        assert (np.abs(dense(weight) - array) > 1e-3 * largest).any()


@EACH
@pytest.mark.parametrize("rows", [1, 5])
def test_products_equal_those_of_what_it_stands_for(kind, rows):
    for spec, shape in ((HEADS, (24,)), (OUT, (4, 6)), (SQUARE, (160,))):
        weight = jax.tree.map(jnp.asarray, quantise(random(*spec.shape), spec, kind, "float32"))
        x = random(rows, *shape, seed=1)
        wanted = np.tensordot(
            x.astype(np.float64), dense(weight), (range(1, x.ndim), range(-len(shape), 0))
        )
        found = linear(jnp.asarray(x), weight)
        assert found.shape == wanted.shape and found.dtype == jnp.float32
        np.testing.assert_allclose(
            found, wanted, atol=PRODUCTS[kind] * np.abs(wanted).max(), rtol=0
        )


@EACH
def test_rows_of_tables_and_products_of_experts(kind):
    spec = ParamSpec((10, 24), ("vocab", "embed"), inputs=1)
    table = jax.tree.map(jnp.asarray, quantise(random(10, 24), spec, kind, "bfloat16"))
    if KINDS[kind].vocabulary:
        rows = embed(table, jnp.array([9, 0, 9]))
        assert rows.dtype == jnp.bfloat16
        np.testing.assert_allclose(rows.astype(np.float32), dense(table)[[9, 0, 9]], rtol=1e-2)
    else:
        assert isinstance(table, jax.Array), "left as it is"
    weight = jax.tree.map(jnp.asarray, quantise(random(*EXPERTS.shape), EXPERTS, kind, "float32"))
    x, sizes, owner = random(7, 24, seed=2), jnp.array([4, 0, 3], jnp.int32), [0] * 4 + [2] * 3

    def product(rows, matrices, sizes):
        return grouped_matmul(rows, matrices, sizes, implementation="segments")

    found = linear_of_experts(product, jnp.asarray(x), weight, sizes)
    wanted = np.einsum("rk,rmnk->rmn", x.astype(np.float64), dense(weight)[owner])
    np.testing.assert_allclose(found, wanted, atol=PRODUCTS[kind] * np.abs(wanted).max(), rtol=0)


WIDE = ParamSpec((4, 3, 16, 256), ("kv_heads", None, None, "embed"), inputs=1)
LONG = ParamSpec((48, 4, 64), ("embed", "kv_heads", None), inputs=2)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if "cuda" in kind.platforms])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("spec", [WIDE, LONG], ids=["outputs divided", "inputs divided"])
def test_kernels_multiply_on_each_device_what_xla_does(kind, ways, spec):
    mesh = make_mesh(jax.devices(), ways) if ways > 1 else None
    weight = jax.tree.map(jnp.asarray, quantise(random(*spec.shape), spec, kind, "float32"))
    x = jnp.asarray(random(5, *spec.shape[-spec.inputs :], seed=1))
    wanted = np.asarray(linear(x, weight), np.float64)
    if mesh is not None:
        weight = jax.device_put(weight, param_shardings(weight.specs(), mesh))
    found = jax.jit(linear)(x, with_body(weight, "triton_interpreted", mesh))
    # Where inputs are divided, each device rounds its own by their own largest.
    bound = 2 * PRODUCTS[kind] if ways > 1 else 1e-5
    np.testing.assert_allclose(found, wanted, atol=bound * np.abs(wanted).max(), rtol=0)


def test_what_multiplies_follows_from_the_device():
    weight = quantise(random(*WIDE.shape), WIDE, "fp8", "bfloat16")
    table = quantise(random(300, 80), ParamSpec((300, 80), ("vocab", "embed"), inputs=1), "int8",
                     "bfloat16")  # fmt: skip
    for device, body, why in (
        (Device("cuda", "NVIDIA H200", (9, 0)), "triton", "80 columns in groups of 80"),
        (Device("cuda", "NVIDIA A100", (8, 0)), "reference", "float8_e4m3fn weights need a newer"),
        (Device("cpu"), "reference", ""),
    ):
        params, said = with_multipliers({"qkv": weight, "embed": table}, device, None)
        assert params["qkv"].multiplier.body == body and why in said and bool(why) == bool(said)
        assert params["embed"].multiplier.body == "reference"


def quantised(model, kind: str):
    specs = family_of(model.config.family).param_specs(model.config)
    return quantise_params(model.params, specs, kind, "float32")


@pytest.mark.parametrize("family", ORACLE_FAMILIES)
def test_every_familys_logits_stay_where_they_are(family, tmp_path):
    """In two terms each, nearly as close as float32; a part wired wrongly would be far off."""
    model = load_model(family_folder(tmp_path, family), dtype="float32")
    tokens, wanted = oracle(family)
    found = dense_logits(model.config, quantised(model, "w16a16"), tokens)
    assert np.abs(found - wanted).max() < 1.5e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v2"])
def test_logits_are_those_of_the_weights_that_are_left(family, tmp_path):
    """Of rounded weights, float32 products and those of two int8 terms; one term is less exact."""
    folder = hf_folder(tmp_path) if family == "llama" else family_folder(tmp_path, family)
    model = load_model(folder, dtype="float32")
    tokens = oracle("qwen3")[0]
    rounded = jax.tree.map(
        lambda leaf: jnp.asarray(dense(leaf), jnp.float32) if isinstance(leaf, Quantised) else leaf,
        quantised(model, "int8"),
        is_leaf=lambda leaf: isinstance(leaf, Quantised),
    )
    wanted = dense_logits(model.config, rounded, tokens)
    for kind, bound in (("int8", 1e-4), ("w8a8-hl", 2e-3), ("w8a8", 0.3)):
        found = dense_logits(model.config, quantised(model, kind), tokens)
        difference = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert difference < bound, kind
    assert difference > 1e-3, "one term is noticed"


# -- the engine ------------------------------------------------------------------------------------

QUANTISED = Setup(quantization="w8a8-hl", deterministic=True, pages=14)


def test_what_stays_in_float_and_what_the_weights_take():
    specs = family_of("llama").param_specs(TINY)
    leaves = named_leaves(quantised_specs(specs, "w16a16", "float32"))
    stored = {name: spec.dtype for name, spec in leaves}
    layer = {n.removeprefix("layers.0."): d for n, d in stored.items() if n.startswith("layers.0.")}
    assert {name for name, kind in layer.items() if kind is None} == {"attn_norm", "mlp_norm"}
    assert {n for n in layer if n.startswith("qkv")} == {"qkv.values", "qkv.scales", "qkv.low"}
    engine, plain = built(QUANTISED), built(Setup())
    params = jax.tree.leaves(engine.runner.params)
    assert engine.memory.weights_bytes == sum(leaf.nbytes for leaf in params)
    assert engine.memory.weights_bytes < 0.4 * plain.memory.weights_bytes
    assert engine.memory.workspace_bytes > plain.memory.workspace_bytes


def test_all_bits_are_the_same_alone_in_company_after_prefix_hits_and_preemption():
    these = [dataclasses.replace(r, max_new_tokens=30) for r in requests(3, 12, shared=40)]
    alone = {r.id: drive(engine_for(QUANTISED), [r])[r.id] for r in these}
    engine = engine_for(QUANTISED)
    assert engine.scheduler.policy.separate_phases  # a probe could not tell that programs agree
    outputs = drive(engine, these, arrivals=4)
    assert engine.counters.preemptions > 2 and engine.counters.prefix_hits > 100
    same(outputs, alone)
    for r in these[:3]:
        check(r, outputs[r.id], tiny_params(quantization="w8a8-hl"), tolerance=2e-3)


def test_two_devices_give_what_one_gives():
    these = requests(4, 6)
    setup = Setup(quantization="w8a8-hl")
    engine = engine_for(dataclasses.replace(setup, devices=2))
    qkv = engine.runner.params["layers"][0]["qkv"]
    for part in (qkv.values, qkv.scales):
        assert part.addressable_shards[0].data.size * 2 == part.size
    for r, output in zip(these, drive(engine, these).values()):
        check(r, output, tiny_params(quantization="w8a8-hl"), tolerance=2e-3)


def test_kinds_that_store_alike_have_programs_of_their_own():
    one, other = (tiny_params(quantization=kind) for kind in ("w8a8", "w8a8-hl"))
    assert jax.tree.leaves(one)[0].shape == jax.tree.leaves(other)[0].shape
    assert describe_arrays(one) != describe_arrays(other)


def test_what_is_chosen():
    assert choose(None, "none", "cpu") == choose("none", "none", "cuda") == "none"
    assert choose(None, "w8a8", "cpu") == choose("auto", "w8a8", "cpu") == "w8a8"
    assert choose("auto", "none", "cpu") == "w8a8-hl" and choose("auto", "none", "cuda") == "none"
    assert choose("int8", "w8a8", "cpu") == "int8" and choose("none", "w8a8", "cpu") == "none"
    for asked, stored, platform, problem in (
        ("w16a16", "w8a8", "cpu", "as w8a8, which can be served as int8, w8a8, w8a8-hl or none"),
        ("w8a8", "w16a16", "cpu", "take the original checkpoint"),
        ("w8a8-hl", "none", "cuda", "served on cpu only so far, not on cuda"),
        ("int8", "none", "tpu", "served on cpu, cuda only so far, not on tpu"),
        ("awq", "none", "cpu", "quantization is 'awq'; choose none, auto, int8"),
    ):
        with pytest.raises(ValueError, match=problem):
            choose(asked, stored, platform)
    with pytest.raises(ValueError, match="quantization is 'fp4'"):
        EngineConfig(quantization="fp4")
