"""The kernel that norms and rotates heads and writes pages, against XLA's operations."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.models import decoder
from pallas_kernels.paged_attention import rotate_and_write, write_kv

TOKENS, KV, GROUP, PAGES, SIZE = 5, 2, 3, 6, 16
PLACES = jnp.asarray([3, 5, 0, 0, 2], jnp.int32), jnp.asarray([15, 0, 7, 7, 4], jnp.int32)


def config(head_dim: int, qk_norm: str = "head", offset: float = 0.0) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=KV * GROUP,
        num_kv_heads=KV,
        head_dim=head_dim,
        max_position=64,
        rope=RopeConfig(theta=100.0),
        qk_norm=qk_norm,
        norm_offset=offset,
    )


def arrays(c: ModelConfig, dtype: str) -> dict:
    rng = np.random.default_rng(c.head_dim)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.normal(size=shape), dtype)

    pool = (PAGES, KV, SIZE, c.head_dim)
    positions = jnp.asarray([47, 0, 9, 9, 30], jnp.int32)
    return {
        "qkv": normal(TOKENS, KV, GROUP + 2, c.head_dim),
        "pools": (normal(*pool), normal(*pool)),
        "params": {"q_norm": normal(c.head_dim), "k_norm": normal(c.head_dim)},
        "rotary": decoder.layer_context(c, positions)["global"],
    }


def by_kernel(c: ModelConfig, a: dict) -> tuple:
    norms = tuple(a["params"].values()) if c.qk_norm == "head" else None
    how = {"eps": c.rms_norm_eps, "norm_offset": c.norm_offset}
    where = (a["qkv"], *a["pools"], *PLACES, a["rotary"], norms)
    return rotate_and_write(*where, **how, implementation="triton_interpreted")


def by_xla(c: ModelConfig, a: dict) -> tuple:
    qk, v = a["qkv"][:, :, : GROUP + 1], a["qkv"][:, :, GROUP + 1]
    if c.qk_norm == "head":
        qk = decoder._norm_qk(a["params"], c, qk)
    flat = qk.reshape(TOKENS, -1, c.head_dim)
    qk = decoder.apply_rope(flat, *a["rotary"]).reshape(qk.shape)
    return qk[:, :, :GROUP], *write_kv(*a["pools"], *PLACES, qk[:, :, GROUP], v)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "qk_norm", "offset"),
    [("float32", 16, "none", 0.0), ("bfloat16", 16, "head", 0.0), ("float32", 24, "head", 1.0)],
)
def test_kernel_equals_separate_operations(dtype, head_dim, qk_norm, offset):
    """Head sizes that are no power of two too; page 0 takes whatever comes last."""
    c = config(head_dim, qk_norm, offset)
    a = arrays(c, dtype)
    tolerance = 1e-5 if dtype == "float32" else 0.02
    for found, expected in zip(by_kernel(c, a), by_xla(c, a), strict=True):
        assert found.dtype == expected.dtype
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        if found.shape[0] == PAGES:
            found, expected = found[1:], expected[1:]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_show_in_their_keys_alone(bad):
    c = config(16)
    a = arrays(c, "bfloat16")
    a["qkv"] = a["qkv"].at[1, 1, GROUP + 1, 3].set(bad)
    _, k, v = (np.asarray(x, np.float32) for x in by_kernel(c, a))
    assert np.isfinite(v).all() and v[5, 1, 0, 3] == 0
    assert np.isnan(k[5, 1, 0, 3]) and np.isnan(k).sum() == 1


@pytest.mark.parametrize(
    ("changed", "kind", "fusible"),
    [
        ({}, LayerKind(), True),
        ({"qk_norm": "none"}, LayerKind(), True),
        ({"qk_norm": "all"}, LayerKind(), False),
        ({"rope_pairs": "neighbours"}, LayerKind(), False),
        ({"rotary_dim": 8}, LayerKind(), False),
        ({}, LayerKind(rope="none"), False),
        ({}, LayerKind(query_scale=0.5), False),
    ],
)
def test_models_take_the_kernel_where_it_computes_what_they_do(changed, kind, fusible):
    assert decoder._fusible(dataclasses.replace(config(16), **changed), kind) is fusible
