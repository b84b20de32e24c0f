"""Every family as safetensors, GGUF and Orbax: the same logits; what GGUF files leave unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from test_families import ORACLE_FAMILIES, difference, oracle
from tiny_checkpoint import dense_logits, write_gguf
from tiny_gguf import (
    ARCHITECTURES,
    F32,
    LATENT,
    Q8_0,
    family_hf_folder,
    model_for_gguf,
    write_family_gguf,
)
from tiny_gguf_older import latents_apart, of_latents

from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model
from jaxinfer.checkpoints.gguf_architectures import ARCHITECTURES as KNOWN
from jaxinfer.checkpoints.gguf_architectures import hf_config
from jaxinfer.checkpoints.gguf_reader import GgufFile
from jaxinfer.config import LayerKind
from jaxinfer.models.hf_config import model_config
from pallas_kernels.quantised_matmul import dequantise

EXACT, NOTICED = 1e-5, 4e-4  # of the largest logit
# GGUF cannot say all of their oracles.
UNSAID = {"qwen2", "qwen2_moe", "smollm3", "gpt_oss", "cohere2", "falcon"} | LATENT

pytestmark = pytest.mark.usefixtures("quick_compiler")


def logits(path: Path, family: str) -> np.ndarray:
    model = load_model(path, dtype="float32")
    return dense_logits(model.config, model.params, oracle(family)[0])


def apart(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of each position, the largest difference, in parts of the largest logit."""
    return np.abs(found - wanted).max(-1) / np.abs(wanted).max()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    return str(caught.value)


