"""A layer of latent attention with the kernels in it, interpreted, says what it says by XLA."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_weights import with_body
from tiny_engine import TINY

from jaxinfer import latent_attention
from jaxinfer.config import MlaConfig
from jaxinfer.kv_pool import kv_groups
from jaxinfer.models import family_of
from jaxinfer.params import init_params
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.quantization.weight import specs_of
from jaxinfer.sharding import make_mesh, param_shardings, pool_sharding
from jaxinfer.step import _layer
from jaxinfer.step_model import Placement, StepModel
from pallas_kernels.paged_attention import triton_decode

PAGE, PAGES, WIDTH = 16, 12, 4
POSITIONS = np.array([0, 20, 5, 40], np.int32)  # of decode rows, the first of which is done
PIECE, BEGIN = 5, 30  # tokens of a prompt, the first one's position
NONE, PLAIN = MlaConfig(32, 16, 16, 16, None, False), MlaConfig(32, 16, 16, 16, 64, False)
BLOCKS = MlaConfig(32, 16, 16, 32, 64, False)  # of 32 columns
CASES = {  # the sizes; whether neighbours rotate; devices; whether a prompt's piece is
    # there; the kind of weights
    "DeepSeek's heads": (MlaConfig(512, 128, 64, 128, 64, False), "neighbours", 1, True),
    "two devices": (PLAIN, "neighbours", 2, True),
    "no latent of queries, halves": (NONE, "halves", 1, False),
    "blocks of float8": (BLOCKS, "neighbours", 1, True, "fp8-block"),
    "int4, two devices": (BLOCKS, "neighbours", 2, False, "int4"),
    "int8, biases": (dataclasses.replace(BLOCKS, bias=True), "neighbours", 1, False, "int8"),
    "biases, odd sizes": (MlaConfig(48, 24, 16, 20, 40, True), "neighbours", 1, False),
}


def setup(mla: MlaConfig, pairs: str, ways: int, piece: bool, kind: str = "none"):
    """A model of one layer, its parameters, pages of what was before, and the step's arrays."""
    features = {"mla": mla, "rope_pairs": pairs, "rotary_dim": mla.rope_dim, "o_bias": mla.bias}
    head_dim = mla.kv_rank + mla.rope_dim
    sizes = {"hidden_size": 128, "num_layers": 1, "num_kv_heads": 1, "head_dim": head_dim}
    config = dataclasses.replace(TINY, family="deepseek_v3", **sizes, **features)
    rng = np.random.default_rng(3)
    specs = family_of(config.family).param_specs(config)["layers"][0]
    params = jax.tree.map(  # norms and biases too are of some consequence
        lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32) / max(1, a.shape[-1]) ** 0.5,
        init_params(specs, "float32"),
    )
    params = quantise_params(params, specs, kind, "float32")
    specs = specs_of(params, specs)
    groups = kv_groups(config, PAGES, PAGE, "float32")
    mesh = make_mesh(jax.devices(), ways) if ways > 1 else None
    pool = jnp.asarray(rng.normal(size=groups[0].layer_shape), jnp.float32)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(specs, mesh))
        pool = jax.device_put(pool, pool_sharding(groups[0].layer_shape, mesh, groups[0].axes))
    positions = np.concatenate([POSITIONS, BEGIN + np.arange(PIECE * piece)]).astype(np.int32)
    owners = np.concatenate([np.arange(4), np.full(PIECE * piece, 2)])
    table = np.zeros((4, WIDTH), np.int32)
    table[1:] = 1 + rng.permutation(PAGES - 1)[: 3 * (WIDTH - 1)].reshape(3, -1).repeat(2, 1)[:, :4]
    live = np.arange(len(owners)) > 0
    place = Placement(
        pages=jnp.asarray(np.where(live, table[owners, positions // PAGE], 0)),
        offsets=jnp.asarray(positions % PAGE),
        table=jnp.asarray(table),
        decode_table=jnp.asarray(table),
        kv_lens=jnp.asarray(np.where(live[:4], POSITIONS + 1, 0), jnp.int32),
        tiles=jnp.array([(0, PIECE, 2, BEGIN), (0, 0, 0, 0)], jnp.int32) if piece else None,
    )
    x = jnp.asarray(rng.normal(size=(len(owners), 128)), jnp.float32)
    context = family_of(config.family).layer_context(config, jnp.asarray(positions))
    return StepModel(config, groups, "reference", mesh), params, x, context, (pool,), place


def run(model, params, x, context, pool, place, body):
    model = dataclasses.replace(model, attention=body)
    kind, params = model.config.kind(0), with_body(params, body, model.mesh)
    x, (pool,), _ = _layer(params, x, context, pool, place, model=model, kind=kind)
    return np.asarray(x), np.asarray(pool)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_say_what_xla_says(case, monkeypatch):
    monkeypatch.setattr(triton_decode, "num_splits", lambda programs, longest: 3)
    arguments = setup(*case)
    wanted, wanted_pool = run(*arguments, "reference")
    found, pool = run(*arguments, "triton_interpreted")
    np.testing.assert_allclose(found[1:], wanted[1:], atol=3e-5)
    np.testing.assert_allclose(pool[1:], wanted_pool[1:], atol=1e-5)
    before = np.asarray(arguments[4][0])
    assert (pool[1:] != before[1:]).any() and np.isfinite(pool).all()


def test_keys_that_are_not_split_go_the_same_way(monkeypatch):
    monkeypatch.setattr(triton_decode, "num_splits", lambda programs, longest: 1)
    monkeypatch.setattr(latent_attention, "FEW_ROWS", 2)  # products of the compiler's alone
    arguments = setup(PLAIN, "neighbours", 1, False)  # shapes of its own: traced anew
    wanted, _ = run(*arguments, "reference")
    found, _ = run(*arguments, "triton_interpreted")
    np.testing.assert_allclose(found[1:], wanted[1:], atol=3e-5)


def test_what_is_not_finite_reaches_the_key_alone():
    model, params, x, *rest = setup(PLAIN, "neighbours", 1, False)
    place = rest[-1]
    found, pages = run(model, params, x.at[2, 7].set(jnp.nan), *rest, "triton_interpreted")
    key = pages[int(place.pages[2]), 0, int(place.offsets[2])]
    assert np.isnan(key[PLAIN.kv_rank :]).all() and np.isfinite(key[: PLAIN.kv_rank]).all()
    assert np.isnan(found[2]).all() and np.isfinite(found[[1, 3]]).all()
    assert np.isnan(pages[1:]).sum() == PLAIN.rope_dim


@pytest.mark.parametrize(
    ("tokens", "columns", "outputs", "parts"),
    [
        (64, 7168, 2112, 8),
        (64, 1536, 3072, 4),
        (256, 7168, 2112, 4),
        (2304, 7168, 2112, 1),
        (1, 96, 64, 1),
        (1, 128, 64, 2),
        (1, 192, 64, 1),
    ],
)
def test_parts_of_a_product_fill_a_device(tokens, columns, outputs, parts):
    x = jax.ShapeDtypeStruct((tokens, columns), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((outputs, columns), jnp.bfloat16)
    found = jax.eval_shape(latent_attention._in_parts, x, weight)
    assert found.shape == (parts, tokens, outputs)
    assert found.dtype == (jnp.float32 if parts > 1 else jnp.bfloat16)
