"""Latent attention: absorbed equals expanded, and what its pages hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from test_families import NOTICED, TOLERANCE, difference, family_folder
from test_family_engine import continuations
from tiny_checkpoint import dense_attention, dense_logits

from jaxinfer import startup
from jaxinfer.checkpoints import describe, inspect_checkpoint, load_model
from jaxinfer.config import EngineConfig, MlaConfig, ModelConfig
from jaxinfer.kv_pool import abstract_pools, empty_pools, kv_groups
from jaxinfer.memory_plan import plan_memory, workspace_bytes
from jaxinfer.models import family_of, mla
from jaxinfer.models.hf_config import model_config
from jaxinfer.models.moe import route
from jaxinfer.models.rope import rope_tables
from jaxinfer.params import abstract_params
from jaxinfer.programs import program_set, step_shapes
from jaxinfer.sharding import MESH_AXES, ShardingError, param_shardings
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.step_model import StepModel
from pallas_kernels.paged_attention import (
    apply_rope,
    paged_attention,
    paged_prefill,
    write_latent,
)

TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = family_folder(tmp_path_factory.mktemp("v3"), "deepseek_v3")
    return load_model(folder, dtype="float32")


def expanded(params, c, x, cos, sin):
    """Attention as the paper writes it first: keys and values of every head, in full."""
    m = c.mla

    def norm(rows, weight):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * weight

    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    q = np.einsum("tr,hdr->thd", norm(x @ p["q_a"].T + p["q_a_bias"], p["q_a_norm"]), p["q"])
    compressed = x @ p["kv_a"].T + p["kv_a_bias"]
    latent = norm(compressed[:, : m.kv_rank], p["kv_a_norm"])
    k = np.einsum("tl,hln->thn", latent, p["k_b"])
    v = np.einsum("tl,hvl->thv", latent, p["v_b"])

    def turned(rows):  # float32: what tables are made in
        rows = jnp.asarray(rows, jnp.float32)
        return np.asarray(apply_rope(rows, cos, sin, "neighbours"), np.float64)

    shared = turned(compressed[:, None, m.kv_rank :]).repeat(c.num_heads, axis=1)
    q = np.concatenate([q[..., : m.nope_dim], turned(q[..., m.nope_dim :])], -1)
    k = np.concatenate([k, shared], -1)
    scores = np.einsum("thd,shd->hts", q, k) * c.scale
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hts,shv->thv", weights, v)
    return np.einsum("thv,dhv->td", attended, p["o"]) + p["o_bias"]


def test_the_absorbed_form_equals_the_expanded_one(model):
    c, params = model.config, model.params["layers"][1]
    x = np.random.default_rng(0).normal(size=(TOKENS, c.hidden_size)).astype(np.float32)
    tables = rope_tables(c.rope, c.mla.rope_dim, jnp.arange(TOKENS))
    seen = []

    def attend(q, k, v):
        seen.append((q.shape, k.shape, v))
        return dense_attention(c, None, q, k, v)

    found = mla.latent_attention(params, c, c.mla, jnp.asarray(x), tables, attend)
    wanted = expanded(params, c, x.astype(np.float64), *tables)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    width = c.mla.kv_rank + c.mla.rope_dim
    assert seen == [((TOKENS, 1, c.num_heads, width), (TOKENS, 1, width), None)]


def test_the_latents_norms_have_an_epsilon_of_their_own(model, monkeypatch):
    assert model.config.rms_norm_eps == 1e-2
    monkeypatch.setattr(mla, "LATENT_EPS", model.config.rms_norm_eps)
    assert difference(model.config, model.params, "deepseek_v3") > NOTICED


def test_halves_are_neighbours_in_another_order(model):
    """`rope_interleave` false: the same model with the rotating rows sorted by their place."""
    m, c = model.config.mla, dataclasses.replace(model.config, rope_pairs="halves")
    order = np.arange(m.rope_dim).reshape(-1, 2).T.reshape(-1)
    layers = []
    for layer in model.params["layers"]:
        changed = {name: np.array(layer[name]) for name in ("q", "kv_a", "kv_a_bias")}
        changed["q"][:, m.nope_dim :] = changed["q"][:, m.nope_dim + order]
        for name in ("kv_a", "kv_a_bias"):
            changed[name][m.kv_rank :] = changed[name][m.kv_rank + order]
        layers.append(layer | {name: jnp.asarray(value) for name, value in changed.items()})
    assert difference(c, model.params | {"layers": layers}, "deepseek_v3") < TOLERANCE


# -- Pages ------------------------------------------------------------------------------------


def test_a_page_holds_a_latent_and_a_key_a_token(model):
    c = model.config
    (group,) = kv_groups(c, 10, 4, "float32")
    assert (group.kv_heads, group.head_dim, group.value_dim) == (1, 16 + 8, 16)
    assert group.page_bytes == c.num_layers * 4 * (16 + 8) * 4
    pools = empty_pools((group,))
    assert [tuple(p.shape for p in layer) for layer in pools] == [((10, 1, 4, 24),)] * 3
    assert sum(p.nbytes for layer in pools for p in layer) == 10 * group.page_bytes


def test_inspect_counts_latents(tmp_path):
    info = inspect_checkpoint(family_folder(tmp_path, "deepseek_v3"))
    assert info.kv_bytes_per_token("bfloat16") == 3 * (16 + 8) * 2
    text = " ".join(str(cell) for column in describe(info).columns for cell in column.cells)
    assert "4 query, of 8 + 8, over one latent of 16 + 8" in text


def test_the_plan_promises_whole_pools_on_every_device(model):
    """The latent is that of all heads: more devices hold no more of it."""
    one, two = (
        plan_memory(
            model.config,
            EngineConfig(max_num_seqs=64, kv_pool_bytes=1 << 18, tensor_parallel_size=ways),
            64, 0, 0, jax.devices()[0],
        )
        for ways in (1, 2)
    )  # fmt: skip
    assert one[1] == two[1]
    assert one[0].pool_bytes == two[0].pool_bytes == one[1][0].num_pages * one[1][0].page_bytes


def test_the_plan_has_room_for_the_queries_of_all_heads():
    """In latents they are several times as wide as the model."""
    model = ModelConfig(
        "deepseek_v2", 512, 256, 512, 1, 64, 1, 512 + 64, max_position=1024, rotary_dim=64,
        rope_pairs="neighbours", mla=MlaConfig(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    )  # fmt: skip
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=512)
    groups = kv_groups(model, 20, 64, "float32")
    params = abstract_params(
        family_of("deepseek_v2").param_specs(model), "float32", lambda spec: None
    )
    slots = jax.eval_shape(
        lambda: (empty_slots(8, (16,)), empty_options(8, 512), empty_history(8, 512))
    )
    state = (params, abstract_pools(groups), *slots)
    step = StepModel(model, groups, "reference")
    (largest,) = (
        program.lower().compile().memory_analysis().temp_size_in_bytes
        for program in program_set(step, step_shapes(8, 512, 64, 1), state)
        if program.name == "forward 8+512"
    )
    slack = 64 << 20
    assert 2 * 520 * 64 * (512 + 64) * 4 < largest < workspace_bytes(model, engine, 4) - slack


def test_heads_that_do_not_divide_are_refused(model):
    specs = family_of("deepseek_v3").param_specs(model.config)
    mesh = AbstractMesh((1, 1, 8, 1), MESH_AXES)
    with pytest.raises(
        ShardingError, match=r"layers.0.\w+: axis 'heads' of size 4 does not divide"
    ):
        param_shardings(specs, mesh)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_stay_finite_and_their_keys_say_that_they_were_not(bad):
    pool = jnp.zeros((3, 1, 4, 6))
    k = np.ones((4, 1, 6), np.float32)
    k[1, 0, 2], k[2, 0, 5] = bad, np.nan  # a value; the rest of a key
    pages, offsets = jnp.asarray([1, 1, 2, 0]), jnp.asarray([0, 1, 0, 0])
    written = np.asarray(write_latent(pool, pages, offsets, jnp.asarray(k), 4))
    assert np.isfinite(written[..., :4]).all()
    poisoned = np.isnan(written).any(-1)
    assert np.argwhere(poisoned).tolist() == [[1, 0, 1], [2, 0, 0]]
    assert (written[1, 0, 0] == 1).all() and written[1, 0, 1, :4].tolist() == [1, 1, 0, 1]
    float16 = write_latent(pool.astype("float16"), pages, offsets, jnp.asarray(k * 1e5), 4)
    assert np.isfinite(float16[..., :4]).all() and np.isnan(float16[1, 0, 0, 4:]).all()


@pytest.mark.parametrize("implementation", ["reference", "reference_static"])
def test_attention_over_latents_equals_values_of_their_own(implementation):
    """One array whose keys begin with values, or two."""
    rng = np.random.default_rng(1)
    k = jnp.asarray(rng.normal(size=(12, 1, 16, 24)), jnp.float32)
    v = k[..., :16]
    table = jnp.asarray(rng.permutation(np.arange(1, 11)).reshape(2, 5), jnp.int32)
    q = jnp.asarray(rng.normal(size=(70, 1, 3, 24)), jnp.float32)
    how = {"scale": 0.3, "implementation": implementation}
    tiles = jnp.asarray([[0, 64, 0, 5], [64, 6, 0, 69], [0, 0, 0, 0]])
    for run, rows, where in (
        (paged_attention, q[:2], jnp.asarray([70, 0])),
        (paged_prefill, q, tiles),
    ):
        apart = run(rows, k, v, table, where, **how)
        joined = run(rows, k, None, table, where, value_dim=16, **how)
        assert joined.shape == (*rows.shape[:3], 16)
        np.testing.assert_array_equal(joined, apart)
        for pages, width in ((None, None), (v, 16)):
            with pytest.raises(ValueError, match="either v_pool or the value_dim"):
                run(rows, k, pages, table, where, value_dim=width, **how)


@pytest.mark.parametrize("devices", [1, 2])
def test_preempted_latents_come_back_from_the_host(model, devices):
    """A pool too small for all: sequences lose their pages to host memory, and nothing else; on
    two devices, of which each has half of the heads and all of the latents."""
    (group,) = kv_groups(model.config, 1, 4, "float32")
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=4,
        kv_pool_bytes=20 * group.page_bytes,
        kv_offload_bytes=40 * group.page_bytes,
        prefix_cache=False,
        tensor_parallel_size=devices,
    )
    engine = startup.build_engine(model, config)
    engine.compiles.close()
    prompts = [np.random.default_rng(i).integers(0, 96, 9).tolist() for i in range(4)]
    alone = [continuations(engine, [prompt], 30)[0][0] for prompt in prompts]
    assert engine.counters.preemptions == 0
    together = [tokens for tokens, _ in continuations(engine, prompts, 30)]
    assert engine.counters.preemptions > 0
    assert together == alone
    for prompt, said in zip(prompts, alone):
        logits = dense_logits(model.config, model.params, np.array(prompt + said))[8:-1]
        assert (logits.max(-1) - logits[range(30), said] < 1e-4 * np.abs(logits).max()).all()
    (latents,), q = engine.runner.pools[0], engine.runner.params["layers"][0]["q"]
    assert latents.addressable_shards[0].data.shape == latents.shape
    assert q.addressable_shards[0].data.shape[0] == model.config.num_heads // devices


# -- What is chosen and what is refused -------------------------------------------------------


def test_groups_limit_the_choice_and_the_correction_does_not_weigh(model):
    """Worked by hand: 4 groups of 2, of which 2 are open, and the best 3 experts of those."""
    moe = dataclasses.replace(model.config.moe, normalised=False, weight_scale=2.0)
    scores = np.array([0.9, 0.1, 0.5, 0.55, 0.6, 0.35, 0.2, 0.3])
    logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)[None]
    zero, lift = np.zeros(8, np.float32), np.zeros(8, np.float32)
    lift[6] = 1.0  # group 3 becomes the best one
    weights, experts = route(moe, logits, jnp.asarray(zero))
    assert experts.tolist() == [[0, 3, 2]]  # groups 0 and 1: 1.0, 1.05; group 2 has only 0.95
    np.testing.assert_allclose(weights[0], 2 * scores[[0, 3, 2]], rtol=1e-6)
    weights, experts = route(moe, logits, jnp.asarray(lift))
    assert experts.tolist() == [[6, 3, 2]]
    np.testing.assert_allclose(weights[0], 2 * scores[[6, 3, 2]], rtol=1e-6)
    moe = dataclasses.replace(moe, scoring="softmax")  # a group is as good as its best expert
    _, experts = route(moe, logits)
    assert experts.tolist() == [[0, 4, 5]]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 is odd"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3"),
        ("deepseek_v3", {"n_group": 8}, "of 2 or more"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group = 5"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5, expected 1 to 4"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family, changes, words):
    oracle = Path(__file__).parent / "fixtures" / "oracles" / family / "config.json"
    with pytest.raises(ValueError, match=words):
        model_config(json.loads(oracle.read_text()) | changes)


def test_the_published_configs_are_read():
    """DeepSeek-R1 and DeepSeek-V2-Lite, as their files say it."""
    scaling = {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }  # fmt: skip
    common = {
        "vocab_size": 129280, "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "max_position_embeddings": 163840, "attention_bias": False,
    }  # fmt: skip
    r1 = model_config(common | {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "rope_scaling": scaling,
        "num_nextn_predict_layers": 1,
    })  # fmt: skip
    assert (r1.num_kv_heads, r1.head_dim, r1.value_dim, r1.rotary_dim) == (1, 576, 512, 64)
    assert r1.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert r1.rope.attention_factor == 1.0 and r1.rope.factor == 40
    assert [kind.moe for kind in r1.kinds] == [False] * 3 + [True] * 58
    (group,) = kv_groups(r1, 1, 64, "bfloat16")
    assert group.page_bytes // 64 == 70272  # bytes a token: 61 layers of 576 values
    lite = model_config(common | {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "routed_scaling_factor": 1.0, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "scoring_func": "softmax",
        "rope_scaling": scaling | {"mscale": 0.707, "mscale_all_dim": 0.707},
    })  # fmt: skip
    assert lite.mla.q_rank is None and lite.moe.shared_size == 2816
    assert (lite.moe.groups, lite.moe.scoring, lite.moe.normalised) == (1, "softmax", False)
