"""Kernels for this CPU against float64, XLA's attention, and each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from other_cpus import AVX2, run_tests
from test_families import family_folder, oracle
from tiny_checkpoint import dense_logits

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench import setup
from jaxinfer.checkpoints import load_model
from jaxinfer.config import EngineConfig
from jaxinfer.cpu_kernels import compiler
from jaxinfer.cpu_kernels import panels as panels_module
from jaxinfer.cpu_kernels.choose import attention_scratch, prepare_weights
from jaxinfer.cpu_kernels.compiler import vectors
from jaxinfer.cpu_kernels.heads import Heads
from jaxinfer.cpu_kernels.integer_panels import IntegerPanels, kernel_of_integers
from jaxinfer.cpu_kernels.panels import (
    Panels,
    multiply_panels,
    packed,
    rows_of_panels,
    unpacked,
)
from jaxinfer.cpu_kernels.prepare import in_panels
from jaxinfer.cpu_kernels.xla_call import speaks
from jaxinfer.kv_pool import kv_groups
from jaxinfer.models import family_of
from jaxinfer.models.layers import linear
from jaxinfer.params import ParamSpec
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.quantization.weight import Quantised, widened
from pallas_kernels import paged_attention as reference

FOUND = vectors()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no kernels for this CPU")
WIDTH = FOUND.panel if FOUND else 1


def panels(matrix: np.ndarray, inputs: int = 1) -> Panels:
    spec = ParamSpec(matrix.shape, (None,) * matrix.ndim, inputs=inputs)
    params = {"w": jnp.asarray(matrix)}
    assert in_panels(params, {"w": spec}, FOUND) == {params["w"].dtype.name: 1}
    return params["w"]


def test_this_jaxlib_is_spoken_to():
    assert speaks()


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 17, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (100, 7), (1, 1), (700, 130)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_those_of_float64(rows, outputs, inputs, dtype):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs), np.float32)
    matrix = rng.standard_normal((outputs, inputs), np.float32).astype(jnp.dtype(dtype))
    found = np.asarray(jax.jit(multiply_panels)(x, panels(matrix)))
    wanted = x.astype(np.float64) @ matrix.T.astype(np.float64)
    bound = np.abs(x.astype(np.float64)) @ np.abs(matrix.T.astype(np.float64))
    assert found.shape == wanted.shape
    assert np.all(np.abs(found - wanted) <= 1e-6 * bound + 1e-30)


def test_a_row_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((33, 200), np.float32))
    weight = panels(rng.standard_normal((300, 200), np.float32))
    together = np.asarray(multiply_panels(x, weight))
    for rows in (1, 3, 8, 20):
        alone = np.asarray(multiply_panels(x[-rows:], weight))
        np.testing.assert_array_equal(alone, together[-rows:])


def test_several_outputs_and_inputs_and_rows_of_a_table():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((6, 5, 4, 8), np.float32)
    x = rng.standard_normal((3, 4, 8), np.float32)
    found = np.asarray(linear(jnp.asarray(x), panels(matrix, inputs=2)))
    np.testing.assert_allclose(found, np.einsum("tab,xyab->txy", x, matrix), rtol=1e-4, atol=1e-5)
    table = rng.standard_normal((101, 12), np.float32)
    tokens = np.array([0, 100, 47, 48, 3], np.int32)
    found = rows_of_panels(panels(table), jnp.asarray(tokens))
    np.testing.assert_array_equal(found, table[tokens])


def test_only_weights_of_products_are_put_into_panels():
    specs = {
        "norm": ParamSpec((4,), ("embed",)),
        "experts": ParamSpec((2, 4, 4), ("experts", None, None), inputs=1),
        "half": ParamSpec((4, 4), (None, None), inputs=1),
        "whole": ParamSpec((4, 4), (None, None), inputs=1),
        "layers": [{"w": ParamSpec((4, 4), (None, None), inputs=1)}],
    }
    half = jnp.ones((4, 4), jnp.bfloat16)
    params = {"norm": jnp.ones(4), "experts": jnp.ones((2, 4, 4)), "half": half}
    params["whole"] = jnp.ones((4, 4), jnp.int8)
    params["layers"] = [{"w": jnp.ones((4, 4))}]
    assert in_panels(params, specs, FOUND) == {"float32": 1, "bfloat16": 1}
    assert all(isinstance(w, Panels) for w in (params["layers"][0]["w"], params["half"]))
    assert not any(isinstance(params[name], Panels) for name in ("norm", "experts", "whole"))


def test_panels_are_quantised_as_what_they_hold():
    """A benchmark puts an engine of another kind beside one that has panels."""
    specs = {"w": ParamSpec((50, 4, 8), ("embed", "kv_heads", None), inputs=2)}
    plain = {"w": jnp.asarray(np.random.default_rng(3).standard_normal((50, 4, 8), np.float32))}
    params = dict(plain)
    assert in_panels(params, specs, FOUND) == {"float32": 1}
    np.testing.assert_array_equal(params["w"].array(), plain["w"])
    found, wanted = (quantise_params(p, specs, "w8a8", "float32") for p in (params, plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_room_is_planned_for_what_xla_widens():
    """Of all weights of 16 bits at once, but those in panels: kernels widen them as they read."""
    half = jnp.ones((4, 6), jnp.bfloat16)
    params = {"norm": jnp.ones(4, jnp.bfloat16), "w": half, "layers": [{"w": half}, {"w": half}]}
    params["layers"][1]["w"] = panels(np.asarray(half))
    params["layers"][0]["experts_down"] = jnp.ones((3, 4, 6), jnp.bfloat16)
    assert widened(params) == 2 * 4 * 24
    assert widened({"w": jnp.ones((4, 6))}) == 0


def test_panels_take_no_memory_twice(monkeypatch):
    made, zeros = [], panels_module._zeros
    monkeypatch.setattr(panels_module, "_zeros", lambda *a: made.append(zeros(*a)) or made[0])
    matrix = np.random.default_rng(7).standard_normal((700, 130), np.float32)
    with ThreadPoolExecutor() as threads:
        found = packed(matrix, WIDTH, threads)
    assert found.unsafe_buffer_pointer() == made[0].ctypes.data
    np.testing.assert_array_equal(unpacked(found, 700), matrix)


def test_many_threads_may_multiply_at_once():
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((8, 256), np.float32))
    weight = panels(rng.standard_normal((512, 256), np.float32))
    wanted, product = np.asarray(multiply_panels(x, weight)), jax.jit(multiply_panels)
    wrong = []

    def work() -> None:
        for _ in range(200):
            if not np.array_equal(product(x, weight), wanted):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CASES = [
    # group, kv heads, head_dim, page_size, window, soft_cap, sinks, pages
    (3, 3, 64, 64, None, None, False, "float32"),
    (4, 2, 32, 16, 20, None, True, "float32"),
    (8, 1, 128, 32, None, 30.0, False, "bfloat16"),
    (1, 2, 256, 16, 7, 50.0, True, "float32"),
    (2, 1, 80, 16, None, None, False, "float16"),
    (1, 1, 96, 48, 100, None, False, "float32"),
]


class Pages:
    """Random pages, in which everything that no query may see is not a number."""

    def __init__(self, heads: tuple[int, int, int], width: int, ends: list[int], page_size: int):
        kv_heads, group, dim = heads
        self.rng = np.random.default_rng(3)
        self.heads = (kv_heads, group)
        count = len(ends) * width + 1
        shape = (count, kv_heads, page_size, dim)
        self.k = self.rng.standard_normal(shape, np.float32)
        self.v = self.rng.standard_normal(shape, np.float32)
        rows = self.rng.permutation(np.arange(1, count)).reshape(len(ends), width)
        self.table = rows.astype(np.int32)
        self.k[0] = np.nan
        for row, end in zip(rows, ends, strict=True):
            whole, rest = divmod(end, page_size)
            self.k[row[whole + bool(rest) :]] = np.nan
            if rest:
                self.k[row[whole], :, rest:] = np.nan

    def sinks(self) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(self.heads, np.float32))


def stored(args: tuple, dtype: str) -> tuple:
    """Queries and pages in `dtype`, and the rest as it is."""
    arrays = list(map(jnp.asarray, args))
    return (*(array.astype(dtype) for array in arrays[:3]), *arrays[3:])


def near(found: jax.Array, wanted: jax.Array) -> None:
    """Within what the dtype rounds."""
    loose = 1e-4 if found.dtype == jnp.float32 else 0.02
    as_floats = (np.asarray(array, np.float32) for array in (found, wanted))
    np.testing.assert_allclose(*as_floats, rtol=loose, atol=loose)


def attention():
    from jaxinfer.cpu_kernels import attention  # which needs LLVM

    return attention


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_equals_xlas_attention(case):
    group, kv_heads, dim, page_size, window, soft_cap, sinks, dtype = case
    ends = [0, 1, page_size, page_size + 1, 4 * page_size]
    pages = Pages((kv_heads, group, dim), 5, ends, page_size)
    q = pages.rng.standard_normal((len(ends), kv_heads, group, dim), np.float32) * 2
    how = {"scale": dim**-0.5, "window": window, "soft_cap": soft_cap}
    how["sinks"] = pages.sinks() if sinks else None
    args = (q, pages.k, pages.v, pages.table, np.array(ends, np.int32))
    args = stored(args, dtype)
    found = attention().paged_attention(*args, **how)
    wanted = reference.paged_attention(*args, implementation="reference", **how)
    near(found, wanted)
    assert not np.any(found[0]), "a row that sees nothing is zeros"
    alone = attention().paged_attention(args[0][3:4], *args[1:3], args[3][3:4], args[4][3:4], **how)
    np.testing.assert_array_equal(alone[0], found[3])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_equals_xlas_attention(case):
    group, kv_heads, dim, page_size, window, soft_cap, sinks, dtype = case
    pieces = [(70, 0), (20, 13), (64, 64), (1, 3)]  # tokens, position
    ends = [tokens + position for tokens, position in pieces]
    pages = Pages((kv_heads, group, dim), max(ends) // page_size + 2, ends, page_size)
    tiles, first = [], 0
    for slot, (tokens, position) in enumerate(pieces):
        for done in range(0, tokens, reference.TILE_ROWS):
            count = min(reference.TILE_ROWS, tokens - done)
            tiles.append((first + done, count, slot, position + done))
        first += tokens
    tiles += [(0, 0, 0, 0)] * 2
    q = pages.rng.standard_normal((first + 9, kv_heads, group, dim), np.float32) * 2
    how = {"scale": dim**-0.5, "window": window, "soft_cap": soft_cap}
    how["sinks"] = pages.sinks() if sinks else None
    args = (q, pages.k, pages.v, pages.table, np.array(tiles, np.int32))
    args = stored(args, dtype)
    found = attention().paged_prefill(*args, **how)
    wanted = reference.paged_prefill(*args, implementation="reference", **how)
    near(found[:first], wanted[:first])
    assert not np.any(found[first:]), "rows of no tile are zeros"


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_what_is_not_a_number_and_seen_is_not_hidden(soft_cap):
    """The step fails a request whose logits are no numbers: attention must let them through."""
    pages = Pages((1, 2, 32), 3, [40, 40], 16)
    pages.k[pages.table[0, 1], 0, 3] = np.nan
    q = jnp.asarray(pages.rng.standard_normal((2, 1, 2, 32), np.float32))
    where = (jnp.asarray(pages.k), jnp.asarray(pages.v), jnp.asarray(pages.table))
    how = {"scale": 0.2, "soft_cap": soft_cap}
    lens = jnp.asarray([40, 40], jnp.int32)
    decoded = attention().paged_attention(q, *where, lens, **how)
    tiles = jnp.asarray([(0, 1, 0, 39), (1, 1, 1, 39)], jnp.int32)
    chunk = attention().paged_prefill(q, *where, tiles, **how)
    for found in (decoded, chunk):
        assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_heads_that_do_not_fill_registers_are_left_to_xla():
    assert Heads(1, 64, 64, 64).taken
    assert not Heads(1, 60, 60, 64).taken
    assert not Heads(1, 64, 64, 4).taken


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3", "gpt2", "qwen3"])
def test_families_give_transformers_logits_with_panels(family, tmp_path):
    model = load_model(family_folder(tmp_path / family, family), dtype="float32")
    specs = family_of(model.config.family).param_specs(model.config)
    assert in_panels(model.params, specs, FOUND)["float32"] > 3
    tokens, wanted = oracle(family)
    found = dense_logits(model.config, model.params, tokens)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-4


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_says_the_same_with_kernels_and_without(tmp_path, dtype):
    folder = family_folder(tmp_path / "gemma3_text", "gemma3_text")
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 16, "max_model_len": 64}
    prompts = [list(range(5, 50)), [9, 8, 7], list(range(3, 20))]
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    said, room = [], []
    for cpu_kernels in (True, False):
        llm = LLM(folder, dtype=dtype, cpu_kernels=cpu_kernels, **sizes)
        assert isinstance(llm.engine.runner.params["layers"][0]["qkv"], Panels) == cpu_kernels
        said.append(llm.generate(prompts, params))
        room.append(llm.engine.memory.workspace_bytes)
    if dtype == "float32":
        model = load_model(folder, dtype=dtype).config
        (group, *_), config = kv_groups(model, 1, 16, dtype), EngineConfig(dtype=dtype, **sizes)
        assert room[0] - room[1] == attention_scratch(config, model, group) > 0
    for one, other in zip(*said, strict=True):
        if dtype == "float32":
            assert one.token_ids == other.token_ids
        first = [completion.logprobs[0].logprob for completion in (one, other)]
        assert first[0] == pytest.approx(first[1], abs=1e-4 if dtype == "float32" else 0.05)


def test_a_benchmarks_variants_have_their_weights_as_they_say(tmp_path, monkeypatch):
    model = load_model(family_folder(tmp_path / "qwen3", "qwen3"), dtype="float32")
    prepare_weights(model, EngineConfig())
    monkeypatch.setattr(setup, "build_engine", lambda *_: None)
    runs = [setup.BenchEngine(None, model, EngineConfig())]
    for setting in (
        "cpu_kernels=false",
        "cpu_kernels=true",
        "tensor_parallel_size=2",
        "tensor_parallel_size=1",
        "quantization=w8a8",
        "tensor_parallel_size=2",
    ):
        runs.append(setup.start_variant(runs[-1], setting))
    weights = [run.model.params["layers"][0]["qkv"] for run in runs]
    integers = IntegerPanels if kernel_of_integers(FOUND) else Quantised
    kinds = (Panels, jax.Array, Panels, jax.Array, Panels, integers, Quantised)
    assert all(map(isinstance, weights, kinds))
    np.testing.assert_array_equal(weights[0].array(), weights[1])
    np.testing.assert_array_equal(weights[0].values, weights[2].values)


CHOSEN = "company or several_outputs or (float64 and 100-7) or (equals_xlas and 16)"
NEON_WIDTHS = 'compiler._INSTRUCTIONS = ((("sse2",), compiler.Vectors(4, 3, 8)),)'


@pytest.mark.skipif(not compiler.host_has("f16c"), reason="pretends to be another x86")
@pytest.mark.parametrize("before", ["", NEON_WIDTHS], ids=["avx2", "neon"])
def test_narrower_registers_do_as_well(before):
    assert "passed" in run_tests(__file__, CHOSEN, AVX2, before)