def test_every_family_has_an_architecture():
    served = {gguf.MODEL_ARCH_NAMES[arch] for arch in ARCHITECTURES.values()}
    assert served == set(KNOWN) and set(ARCHITECTURES) <= set(ORACLE_FAMILIES)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_format_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    hf = family_hf_folder(tmp_path / "hf", family)
    wanted = logits(hf, family)
    whole = write_family_gguf(tmp_path / "f32.gguf", family)
    assert apart(logits(whole, family), wanted).max() < EXACT
    assert apart(logits(convert(whole, tmp_path / "orbax"), family), wanted).max() < EXACT
    # A router may choose another expert where two are nearly equal, so not the maximum.
    quantised = apart(
        logits(write_family_gguf(tmp_path / "q8_0.gguf", family, Q8_0), family), wanted
    )
    assert 1e-4 < np.median(quantised) < 0.05
    if family not in UNSAID:
        model = load_model(whole, dtype="float32")
        assert difference(model.config, model.params, family) < 1e-4
    assert inspect_checkpoint(whole).parameters == inspect_checkpoint(hf).parameters


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts as MXFP4 and the rest in float32: the values that they stand for, and no others."""
    four_bits = gguf.GGMLQuantizationType.MXFP4
    whole = load_model(write_family_gguf(tmp_path / "f32.gguf", "gpt_oss"))
    path = write_family_gguf(tmp_path / "mxfp4.gguf", "gpt_oss", four_bits)
    packed, kept = load_model(path, quantization="none"), load_model(path, quantization="mxfp4")
    assert kept.quantization == "mxfp4"
    for name in ("experts_gate_up", "experts_down"):
        one, other = (np.asarray(m.params["layers"][1][name]) for m in (whole, packed))
        rows = one.reshape(-1, one.shape[-1])
        wanted = gguf.dequantize(gguf.quantize(rows, four_bits), four_bits)
        np.testing.assert_array_equal(other, wanted.reshape(one.shape))
        (matrices,) = kept.params["layers"][1][name].terms
        np.testing.assert_array_equal(dequantise(matrices).reshape(one.shape), other)
    for name in ("experts_gate_up_bias", "experts_down_bias", "sinks", "router_bias"):
        one, other = (m.params["layers"][1][name] for m in (whole, packed))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("mistral", {"llama.attention.sliding_window": 9}),
        ("mixtral", {"llama.expert_used_count": 1}),
        ("qwen2_moe", {"qwen2moe.expert_weights_norm": True}),
        ("qwen3_moe", {"qwen3moe.expert_weights_norm": False}),
        ("gemma2", {"gemma2.attn_logit_softcapping": None}),
        ("gemma2", {"gemma2.final_logit_softcapping": None}),
        ("gemma2", {"gemma2.attention.scale": None}),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [False, True]}),
        ("gemma3_text", {"gemma3.attention.sliding_window_pattern": 2}),
        ("gemma3_text", {"gemma3.rope.freq_base_swa": None}),
        ("gemma3_text", {"gemma3.rope.scaling.factor": 2.0}),
        ("gemma3_text", {"gemma3.attention.sliding_window": None}),
        ("gemma3_text", {"gemma3.final_logit_softcapping": 1.0}),
        ("phi3", {"phi3.attention.sliding_window": 0}),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.0}),
        ("granite", {"granite.embedding_scale": None}),
        ("granite", {"granite.residual_scale": None}),
        ("granite", {"granite.attention.scale": None}),
        ("granite", {"granite.logit_scale": None}),
        ("glm4", {"glm4.rope.dimension_count": 4}),
        ("gpt_neox", {"gptneox.use_parallel_residual": False}),
        ("gpt_neox", {"gptneox.rope.dimension_count": None}),
        ("starcoder2", {"starcoder2.attention.sliding_window": None}),
        ("cohere", {"command-r.logit_scale": 1.0}),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": 2}),
        ("olmo", {"olmo.attention.clamp_kqv": None}),
        ("deepseek_v2", {"deepseek2.expert_group_count": 2}),
        ("deepseek_v2", {"deepseek2.expert_weights_scale": 1.0}),
        ("deepseek_v2", {"deepseek2.rope.scaling.yarn_log_multiplier": 0.1}),
        ("deepseek_v3", {"deepseek2.expert_group_count": 2}),
        ("deepseek_v3", {"deepseek2.expert_weights_norm": None}),
        ("deepseek_v3", {"deepseek2.expert_used_count": 1}),
        ("gpt_oss", {"gpt-oss.attention.sliding_window": 9}),
        ("gpt_oss", {"gpt-oss.expert_used_count": 1}),
        ("gpt_oss", {"gpt-oss.rope.scaling.factor": 2.0}),
        ("gpt_oss", {"gpt-oss.rope.scaling.yarn_beta_slow": 1.0}),
    ],
)
def test_every_key_is_heeded(tmp_path: Path, family: str, metadata: dict[str, Any]) -> None:
    as_written = logits(write_family_gguf(tmp_path / "as.gguf", family), family)
    changed = logits(write_family_gguf(tmp_path / "other.gguf", family, metadata=metadata), family)
    assert apart(changed, as_written).max() > NOTICED


def test_long_factors_are_needed_together(tmp_path: Path) -> None:
    path = tmp_path / "phi3.gguf"
    write_family_gguf(path, "phi3", tensors={"rope_factors_short.weight": None})
    assert "rope_factors_long.weight" in refusal(path)
    factors = {"rope_factors_short.weight": None, "rope_factors_long.weight": None}
    plain = {"phi3.rope.scaling.attn_factor": None}
    model = load_model(write_family_gguf(path, "phi3", metadata=plain, tensors=factors))
    assert model.config.rope.scaling == "none"


def config_of(arch: str, **keys: Any) -> Any:
    """The ModelConfig of a file with ordinary sizes and these keys (dots as two underscores)."""
    plain = {
        "attention.head_count": 32,
        "embedding_length": 4608,
        "feed_forward_length": 64,
        "block_count": 12,
        "context_length": 8192,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 512,
        "vocab_size": 100,
    } | {name.replace("__", "."): value for name, value in keys.items()}
    if "attention__layer_norm_epsilon" in keys and "attention__layer_norm_rms_epsilon" not in keys:
        del plain["attention.layer_norm_rms_epsilon"]
    metadata = {f"{arch}.{key}": value for key, value in plain.items() if value is not None}
    metadata["general.architecture"] = arch
    return model_config(hf_config(GgufFile(metadata, {}, {}))[0])


def test_what_gemma_files_leave_out():
    """Patterns, the local rotary base, caps, and the largest models' scale."""
    gemma3 = config_of("gemma3", rope__freq_base=1e6)
    local, everything = LayerKind(512, "local"), LayerKind()
    assert gemma3.kinds == (*[local] * 5, everything) * 2
    assert (gemma3.rope.theta, gemma3.local_rope.theta) == (1e6, 1e4)
    assert gemma3.scale == 128**-0.5 and gemma3.logit_soft_cap is None
    assert config_of("gemma3", block_count=62).scale == pytest.approx(144**-0.5)
    gemma2 = config_of("gemma2", attention__sliding_window=None)
    assert gemma2.kinds == (LayerKind(4096), everything) * 6
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert config_of("gemma2").scale == 128**-0.5
    assert config_of("gemma2", block_count=46).scale == pytest.approx(144**-0.5)
    assert gemma2.tie_embeddings and gemma3.tie_embeddings


