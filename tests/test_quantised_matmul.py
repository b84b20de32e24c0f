"""Products with quantised weights, by XLA and by interpreted kernels, against float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_weights import KINDS, Kind, random_weight, rounded_rows
from wgmma_races import wgmma_reads_checked

from pallas_kernels.dispatch import Device
from pallas_kernels.quantised_matmul import (
    QuantisedWeight,
    choose_body,
    dequantise,
    matmul_in_parts,
    mosaic,
    triton,
)
from pallas_kernels.quantised_matmul import quantised_matmul as multiply

EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
BODIES = pytest.mark.parametrize("body", ["reference", "triton_interpreted"])
quantised_matmul = jax.jit(multiply, static_argnames=("implementation", "out_dtype"))
OUTPUTS, COLUMNS = 144, 256  # one block of outputs is not whole


def rows(count: int, columns: int = COLUMNS, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, columns)).astype(np.float32)


def close(found, x: np.ndarray, dense: np.ndarray, activations: str) -> None:
    wanted = rounded_rows(x, activations) @ dense.T
    np.testing.assert_allclose(found, wanted, atol=3e-5 * np.abs(wanted).max(), rtol=0)


@BODIES
@EACH
def test_every_kind_equals_float64(kind, body):
    weight, dense = random_weight(kind, OUTPUTS, COLUMNS)
    x = rows(17)
    close(quantised_matmul(jnp.asarray(x), weight, implementation=body), x, dense, kind.activations)


@BODIES
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("int4 with zeros, in order", 1),
        ("int8", 3),
        ("w8a8 of pairs", 64),
        ("w8a8", 1),
        ("w8a8", 130),
    ],
)
def test_every_count_of_rows(name, count, body):
    weight, dense = random_weight(KINDS[name], OUTPUTS, COLUMNS)
    x = rows(count)
    found = quantised_matmul(jnp.asarray(x), weight, implementation=body)
    close(found, x, dense, KINDS[name].activations)


FLOAT8 = Kind("float8_e4m3fn", activations="float8_e4m3fn")


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (FLOAT8, 133),
        (FLOAT8._replace(group=128, rows=128), 66),
        (FLOAT8._replace(group=256, order=True), 128),
    ],
    ids=["channels", "blocks", "groups, in order"],
)
def test_hoppers_own_kernel_equals_float64(kind, count, monkeypatch):
    """With a race detector, more steps than stages, and rows past the last in a block."""
    monkeypatch.setattr(triton, "quantised_matmul", None)  # is not what is called
    weight, dense = random_weight(kind, 128 if count > 128 else 256, 768)
    x = rows(count, 768)
    x[1, 5] = np.nan
    with wgmma_reads_checked():
        found = np.asarray(multiply(jnp.asarray(x), weight, implementation="mosaic_interpreted"))
    assert np.isnan(found[1]).all()
    close(np.delete(found, 1, 0), np.delete(x, 1, 0), dense, kind.activations)


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [
        (FLOAT8, (256, 256), 64),
        (FLOAT8, (144, 256), 65),
        (FLOAT8, (256, 192), 65),
        (FLOAT8._replace(group=64), (128, 256), 65),
        (KINDS["w8a8"], (128, 128), 65),
        (KINDS["float8"], (128, 128), 65),
    ],
)
def test_what_hoppers_own_kernel_does_not_take_is_tritons(kind, shape, count):
    weight, _ = random_weight(kind, *shape)
    assert not mosaic.takes(jnp.ones((count, shape[1])), weight)


@EACH
def test_many_columns_are_split_and_summed_in_order(kind, monkeypatch):
    """Every kind over several programs, the last of which has less to do."""
    monkeypatch.setattr(triton, "num_splits", lambda programs, turns: 3)
    weight, dense = random_weight(kind, 64, 640)
    x = rows(5, 640)
    found = multiply(jnp.asarray(x), weight, implementation="triton_interpreted")
    close(found, x, dense, kind.activations)


@pytest.mark.parametrize("name", ["int4 with zeros, in order", "w8a8 of pairs"])
def test_parts_add_up_to_the_product(name, monkeypatch):
    monkeypatch.setattr(triton, "num_splits", lambda programs, turns: 3)
    weight, dense = random_weight(KINDS[name], 64, 512)
    x = rows(5, 512)
    parts = matmul_in_parts(jnp.asarray(x), weight, implementation="triton_interpreted")
    assert parts.shape == (3, 5, 64) and parts.dtype == jnp.float32
    close(parts.sum(axis=0), x, dense, KINDS[name].activations)
    (whole,) = matmul_in_parts(jnp.asarray(x), weight, implementation="reference")
    close(whole, x, dense, KINDS[name].activations)


def test_splits_follow_from_shapes_and_fill_a_device():
    assert triton.num_splits(448, 32) == 1
    assert triton.num_splits(64, 32) == 2 and triton.num_splits(64, 112) == 5
    assert triton.num_splits(8, 256) == triton.MOST_SPLITS
    assert triton.num_splits(8, 4) == 1, "few columns are not worth more"


@BODIES
@pytest.mark.parametrize("name", ["int4", "float8 in blocks", "w8a8 of pairs"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(name, body):
    weight, _ = random_weight(KINDS[name], 64, 512)
    x = rows(9, 512)
    moved = rows(9, 512, seed=2)
    moved[7] = x[2]
    moved[3] = np.nan  # somebody's failed request
    first, second = (
        quantised_matmul(jnp.asarray(a), weight, implementation=body) for a in (x, moved)
    )
    assert (first[2] == second[7]).all() and jnp.isnan(second[3]).all()


@BODIES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_rows_lose_nothing_but_what_the_result_rounds(dtype, body):
    weight, dense = random_weight(KINDS["int4 with zeros, in order"], 64, COLUMNS)
    x = jnp.asarray(rows(4), dtype)
    found = quantised_matmul(x, weight, implementation=body, out_dtype=jnp.float32)
    if body == "triton_interpreted":  # scales are applied to float32 sums
        close(found, np.asarray(x, np.float32), dense, "as_given")
    assert quantised_matmul(x, weight, implementation=body).dtype == dtype


@EACH
def test_dequantised_it_is_the_matrix(kind):
    weight, dense = random_weight(kind, OUTPUTS, COLUMNS)
    np.testing.assert_allclose(dequantise(weight), dense, rtol=1e-6)
    experts, dense = random_weight(kind._replace(order=False), 16, COLUMNS, 3)
    np.testing.assert_allclose(dequantise(experts), dense, rtol=1e-6)
    assert experts.shape == (3, 16, COLUMNS)


def test_int8_rows_are_multiplied_as_integers():
    """On CPUs that is the fast form; the weight is neither sliced nor converted."""
    weight, _ = random_weight(KINDS["w8a8"], 64, 128)
    text = quantised_matmul.lower(jnp.ones((1, 128)), weight, implementation="reference").as_text()
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "tensor<2x128xi8>, tensor<64x128xi8>) -> tensor<2x64xi32>" in dot


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bits": 3}, "3 bits"),
        ({"values": jnp.zeros((64, 256), jnp.uint8)}, "8 bits in uint8"),
        ({"block": (1, 96)}, "do not divide 256 columns"),
        ({"block": (1, 128)}, "scales are"),
        ({"scales": jnp.ones((1, 64), jnp.int32)}, "scales are int32"),
        ({"zeros": jnp.zeros((1, 64), jnp.uint8)}, "zero points are for values of 4 bits"),
        ({"order": jnp.zeros(64, jnp.int32)}, "order has shape"),
        ({"activations": "float8_e4m3fn"}, "need values in float8_e4m3fn, these are int8"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(changes, why):
    weight, _ = random_weight(KINDS["int8"], 64, 256)
    wrong = dataclasses.replace(weight, **changes)
    with pytest.raises(ValueError, match=why):
        quantised_matmul(jnp.ones((2, 256)), wrong, implementation="reference")


def test_zero_points_of_another_shape_are_refused():
    weight, _ = random_weight(KINDS["int4 with zeros, in order"], 64, 256)
    with pytest.raises(ValueError, match=r"zeros are uint8\[8, 63\], expected \[8, 64\] of uint8"):
        dataclasses.replace(weight, zeros=weight.zeros[:, :63]).check()
    with pytest.raises(ValueError, match="for x of"):
        quantised_matmul(jnp.ones((2, 128)), weight, implementation="reference")


def test_kernels_refuse_what_they_would_compute_wrongly():
    weight, _ = random_weight(KINDS["int8"], 64, 256)
    with pytest.raises(ValueError, match="round float32"):
        multiply(jnp.ones((2, 256)), weight, implementation="triton")
    weight, _ = random_weight(KINDS["int8"], 64, 208)
    with pytest.raises(ValueError, match="no 208 columns in groups of 208"):
        multiply(jnp.ones((2, 208)), weight, implementation="triton_interpreted")


H200, A100 = Device("cuda", "NVIDIA H200", (9, 0)), Device("cuda", "NVIDIA A100", (8, 0))


def abstract(kind: Kind, outputs: int, columns: int) -> QuantisedWeight:
    weight, _ = random_weight(kind, 8, columns)
    values, scales = (
        jax.ShapeDtypeStruct((outputs, weight.values.shape[1]), weight.values.dtype),
        jax.ShapeDtypeStruct((weight.groups, outputs), jnp.float32),
    )
    return dataclasses.replace(weight, values=values, scales=scales)


@pytest.mark.parametrize(
    ("device", "kind", "shape", "x_dtype", "body", "why"),
    [
        (Device("cpu"), "int8", (64, 256), "float32", "reference", ""),
        (H200, "int4", (64, 256), "bfloat16", "triton", ""),
        (A100, "w8a8", (64, 256), "float16", "triton", ""),
        (A100, "float8", (64, 256), "bfloat16", "reference", "newer GPU"),
        (H200, "int8", (64, 256), "float32", "reference", "round float32"),
        (H200, "int8", (64, 208), "bfloat16", "reference", "multiples of 32"),
        (H200, "int8", (1 << 20, 2080), "bfloat16", "reference", "32 bits"),
        (Device("cuda", "Tesla T4", (7, 5)), "int8", (64, 64), "float16", "reference", "older"),
        (Device("rocm", "MI300X"), "int8", (64, 64), "bfloat16", "reference", "NVIDIA"),
    ],
)
def test_the_body_follows_from_device_and_features(device, kind, shape, x_dtype, body, why):
    chosen = choose_body(device, abstract(KINDS[kind], *shape), x_dtype)
    assert chosen.implementation == body and why in chosen.why and bool(chosen.why) == bool(why)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8", "w8a8 float8"])
def test_numbers_of_weights_are_not_all_there_at_once(kind):
    """Weights are arguments of a program: XLA would make numbers of all of them first."""
    weights = [random_weight(KINDS[kind], 256, 256, seed=seed)[0] for seed in range(6)]

    def layers(x, weights):
        for weight in weights:
            x = jnp.tanh(quantised_matmul(x, weight, implementation="reference"))
        return x

    program = jax.jit(layers).lower(jnp.zeros((4, 256)), weights).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * 256 * 256 * 4
