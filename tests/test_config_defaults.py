"""What a config.json leaves unsaid is what transformers would take, or it is refused."""

from __future__ import annotations

import json

import pytest
from test_families import ORACLES

from jaxinfer.models.hf_config import model_config


def config_of(family: str, **changes) -> dict:
    hf = json.loads((ORACLES / family / "config.json").read_text()) | changes
    return {key: value for key, value in hf.items() if value != "(absent)"}


@pytest.mark.parametrize(
    "family", ["mixtral", "cohere", "ernie4_5", "smollm3", "gpt_oss", "gemma3_text"]
)
def test_a_family_with_a_rope_base_of_its_own_must_say_it(family):
    hf = config_of(family, rope_parameters="(absent)", rope_theta="(absent)")
    with pytest.raises(ValueError, match="lacks 'rope_theta'"):
        model_config(hf)


def test_early_models_need_not_say_the_usual_base():
    hf = config_of("olmo2", rope_parameters="(absent)", rope_theta="(absent)")
    assert model_config(hf).rope.theta == 10000.0


def test_a_part_of_a_head_rotates_only_where_the_family_knows_of_it():
    for family in ("olmo2", "qwen2", "gemma2"):
        with pytest.raises(ValueError, match=r"partial_rotary_factor = 0\.5 is not supported"):
            model_config(config_of(family, partial_rotary_factor=0.5))
    assert model_config(config_of("glm4", partial_rotary_factor=0.5)).rotary_dim == 8


def test_defaults_that_other_families_have_otherwise():
    assert model_config(config_of("mistral", sliding_window="(absent)")).kind(0).window == 4096
    assert not model_config(config_of("mistral", sliding_window=None)).kinds
    assert model_config(config_of("smollm3", tie_word_embeddings="(absent)")).tie_embeddings
    windows = config_of("qwen3_moe", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert {kind.window for kind in model_config(windows).kinds} == {8}, "every layer"


def test_what_files_of_experts_chosen_as_deepseeks_leave_unsaid():
    unsaid = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    for family, normalised, dense in (("glm4_moe", True, 1), ("dots1", False, 0)):
        changes = dict.fromkeys((*unsaid, "first_k_dense_replace"), "(absent)")
        config = model_config(config_of(family, **changes))
        moe = config.moe
        assert moe is not None and moe.normalised == normalised
        assert (moe.groups, moe.top_groups, moe.weight_scale) == (1, 1, 1.0)
        assert [kind.moe for kind in config.kinds] == [i >= dense for i in range(3)]
    windows = config_of("dots1", sliding_window=None, layer_types=None)
    assert {kind.window for kind in model_config(windows).kinds} == {None}


def test_rope_settings_that_are_no_settings_are_named():
    with pytest.raises(ValueError, match="rope_parameters = 'yarn'"):
        model_config(config_of("olmo2", rope_parameters="yarn"))
    with pytest.raises(ValueError, match="theta = 0"):
        model_config(config_of("olmo2", rope_parameters={"rope_type": "default", "rope_theta": 0}))