def test_what_files_with_layer_norms_leave_out():
    """A window, which layers see it, and the activation."""
    plain = {"attention__sliding_window": None, "attention__layer_norm_epsilon": 1e-5}
    assert config_of("starcoder2", **plain).kinds == (LayerKind(4096),) * 12
    cohere2 = config_of("cohere2", **plain | {"attention__sliding_window": 9}, logit_scale=0.25)
    assert cohere2.kinds == (*[LayerKind(9)] * 3, LayerKind(rope="none")) * 3
    assert config_of("gptneox", **plain).activation == "gelu"
    assert config_of("gptneox", **plain, block_count=44).activation == "gelu_tanh"
    assert config_of("gpt2", **plain).activation == "gelu_tanh"
    assert config_of("falcon", **plain).activation == "gelu"
    assert config_of("stablelm", **plain, use_parallel_residual=False).norms == "shared"
    falcon = config_of("falcon", **plain, attention__head_count_kv=1)
    assert (falcon.num_kv_heads, falcon.norms, falcon.qkv_bias) == (1, "shared", False)


def test_what_other_files_leave_out():
    plain = {"attention__sliding_window": None}
    experts = plain | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert [k.rope for k in config_of("smollm3", **plain).kinds[:4]] == ["global"] * 3 + ["none"]
    assert config_of("granite", **plain).scale == 128**-0.5
    for arch, normalised in {"qwen2moe": False, "olmoe": False, "qwen3moe": True}.items():
        assert config_of(arch, **experts).moe.normalised is normalised
    assert config_of("llama", **experts | {"expert_feed_forward_length": None}).moe.normalised
    assert config_of("llama", **plain).family == "llama"
    assert config_of("llama", attention__head_count_kv=[8] * 12, **plain).num_kv_heads == 8


