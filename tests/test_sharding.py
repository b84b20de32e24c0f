"""Logical axes → rules → mesh: placement, refusals, and a sharded model equal to the whole one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer.config import ModelConfig
from jaxinfer.models import llama
from jaxinfer.params import ParamSpec, named_leaves
from jaxinfer.sharding import (
    DEFAULT_RULES,
    MESH_AXES,
    ShardingError,
    make_mesh,
    param_shardings,
    partition_spec,
    pool_sharding,
    replicated,
    sharding_of,
)

ROOT = Path(__file__).resolve().parent.parent
MESH = AbstractMesh((1, 1, 8, 1), MESH_AXES)
TINY = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=512,  # eight blocks of gate and up
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    max_position=128,
)


def test_every_parameter_lies_where_the_rules_say():
    placed = {n: s.spec for n, s in named_leaves(param_shardings(llama.param_specs(TINY), MESH))}
    layer = {n.removeprefix("layers.1."): s for n, s in placed.items() if n.startswith("layers.1.")}
    assert layer == {
        "attn_norm": PartitionSpec(None),
        "qkv": PartitionSpec("model", None, None, None),
        "o": PartitionSpec(None, "model", None),
        "mlp_norm": PartitionSpec(None),
        "gate_up": PartitionSpec("model", None, None, None),
        "down": PartitionSpec(None, "model"),
    }
    assert placed["embed"] == placed["head"] == PartitionSpec("model", None)
    assert placed["final_norm"] == PartitionSpec(None)


def test_pool_is_split_by_kv_head_and_slot_state_is_whole():
    assert pool_sharding((16, 8, 4, 8), MESH).shard_shape((16, 8, 4, 8)) == (16, 1, 4, 8)
    assert replicated(MESH).shard_shape((32, 5)) == (32, 5)


def test_axes_that_meet_on_one_mesh_axis_collide():
    with pytest.raises(ShardingError, match=r"\('heads', 'mlp'\) collide .*'model', 'model'"):
        partition_spec(("heads", "mlp"))
    assert partition_spec(("heads", "mlp"), {"heads": "model", "mlp": None}) == PartitionSpec(
        "model", None
    )
    with pytest.raises(ShardingError, match=r"layers.0.router: .* collide"):
        param_shardings({"layers": [{"router": ParamSpec((8, 8), ("vocab", "mlp"))}]}, MESH)


def test_an_axis_that_does_not_divide_names_parameter_axis_and_sizes():
    specs = llama.param_specs(dataclasses.replace(TINY, intermediate_size=252))
    with pytest.raises(ShardingError) as caught:
        param_shardings(specs, MESH)
    for part in ("layers.0.down", "'mlp'", "size 252", "8 devices", "'model'"):
        assert part in str(caught.value)
    with pytest.raises(ShardingError, match=r"KV pool: axis 'kv_heads' of size 3 .* 8 devices"):
        pool_sharding((16, 3, 4, 8), MESH)


def test_unknown_names_are_refused():
    with pytest.raises(ShardingError, match="'depth' has no rule; known: batch"):
        partition_spec(("depth",))
    spec = ParamSpec((8,), ("embed",))
    with pytest.raises(ShardingError, match="norm: axis 'embed' goes to 'rows', which is no axis"):
        sharding_of(spec, MESH, {**DEFAULT_RULES, "embed": "rows"}, "norm")


def test_mesh_takes_the_first_devices_and_refuses_more_than_there_are():
    devices = jax.devices()
    assert dict(make_mesh(devices).shape) == {"data": 1, "stage": 1, "model": 1, "expert": 1}
    with pytest.raises(ShardingError, match=f"tensor_parallel_size = {len(devices) + 1}, but"):
        make_mesh(devices, len(devices) + 1)
    with pytest.raises(ShardingError, match="tensor_parallel_size = 0"):
        make_mesh(devices, 0)
    with pytest.raises(ShardingError, match=r"= 2, but there is 1 device; leave it at 1$"):
        make_mesh(devices[:1], 2)
    with pytest.raises(ShardingError, match=r"= 3, but there are 2 devices; choose 1 to 2$"):
        make_mesh([*devices[:1]] * 2, 3)


EIGHT_WAYS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jaxinfer.models import llama
from jaxinfer.params import abstract_params, init_params
from jaxinfer.sharding import make_mesh, param_shardings, pool_sharding, replicated, sharding_of
from test_sharding import TINY
from pallas_kernels.paged_attention import apply_rope

def attend(q, k, v, sinks, rotary, norms):
    assert norms is None
    q = apply_rope(q.reshape(len(q), -1, q.shape[-1]), *rotary).reshape(q.shape)
    k = apply_rope(k, *rotary)
    scores = jnp.einsum("tkgh,skh->kgts", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)

def forward(params, tokens):
    positions = jnp.arange(tokens.shape[0])
    x = llama.embed(params, TINY, tokens, positions)
    context = llama.layer_context(TINY, positions)
    for layer in params["layers"]:
        x = llama.layer(layer, TINY, TINY.kind(0), x, context, attend)
    return llama.unembed(params, TINY, x)

specs = llama.param_specs(TINY)
mesh = make_mesh(jax.devices(), 8)
shardings = param_shardings(specs, mesh)
abstract = abstract_params(specs, "float32", lambda spec: sharding_of(spec, mesh))
assert jax.tree.leaves(shardings) == [s.sharding for s in jax.tree.leaves(abstract)]
whole = init_params(specs, "float32")
params = jax.device_put(whole, shardings)
tokens = jax.device_put(np.arange(11) * 5 % TINY.vocab_size, replicated(mesh))
program = jax.jit(forward, out_shardings=replicated(mesh)).lower(params, tokens).compile()
pool = jnp.zeros((16, 8, 4, 8), device=pool_sharding((16, 8, 4, 8), mesh))
print(json.dumps({
    "error": float(np.abs(np.asarray(program(params, tokens)) - forward(whole, tokens)).max()),
    "devices": len(params["layers"][0]["qkv"].sharding.device_set),
    "qkv": params["layers"][0]["qkv"].addressable_shards[0].data.shape,
    "pool": pool.addressable_shards[3].data.shape,
    "all_reduces": program.as_text().count(" all-reduce("),
}))
"""


def test_sharded_model_equals_the_whole_one_on_eight_devices():
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_WAYS],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["error"] < 1e-5
    assert found["devices"] == 8
    assert found["qkv"] == [1, 4, 8, 32]
    assert found["pool"] == [16, 1, 4, 8]
    # Two a layer, and one for the embedding rows.
    assert found["all_reduces"] == 2 * TINY.num_layers + 1
