"""config.json files as they were published: their parameters counted, what they say, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config import LayerKind, RopeConfig
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config
from jaxinfer.params import named_leaves

FIXTURES = Path(__file__).parent / "fixtures"
PUBLISHED = json.loads((FIXTURES / "published_configs.json").read_text())
GPT2 = PUBLISHED["openai-community/gpt2"]["config"]
PYTHIA = PUBLISHED["EleutherAI/pythia-70m"]["config"]


def hf_config(family: str) -> dict[str, Any]:
    return json.loads((FIXTURES / "oracles" / family / "config.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    config = model_config(PUBLISHED[name]["config"])
    specs = family_of(config.family).param_specs(config)
    found = sum(math.prod(spec.shape) for _, spec in named_leaves(specs))
    assert found == PUBLISHED[name]["parameters"]


def test_gpt2():
    config = model_config(GPT2)
    assert (config.max_position, config.intermediate_size, config.head_dim) == (1024, 3072, 64)
    assert config.tie_embeddings and config.activation == "gelu_tanh"
    assert config.kinds == (LayerKind(rope="none"),) * 12
    by_layer = model_config(GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    assert [kind.query_scale for kind in by_layer.kinds[:3]] == [1, 1 / 2, 1 / 3]


def test_pythia():
    config = model_config(PYTHIA)
    assert (config.rotary_dim, config.rope.theta, config.parallel) == (16, 10000.0, True)
    other = model_config(PYTHIA | {"rotary_emb_base": 500, "rotary_pct": 1.0})
    assert (other.rotary_dim, other.rope.theta) == (None, 500.0)
    scaled = PYTHIA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_emb_base": 500}
    assert model_config(scaled).rope == RopeConfig(500.0, "linear", 2.0)


def test_falcon():
    """Of the first architecture, and of the second with a norm for each half or for both."""
    first, second = (model_config(PUBLISHED[f"tiiuae/falcon-{n}"]["config"]) for n in ("7b", "40b"))
    assert (first.num_kv_heads, first.norms, first.max_position) == (1, "shared", 2048)
    assert (second.num_kv_heads, second.norms, second.parallel) == (8, "pre", True)
    hf = PUBLISHED["tiiuae/falcon-7b"]["config"] | {"multi_query": False, "parallel_attn": False}
    plain = model_config(hf)
    assert (plain.num_kv_heads, plain.norms, plain.parallel) == (71, "pre", False)


def test_windows_and_rotation_by_layer():
    command = model_config(PUBLISHED["CohereForAI/c4ai-command-r7b-12-2024"]["config"])
    assert command.kinds[:4] == (LayerKind(4096),) * 3 + (LayerKind(rope="none"),)
    olmo = model_config(PUBLISHED["allenai/Olmo-3-1025-7B"]["config"])
    assert olmo.kinds[:4] == (LayerKind(4096, "local"),) * 3 + (LayerKind(),)
    assert (olmo.rope.scaling, olmo.local_rope) == ("yarn", RopeConfig(500000.0))


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (GPT2 | {"activation_function": "mish"}, "gpt2: activation_function = 'mish' is not"),
        (PYTHIA | {"hidden_act": "relu6"}, "gpt_neox: hidden_act = 'relu6' is not supported"),
        (GPT2 | {"n_ctx": 512}, "n_ctx = 512 contradicts n_positions = 1024"),
        (GPT2 | {"n_head": 7}, "n_head.* = 7 does not divide hidden_size = 768"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        (GPT2 | {"architectures": ["GPT2ForSequenceClassification"]}, "only ...ForCausalLM"),
        ({k: v for k, v in GPT2.items() if k != "n_positions"}, "lacks 'n_positions'"),
        (GPT2 | {"layer_norm_epsilon": 0}, "layer_norm_epsilon = 0, expected a number above 0"),
        (
            PYTHIA | {"rotary_pct": 0.3},
            "19 of 64 values of a head rotate, expected pairs .* rotary_pct",
        ),
        (PYTHIA | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        (hf_config("phi") | {"qk_layernorm": True}, "phi: qk_layernorm = True is not supported"),
        (hf_config("opt") | {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        (hf_config("opt") | {"word_embed_proj_dim": 16}, "word_embed_proj_dim = 16 .* .only 32."),
        (hf_config("olmo") | {"clip_qkv": -1}, "clip_qkv = -1, expected a number from"),
        (hf_config("starcoder2") | {"norm_type": "rms"}, "norm_type = 'rms' is not supported"),
        (hf_config("falcon") | {"alibi": True}, "falcon: alibi = True is not supported"),
        (hf_config("falcon") | {"parallel_attn": False}, "parallel_attn = False is not supported"),
        (
            hf_config("falcon") | {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn = 2 without new_decoder_architecture",
        ),
        (hf_config("gptj") | {"rotary": False}, "gptj: rotary = False is not supported"),
        (hf_config("gptj") | {"rotary_dim": 16}, "16 of 8 values of a head rotate"),
        (hf_config("nemotron") | {"hidden_act": "mish"}, "nemotron: hidden_act = 'mish'"),
        (hf_config("gemma") | {"hidden_act": "relu"}, "gemma: hidden_act = 'relu'"),
        (hf_config("cohere") | {"hidden_act": "gelu"}, "cohere: hidden_act = 'gelu'"),
        (hf_config("gpt_oss") | {"hidden_act": "gelu"}, "gpt_oss: hidden_act = 'gelu'"),
        (hf_config("gpt_oss") | {"swiglu_limit": 0}, "swiglu_limit = 0, expected a number"),
        (
            hf_config("gpt_oss") | {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5 of only 4 experts",
        ),
        (hf_config("mixtral") | {"num_local_experts": 0}, "num_local_experts = 0, expected an int"),
        (hf_config("olmoe") | {"num_experts_per_tok": 2.0}, "num_experts_per_tok = 2.0, expected"),
        (
            hf_config("qwen2_moe") | {"shared_expert_intermediate_size": -1},
            "shared_expert_intermediate_size = -1, expected an integer from 0",
        ),
    ],
)
def test_what_is_not_computed_is_refused(hf, message):
    with pytest.raises(ValueError, match=message):
        model_config(hf)


KIMI = hf_config("deepseek_v3") | {"model_type": "kimi_k2"}
CHUNKS = {"chunk_size": 32, "local_size": 8, "original_max_position_embeddings": 32}


def test_a_model_by_another_name():
    """Kimi K2 is DeepSeek V3 in other sizes, and its files name the class so."""
    assert model_config(KIMI) == model_config(hf_config("deepseek_v3"))


def test_dual_chunk_attention_is_plain_within_the_first_chunk():
    """As in Qwen2.5-7B-Instruct-1M and the configs for long contexts of Qwen3-2507."""
    plain = hf_config("qwen2")
    chunked = model_config(plain | {"dual_chunk_attention_config": CHUNKS})
    assert (chunked.max_position, model_config(plain).max_position) == (32, 64)
    with pytest.raises(ValueError, match="dual_chunk_attention_config lacks 'chunk_size'"):
        model_config(plain | {"dual_chunk_attention_config": {"local_size": 8}})


@pytest.mark.parametrize(
    "setting",
    [
        {"attention_chunk_size": 8192},
        {"use_logn_attn": True},
        {"rope_interleaved": True},
        {"index_topk": 2048},
        {"is_encoder_decoder": True},
        {"use_bidirectional_attention": True},
    ],
    ids=str,
)
def test_what_no_family_computes_is_refused_in_all(setting):
    (name,) = setting
    for family in ("qwen2", "smollm3", "gpt_oss"):
        with pytest.raises(ValueError, match=f"{family}: {name} = .* is not supported"):
            model_config(hf_config(family) | setting)
        model_config(hf_config(family) | {name: None})
