"""Kernels for this CPU that multiply integers: to the bit what XLA makes of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from other_cpus import AVX2, run_tests
from test_families import family_folder

from jaxinfer import LLM, SamplingParams
from jaxinfer.cpu_kernels import compiler, integer_panels
from jaxinfer.cpu_kernels.integer_panels import IntegerPanels
from jaxinfer.cpu_kernels.prepare import in_panels, without_panels
from jaxinfer.models.layers import embed, linear
from jaxinfer.params import ParamSpec
from jaxinfer.quantization.kinds import KINDS
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.quantization.weight import Quantised

FOUND = compiler.vectors()
FEATURE = integer_panels.FEATURES.get(FOUND.lanes) if FOUND else None
pytestmark = pytest.mark.skipif(
    FEATURE is None or not compiler.host_has(FEATURE), reason="no products of integers here"
)


def weights(shape: tuple[int, ...], kind: str, inputs: int = 1) -> tuple[dict, dict]:
    """A random parameter in a kind as XLA multiplies with it, and as it is prepared."""
    axes = ("mlp", *[None] * (len(shape) - 2), "embed")
    specs = {"w": ParamSpec(shape, axes, inputs=inputs)}
    numbers = np.random.default_rng(4).standard_normal(shape, np.float32)
    plain = quantise_params({"w": jnp.asarray(numbers)}, specs, kind, "float32")
    prepared = dict(plain)
    in_panels(prepared, specs, FOUND)
    return plain, prepared


@pytest.mark.parametrize("kind", ["w8a8", "w8a8-hl"])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (700, 130), (1, 1), (50, 7)])
def test_products_are_xlas_to_the_bit(kind, outputs, inputs):
    plain, prepared = weights((outputs, inputs), kind)
    assert isinstance(prepared["w"], IntegerPanels)
    rng = np.random.default_rng(5)
    for rows in (1, 2, 8, 9, 70):
        x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32)).at[-1].multiply(1e3)
        wanted, found = (np.asarray(jax.jit(linear)(x, w["w"])) for w in (plain, prepared))
        np.testing.assert_array_equal(found, wanted)


def test_the_largest_numbers_do_not_overflow():
    columns = integer_panels.MOST_COLUMNS - 1
    weight = jnp.full((2, columns), 127, jnp.int8).at[1].set(-128)
    specs = {"w": ParamSpec((2, columns), ("mlp", "embed"), inputs=1)}
    ones = {"w": jnp.ones((2, columns), jnp.float32)}
    made = quantise_params(ones, specs, "w8a8", "float32")["w"]
    prepared = {"w": dataclasses.replace(made, values=weight)}
    in_panels(prepared, specs, FOUND)
    for sign in (1.0, -1.0):
        found = linear(jnp.full((1, columns), sign), prepared["w"]) / prepared["w"].row_scales[None]
        np.testing.assert_allclose(found, [[sign * 127 * columns, -sign * 128 * columns]], 1e-6)


def test_a_row_that_is_no_number_says_so_and_its_neighbours_do_not():
    _, prepared = weights((40, 20), "w8a8")
    x = jnp.ones((3, 20)).at[1, 4].set(jnp.nan)
    found = np.asarray(linear(x, prepared["w"]))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_several_inputs_rows_of_a_table_and_the_way_back():
    plain, prepared = weights((60, 3, 8), "w8a8", inputs=2)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((4, 3, 8), np.float32))
    np.testing.assert_array_equal(linear(x, prepared["w"]), linear(x, plain["w"]))
    plain, prepared = weights((101, 14), "w8a8")
    tokens = jnp.asarray([0, 100, 47, 48, 3])
    np.testing.assert_array_equal(embed(prepared["w"], tokens), embed(plain["w"], tokens))
    back = without_panels(prepared)["w"]
    assert isinstance(back, Quantised) and back.layout == plain["w"].layout
    np.testing.assert_array_equal(back.values, plain["w"].values)
    assert back.shape == prepared["w"].shape == (101, 14)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("w8a8", "w8a8-hl")])
def test_other_kinds_are_left_to_xla(kind):
    _, prepared = weights((128, 128), kind)
    assert isinstance(prepared["w"], Quantised)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("kind", ["w8a8", "w8a8-hl"])
def test_an_engine_says_the_same_with_kernels_and_without(tmp_path, kind):
    folder = family_folder(tmp_path / "qwen3", "qwen3")
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 16, "max_model_len": 64}
    prompts = [list(range(5, 50)), [9, 8, 7], list(range(3, 20))]
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    said = []
    for cpu_kernels in (True, False):
        llm = LLM(folder, dtype="float32", cpu_kernels=cpu_kernels, quantization=kind, **sizes)
        weight = llm.engine.runner.params["layers"][0]["qkv"]
        assert isinstance(weight, IntegerPanels) == cpu_kernels
        said.append([one.token_ids for one in llm.generate(prompts, params)])
    assert said[0] == said[1]


@pytest.mark.skipif(not compiler.host_has("avxvnni"), reason="not on this CPU")
def test_narrower_registers_do_as_well():
    assert "9 passed" in run_tests(__file__, "to_the_bit or overflow", (*AVX2, "avxvnni"))
