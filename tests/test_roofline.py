"""Floors on paper: figures computed by hand, laws of scaling, sums, and XLA's own count of work."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxinfer_service.cli import app
from typer.testing import CliRunner

from jaxinfer.config import EngineConfig
from jaxinfer.known_models import known_model, known_models
from jaxinfer.kv_pool import abstract_pools, kv_groups
from jaxinfer.memory_plan import plan_memory
from jaxinfer.models import family_of
from jaxinfer.models.hf_config import model_config
from jaxinfer.params import abstract_params, named_leaves, param_bytes
from jaxinfer.quantization.kinds import KINDS, kinds_on
from jaxinfer.quantization.weight import quantised_specs
from jaxinfer.roofline import kernels
from jaxinfer.roofline.devices import DEVICES, device_called
from jaxinfer.roofline.kernels import AttentionShape
from jaxinfer.roofline.memory import plan_on_paper, weights_bytes
from jaxinfer.roofline.step import Serving, StepLoad, step_floor, step_work
from jaxinfer.roofline.storage import Storage, stored_so
from jaxinfer.sharding import ShardingError
from jaxinfer.slot_state import empty_slots
from jaxinfer.step import forward
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import StepShape

H200, LLAMA = DEVICES["h200"], known_model("llama-3-8b")
ORACLES = Path(__file__).parent / "fixtures" / "oracles"
PLAIN = AttentionShape(kv_heads=8, group=4, head_dim=128, value_dim=128)
LATENT = AttentionShape(kv_heads=1, group=128, head_dim=576, value_dim=512, latent=True)


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_as_many_parameters_as_published(name):
    model = known_model(name)
    specs = family_of(model.family).param_specs(model)
    found = sum(math.prod(spec.shape) for _, spec in named_leaves(specs))
    assert found == known_models()[name]["parameters"]


def test_llama_3_8b_decodes_64_rows_of_2048_tokens_in_6_8_ms():
    """By hand: 3.1 ms for the weights, 3.6 for keys and values, and the vectors between."""
    floor = step_floor(LLAMA, StepLoad(64, 2048), Serving(), H200)
    ms = {part: us / 1000 for part, (us, _) in floor.parts.items()}
    rate = 4.8e9  # bytes a millisecond
    qkv_o = 2 * 4096 * (6144 + 4096) + 64 * 2 * (4096 + 6144 + 4096 + 4096)
    assert ms["projections"] == pytest.approx(32 * qkv_o / rate)
    mlp = 2 * 3 * 4096 * 14336 + 64 * 2 * (4096 + 28672 + 28672 + 14336 + 14336 + 4096)
    assert ms["MLP"] == pytest.approx(32 * mlp / rate)
    keys_values = 64 * 2048 * 2 * 8 * 128 * 2
    queries, pages = 64 * 2 * 32 * 128 * 2, 64 * 32 * 4
    assert ms["attention, decode"] == pytest.approx(32 * (keys_values + queries + pages) / rate)
    assert ms["head"] == pytest.approx((2 * 4096 * 128256 + 64 * 2 * 4096 + 64 * 4 * 128256) / rate)
    assert floor.us == pytest.approx(6860, rel=0.005) and floor.bound == "memory"
    assert floor.tokens_per_second == pytest.approx(64 / floor.us * 1e6)


def test_prefill_is_limited_by_arithmetic():
    """A chunk of 4096 tokens: 2 operations a weight and token, and causal attention."""
    floor = step_floor(LLAMA, StepLoad(0, 4096, 4096), Serving(), H200)
    weights = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    scores = 4096 * 4097 // 2 * 32 * 32 * 4 * 128  # token pairs x layers x heads x ...
    attention, bound = floor.parts["attention, prefill"]
    assert (attention, bound) == (pytest.approx(scores / 790e12 * 1e6), "arithmetic")
    products = floor.parts["projections"][0] + floor.parts["MLP"][0]
    assert products == pytest.approx(2 * 4096 * weights / 790e12 * 1e6, rel=0.08)
    assert floor.bound == "arithmetic"


def test_deepseek_v3_reads_one_latent_for_all_heads_and_the_experts_that_are_touched():
    model = known_model("deepseek-v3")
    floor = step_floor(model, StepLoad(64, 2048), Serving(gpus=8, quantization="fp8-block"), H200)
    latents = 64 * 2048 * 576 * 2
    assert floor.parts["attention, decode"][0] == pytest.approx(61 * latents / 4.8e6, rel=0.02), (
        "the latent is on every device, whole"
    )
    touched = 256 * (1 - (1 - 8 / 256) ** 64)
    expert = 3 * 7168 * 2048 / 8 * (1 + 4 / 128**2)
    assert floor.parts["experts"][0] == pytest.approx(58 * touched * expert / 4.8e6, rel=0.02)


def test_collectives_over_eight_devices():
    floor = step_floor(known_model("qwen3-32b"), StepLoad(64, 2048), Serving(gpus=8), H200)
    us, bound = floor.parts["collectives"]
    reduced = (2 * 64 + 1) * 2 * 7 / 8 * 64 * 5120 * 2
    gathered = 7 / 8 * 64 * 151936 * 4
    assert (us, bound) == (pytest.approx((reduced + gathered) / 450e9 * 1e6), "links")
    alone = step_floor(known_model("qwen3-32b"), StepLoad(64, 2048), Serving(), H200)
    assert "collectives" not in alone.parts and alone.us > 4 * (floor.us - us)


@pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=["heads", "latent"])
def test_twice_the_context_is_twice_the_attention(shape):
    once, twice = (kernels.decode_attention(shape, [n] * 16) for n in (2048, 4096))
    ends = 16 * shape.query_bytes
    assert twice.bytes - ends == 2 * (once.bytes - ends) and twice.flops == 2 * once.flops
    rows = kernels.decode_attention(shape, [2048] * 32)
    assert (rows.bytes, rows.flops) == (2 * once.bytes, 2 * once.flops)


def test_windows_types_and_pieces_of_attention():
    window = dataclasses.replace(PLAIN, window=1024)
    far, near = (kernels.decode_attention(window, [n]) for n in (9000, 1024))
    assert (far.bytes, far.flops) == (near.bytes, near.flops)
    int8 = dataclasses.replace(PLAIN, page_dtype="int8")
    assert int8.token_bytes == 8 * 2 * (128 + 4) and PLAIN.token_bytes == 8 * 2 * 128 * 2
    assert LATENT.token_bytes == 576 * 2
    whole = kernels.prefill_attention(PLAIN, [(0, 512)])
    halves = [kernels.prefill_attention(PLAIN, [piece]) for piece in ((0, 256), (256, 256))]
    assert sum(half.flops for half in halves) == whole.flops, "causal, however it is cut"
    assert sum(half.bytes for half in halves) > whole.bytes, "the second half reads the first"
    cut = kernels.prefill_attention(window, [(4096, 512)])
    assert cut.flops == 512 * 1024 * window.key_flops
    assert cut.bytes == (1024 + 511) * window.token_bytes + 512 * window.query_bytes + 4 * 24


def stored(name: str) -> Storage:
    return stored_so(KINDS[name].layout, KINDS[name].activations)


def test_quantised_weights_are_smaller_and_only_some_multiply_faster():
    plain = kernels.matmul("x", 1, 4096, 14336)
    sizes = {"int8": 1 / 2, "int4": (4 + 40 / 128) / 16, "fp8-block": 1 / 2, "w8a8-fp8": 1 / 2}
    for name, part in sizes.items():
        found = kernels.matmul("x", 1, 4096, 14336, storage=stored(name))
        assert found.bytes == pytest.approx(part * plain.bytes, rel=0.003)
        assert found.flops == plain.flops
        assert found.unit == ("float8" if name == "w8a8-fp8" else "bfloat16")
    many = [
        kernels.matmul("x", 4096, 4096, 4096, storage=storage).floor(H200)
        for storage in (None, stored("int8"), stored("w8a8-fp8"))
    ]
    assert many[0] == many[1] == (pytest.approx(2 * 4096**3 / 790e12 * 1e6), "arithmetic")
    assert many[2][0] == pytest.approx(many[0][0] * 790 / 1979)
    with pytest.raises(ValueError, match="A100 SXM has no unit for products of float8"):
        kernels.matmul("x", 1, 64, 64, storage=stored("w8a8-fp8")).floor(DEVICES["a100"])


def test_experts_that_are_touched():
    assert kernels.touched_experts(1, 8, 2) == pytest.approx(2)
    assert kernels.touched_experts(10_000, 8, 2) == pytest.approx(8)
    one = kernels.grouped_matmul("x", 1, 8, 2, 512, 256)
    assert one.bytes == pytest.approx(2 * (512 * 256 * 2) + 2 * (256 + 512) * 2)
    assert one.flops == 2 * 2 * 512 * 256


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma3-27b", "mixtral-8x7b", "deepseek-v3"])
def test_sums_are_consistent(name):
    load, serving = StepLoad(16, 2048, 256), Serving()
    work = step_work(known_model(name), load, serving)
    floor = step_floor(known_model(name), load, serving, H200)
    assert floor.us == pytest.approx(sum(kernel.floor(H200)[0] for kernel in work))
    assert floor.us == pytest.approx(sum(us for us, _ in floor.parts.values()))
    assert floor.bytes == sum(kernel.bytes for kernel in work)
    assert floor.us >= max(floor.bytes / 4.8e6, floor.flops / 1e15 * 1e6)
    faster = step_floor(known_model(name), load, serving, DEVICES["b200"])
    assert faster.us < floor.us


@pytest.mark.parametrize("family", sorted({f.parent.name for f in ORACLES.glob("*/config*.json")}))
def test_every_family_has_floors(family):
    """Its matrices are those that its parameters say: a row reads them once, but for experts."""
    files = sorted((ORACLES / family).glob("config*.json"))
    for config in (json.loads(file.read_text()) for file in files):
        model = model_config(config)
        work = step_work(model, StepLoad(1, 1), Serving())
        products = sum(k.flops for k in work if k.part in ("projections", "MLP", "experts", "head"))
        specs = list(named_leaves(family_of(model.family).param_specs(model)))
        matrices = {
            path: math.prod(spec.shape)
            for path, spec in specs
            if len(spec.shape) > 1
            and not path.endswith(("_bias", "_norm", "sinks", "embed", "positions"))
        }
        if model.tie_embeddings:
            matrices["head"] = model.vocab_size * model.hidden_size
        share = model.moe.top_k / model.moe.num_experts if model.moe else 1.0
        weights = sum(n * (share if ".experts_" in path else 1) for path, n in matrices.items())
        assert 2 * weights <= products <= 2.1 * weights  # activations are not free
        assert step_floor(model, StepLoad(8, 64, 32), Serving(), H200).us > 0


def test_weights_of_a_step_are_the_models():
    """At one row and one token nearly all that moves is every parameter but the embedding."""
    floor = step_floor(LLAMA, StepLoad(1, 1), Serving(), H200)
    read = 2 * (8030261248 - 128256 * 4096)
    assert floor.bytes == pytest.approx(read, rel=0.002)
    assert weights_bytes(LLAMA, Serving()) == 2 * 8030261248
    vocabulary = 2 * 128256 * 4096  # of embedding and head
    layers, rows = 8030261248 - vocabulary, 32 * (6144 + 4096 + 28672 + 4096)
    int8 = weights_bytes(LLAMA, Serving(quantization="int8"))
    norms = 65 * 4096
    assert int8 == vocabulary + (layers - norms) + 4 * (rows + 2 * 128256) + 2 * norms
    assert weights_bytes(LLAMA, Serving(gpus=8)) == pytest.approx(2 * 8030261248 / 8, rel=0.001)


@pytest.mark.parametrize(("rows", "context", "chunk"), [(16, 512, 0), (8, 512, 64)])
def test_operations_are_those_that_xla_counts(rows, context, chunk):
    """In the compiled step, whose attention is one turn of its loop: XLA counts a loop once."""
    model = dataclasses.replace(known_model("smollm2-135m"), num_layers=2, vocab_size=2048)
    groups = kv_groups(model, rows * context // 64 + 2, 64, "float32")
    specs = family_of(model.family).param_specs(model)
    params = abstract_params(specs, "float32", lambda spec: None)
    slots = jax.eval_shape(lambda: empty_slots(rows, (context // 64,)))
    shape = StepShape(rows, chunk, 64)
    packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32)
    step = StepModel(model, groups, "reference_static", None, attention_block=context)
    program = forward.lower(params, abstract_pools(groups), slots, packed, model=step, shape=shape)
    counted = program.compile().cost_analysis()["flops"]
    work = step_work(model, StepLoad(rows, context, chunk), Serving("float32"))
    ours = sum(kernel.flops for kernel in work)
    assert ours == pytest.approx(counted, rel=0.04)
    attention = sum(kernel.flops for kernel in work if kernel.part.startswith("attention"))
    assert ours - attention < 0.96 * counted, "attention is a part that would be missed"


def test_memory_is_divided_as_the_engine_does():
    engine = EngineConfig(
        max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=2048, dtype="bfloat16"
    )
    found = plan_on_paper(LLAMA, engine, Serving(), H200)
    slots = found.memory.slot_bytes
    wanted, groups = plan_memory(
        LLAMA, dataclasses.replace(engine, kv_dtype="bfloat16"), 8192, 2 * 8030261248, slots, H200
    )
    assert (found.memory, found.groups) == (wanted, groups)
    assert found.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2 and not found.not_served
    assert found.fits(64, 8192) and not found.fits(256, 8192)
    small = plan_on_paper(LLAMA, engine, Serving(kv_dtype="fp8", quantization="int4"), H200)
    assert small.capacity > 1.9 * found.capacity
    assert not small.not_served
    latent, serving = known_model("deepseek-v3"), Serving(kv_dtype="fp8", gpus=16)
    on_paper = plan_on_paper(latent, engine, serving, H200)
    assert on_paper.not_served == "float8_e4m3fn pages" and on_paper.page_ratio > 1.9


def test_devices_by_the_names_they_call_themselves():
    assert device_called("NVIDIA H200") is device_called("h200") is H200
    assert device_called("NVIDIA A100-SXM4-80GB") is DEVICES["a100"]
    assert device_called("NVIDIA L40S") is DEVICES["l40s"]
    assert device_called("RTX 4090") is DEVICES["rtx4090"]
    for other in ("h900", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"):
        with pytest.raises(ValueError, match=f"'{other}' is no known device; known: h200"):
            device_called(other)


def plan(*args: str):
    return CliRunner().invoke(app, ["plan", *args])


def test_plan_prints_memory_and_floors(tmp_path):
    done = plan("llama-3-8b", "--roofline", "--batch", "64", "--context", "2048", "--json")
    found = json.loads(done.stdout)
    floor = step_floor(LLAMA, StepLoad(64, 2048), Serving(), H200)
    assert found["floors"][0]["us"] == floor.us and found["floors"][0]["fits"]
    assert found["executed"] is False and found["memory"]["kv_bytes_per_token"] == 131072
    config = known_models()["llama-3-8b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    shown = plan(str(tmp_path), "--roofline", "--chunk", "512")
    assert shown.exit_code == 0 and "nothing was executed" in shown.stdout
    assert "weights 14.96 GiB" in shown.stdout and "attention" in shown.stdout
    assert "floors" not in plan("llama-3-8b").stdout


@pytest.mark.parametrize("kind", kinds_on("cuda"))
def test_weights_on_paper_are_those_that_are_served(kind):
    """To the byte: what `quantize` writes and the engine holds, by the specs of its parameters."""
    specs = family_of(LLAMA.family).param_specs(LLAMA)
    served = param_bytes(quantised_specs(specs, kind, "bfloat16"), "bfloat16")
    assert weights_bytes(LLAMA, Serving(quantization=kind)) == served


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nope",), "known: smollm2-135m"),
        (("llama-3-8b", "--device", "t4"), "known: h200"),
        (("llama-3-8b", "--gpus", "3"), "does not divide over the 3 devices"),
        (("llama-3-8b", "--kv-dtype", "int3"), "kv_dtype is 'int3'"),
        (("llama-3-8b", "--quantization", "int3"), "known: none, int8"),
        (("llama-3-8b", "--roofline", "--context", "9k"), "the model allows at most 8192"),
        (("llama-3-8b", "--roofline", "--context", "64", "--chunk", "65"), "has no such chunk"),
        (("llama-3-8b", "--dtype", "int8"), "dtype is 'int8'"),
    ],
)
def test_plan_refuses_by_name(args, said):
    done = plan(*args)
    assert done.exit_code == 1 and said in done.stderr


def test_a_model_that_does_not_fit_says_so():
    done = plan("deepseek-v3", "--gpus", "8", "--roofline", "--batch", "1", "--context", "2k")
    assert done.exit_code == 0 and "does not fit" in done.stdout and "│ no" in done.stdout
    with pytest.raises(ShardingError):
        step_floor(LLAMA, StepLoad(1, 64), Serving(gpus=3), H200)