@pytest.mark.parametrize(
    ("arch", "keys", "words"),
    [
        ("olmo2", {}, "olmo2.attention.sliding_window = 512 is not supported"),
        ("qwen3", {"attention__sliding_window": None, "rope__dimension_sections": [8, 8, 8, 0]},
         "qwen3.rope.dimension_sections"),
        ("llama", {"attention__causal": False}, "llama.attention.causal = False"),
        ("llama", {"rope__scale_linear": 2.0}, "llama.rope.scale_linear = 2.0"),
        ("llama", {"rope__dimension_count": 64}, "rope.dimension_count differs"),
        ("llama", {"attention__value_length": 64}, "attention.value_length differs"),
        ("llama", {"attention__head_count": 0}, "head_count = 0"),
        ("llama", {"attention__head_count_kv": [8, 4]}, "layers differ"),
        ("llama", {"rope__scaling__type": "spiral", "rope__scaling__factor": 2.0}, "'spiral'"),
        ("granite", {"attention__sliding_window": None, "rope__scaling__finetuned": False},
         "without RoPE"),
        ("gpt2", {"attention__layer_norm_epsilon": 1e-5, "rope__scaling__type": "linear",
                  "rope__scaling__factor": 2.0}, "learned positions"),
        ("starcoder", {"attention__layer_norm_epsilon": 1e-5, "attention__head_count_kv": 32},
         "starcoder.attention.head_count_kv"),
        ("olmo", {"attention__layer_norm_epsilon": 1e-6}, "only 1e-05 is known"),
        ("nemotron", {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon":
                      1e-6}, "attention.layer_norm_rms_epsilon and attention.layer_norm_epsilon"),
        ("nemotron", {"attention__layer_norm_epsilon": 1e-5, "rope__dimension_count": 42},
         "expected half of a head's 128"),
        ("chatglm", {}, "general.architecture = 'chatglm' is not supported"),
        ("hyena", {}, "general.architecture = 'hyena' is not supported; known: llama, qwen2"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(arch: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        config_of(arch, **keys)


# -- latent attention --------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(LATENT))
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, Q8_0])
def test_keys_and_values_of_a_latent_apart(tmp_path: Path, family: str, kind: Any) -> None:
    hf, held = model_for_gguf(family)
    newer: Any = {"metadata": of_latents(hf), "tensors": latents_apart(hf, held)}
    path = write_family_gguf(tmp_path / "newer.gguf", family, kind, **newer)
    older = write_family_gguf(tmp_path / "older.gguf", family, kind)
    np.testing.assert_array_equal(logits(path, family), logits(older, family))
    found, wanted = inspect_checkpoint(path), inspect_checkpoint(older)
    assert (found.parameters, found.stored) == (wanted.parameters, wanted.stored)


def test_a_latents_parts_that_are_wrong(tmp_path: Path) -> None:
    hf, held = model_for_gguf("deepseek_v3")
    metadata, tensors = of_latents(hf), latents_apart(hf, held)
    path, keys, values = tmp_path / "x.gguf", "blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"
    for name, value in {keys: tensors[keys].swapaxes(1, 2), values: tensors[values][:3]}.items():
        changed: Any = tensors | {name: np.ascontiguousarray(value)}
        message = refusal(write_family_gguf(path, "deepseek_v3", F32, metadata, changed))
        assert name in message and "layers.1.self_attn.kv_b_proj.weight: missing" in message
    message = refusal(
        write_family_gguf(path, "deepseek_v3", F32, metadata, tensors | {values: None})
    )
    assert "layers.1.self_attn.kv_b_proj.weight: missing" in message, message
    mixed = metadata | {"deepseek2.attention.head_count_kv": 4}
    message = refusal(write_family_gguf(path, "deepseek_v3", F32, mixed, tensors))
    assert "neither those of a head nor of the latent" in message


def test_groups_that_older_files_do_not_tell() -> None:
    latent: dict[str, Any] = {
        "attention__sliding_window": None,
        "attention__key_length": 192,
        "attention__kv_lora_rank": 512,
        "attention__head_count_kv": 32,
        "rope__dimension_count": 64,
        "expert_used_count": 6,
        "expert_feed_forward_length": 16,
        "expert_weights_scale": 1.0,
    }
    published = {256: (8, 4), 160: (8, 3), 384: (1, 1), 64: (1, 1)}
    for experts, groups in published.items():
        for scoring in (1, 2):
            more = {"expert_count": experts, "expert_gating_func": scoring}
            moe = config_of("deepseek2", **latent, **more).moe
            assert (moe.groups, moe.top_groups) == groups
            assert moe.scoring == {1: "softmax", 2: "sigmoid"}[scoring]
    with pytest.raises(ValueError, match="expert_group_count is missing, and of 96 experts"):
        config_of("deepseek2", **latent, expert_count=96)
    with pytest.raises(ValueError, match="expert_gating_func = 3"):
        config_of("deepseek2", **latent, expert_count=64, expert_gating_func=3)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 40.0}
    with pytest.raises(ValueError, match="yarn_log_multiplier is missing"):
        config_of("deepseek2", **latent, **yarn, expert_count=64)


# -- experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_experts_in_tensors_of_their_own(tmp_path: Path, family: str) -> None:
    together = logits(write_family_gguf(tmp_path / "a.gguf", family), family)
    old = write_family_gguf(tmp_path / "b.gguf", family, experts_apart=True)
    assert any(t.name == "blk.1.ffn_down.3.weight" for t in gguf.GGUFReader(old).tensors)
    np.testing.assert_array_equal(logits(old, family), together)


def test_experts_of_another_number_or_size(tmp_path: Path) -> None:
    path, name = tmp_path / "mixtral.gguf", "blk.0.ffn_up_exps.weight"
    for shape in ((3, 64, 32), (5, 64, 32), (4, 32, 64), (256, 32)):
        tensors: Any = {name: np.zeros(shape, np.float32)}
        message = refusal(write_family_gguf(path, "mixtral", tensors=tensors))
        assert name in message and "expected shape [64, 32]" in message, message
    message = refusal(write_family_gguf(path, "mixtral", tensors={name: None}))
    assert "experts.3.w3.weight: missing" in message


# -- split files ------------------------------------------------------------------------------


def split(folder: Path, family: str = "qwen3_moe") -> list[Path]:
    folder.mkdir(exist_ok=True)
    write_family_gguf(folder / "tiny.gguf", family, split_max_tensors=10)
    return sorted(folder.glob("tiny-*-of-*.gguf"))


def test_parts_are_found_from_the_first(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert len(parts) > 2 and parts[0].name == f"tiny-00001-of-{len(parts):05d}.gguf"
    whole = write_family_gguf(tmp_path / "whole.gguf", "qwen3_moe")
    np.testing.assert_array_equal(logits(parts[0], "qwen3_moe"), logits(whole, "qwen3_moe"))
    assert inspect_checkpoint(parts[0]).stored == inspect_checkpoint(whole).stored


def test_parts_that_are_missing_or_wrong(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert f"part 2 of {len(parts)}; name {parts[0]}" in refusal(parts[1])
    data = parts[2].read_bytes()
    parts[2].write_bytes(data[:-50])
    assert str(parts[2]) in refusal(parts[0]) and "the file ends at" in refusal(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    assert f"{parts[2]}: expected split.no" in refusal(parts[0])
    parts[2].write_bytes(write_gguf(tmp_path / "other.gguf").read_bytes())
    assert f"{parts[2]}: expected split.no" in refusal(parts[0])
    parts[2].unlink()
    assert parts[2].name in refusal(parts[0]) and "are missing" in refusal(parts[0])
    assert "must be called" in refusal(parts[0].rename(tmp_path / "renamed.gguf"))


def test_a_part_of_another_model(tmp_path: Path) -> None:
    parts, others = split(tmp_path / "a"), split(tmp_path / "b", "qwen3")
    assert len(parts) == len(others)
    parts[2].write_bytes(others[2].read_bytes())
    message = refusal(parts[0])
    assert "split.tensors.count" in message or "is in both" in message, message


def test_a_defect_names_the_part_it_is_in(tmp_path: Path) -> None:
    poison: Any = {"blk.1.attn_norm.weight": np.full(32, np.nan, np.float32)}
    write_family_gguf(tmp_path / "x.gguf", "qwen3", tensors=poison, split_max_tensors=10)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    message = refusal(parts[0])
    assert "blk.1.attn_norm.weight" in message and "32 of 32 values" in message
    assert any(str(part) in message for part in parts[1:])
