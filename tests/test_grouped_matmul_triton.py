"""Grouped products by interpreted kernels, and of quantised experts by every body, against
float64: any division of rows, rows of no expert that are NaN, outputs that start as NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_weights import KINDS, random_weight, rounded_rows

from pallas_kernels.dispatch import Device
from pallas_kernels.grouped_matmul import choose_body
from pallas_kernels.grouped_matmul import grouped_matmul as multiply
from pallas_kernels.grouped_matmul.triton_tiles import tile_table
from pallas_kernels.quantised_matmul import triton_product

grouped_matmul = jax.jit(multiply, static_argnames=("implementation",))
EXPERTS, OUTPUTS, COLUMNS, ROWS = 5, 80, 128, 40
DIVISIONS = {
    "empty ones": [0, 17, 0, 20, 0],
    "one has all": [0, 0, 40, 0, 0],
    "rows of nobody": [1, 3, 2, 16, 0],
    "nobody has any": [0, 0, 0, 0, 0],
    "even": [8, 8, 8, 8, 8],
}


def by_rows(x, dense, sizes) -> np.ndarray:
    """Every row by its expert, in float64; zeros for rows of none."""
    out, experts = np.zeros((len(x), dense.shape[1])), np.repeat(np.arange(len(sizes)), sizes)
    for row, expert in enumerate(experts):
        out[row] = dense[expert] @ x[row]
    return out


def rows_of(sizes, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    return x


def close(found, x, dense, sizes, activations: str = "as_given") -> None:
    wanted = by_rows(rounded_rows(np.nan_to_num(x), activations), dense, sizes)
    np.testing.assert_allclose(found, wanted, atol=3e-5 * max(1, np.abs(wanted).max()), rtol=0)


@pytest.mark.parametrize("sizes", DIVISIONS.values(), ids=DIVISIONS.keys())
@pytest.mark.parametrize("height", [16, 32])
def test_every_division_of_rows(sizes, height, monkeypatch):
    monkeypatch.setattr(triton_product, "BLOCKS", ((1 << 31, (height, 64, 4, 2)),))
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(EXPERTS, OUTPUTS, COLUMNS)).astype(np.float32)
    weights[np.array(sizes) == 0] = np.nan  # nobody may read them
    x = rows_of(sizes)
    found = multiply(
        jnp.asarray(x),
        jnp.asarray(weights),
        jnp.asarray(sizes, jnp.int32),
        implementation="triton_interpreted",
    )
    close(found, x, weights.astype(np.float64), sizes)


@pytest.mark.parametrize("body", ["segments", "segments_static", "ragged", "triton_interpreted"])
@pytest.mark.parametrize(
    "name",
    ["int8", "int4", "int4 with float zeros", "e2m1", "w4a8", "w8a8 of pairs", "float8 in blocks",
     "w8a8 float8"],
)  # fmt: skip
def test_quantised_experts(name, body):
    kind = KINDS[name]
    weights, dense = random_weight(kind, OUTPUTS, COLUMNS, EXPERTS)
    sizes = DIVISIONS["rows of nobody"]
    x = rows_of(sizes)
    counts = jnp.asarray(sizes, jnp.int32)
    found = grouped_matmul(jnp.asarray(x), weights, counts, implementation=body)
    close(found, x, dense, sizes, kind.activations)


def test_a_rows_bits_do_not_depend_on_where_it_is():
    weights, _ = random_weight(KINDS["int4"], OUTPUTS, COLUMNS, EXPERTS)
    first, second = rows_of([ROWS]), rows_of([ROWS], seed=2)
    second[30] = first[9]
    one, other = (
        grouped_matmul(
            jnp.asarray(x),
            weights,
            jnp.asarray(sizes, jnp.int32),
            implementation="triton_interpreted",
        )
        for x, sizes in ((first, [0, 17, 0, 20, 0]), (second, [20, 20, 0, 0, 0]))
    )
    assert (one[9] == other[30]).all()


@pytest.mark.parametrize("rows", [1, 7, 40, 300])
def test_tiles_cover_every_row_once_whatever_the_division(rows):
    rng, table = (
        np.random.default_rng(rows),
        jax.jit(tile_table, static_argnames=("rows", "height", "interpret")),
    )
    for case in range(20):
        sizes = rng.multinomial(rows, rng.dirichlet(np.ones(9) * 0.3))[:8]
        tiles = table(jnp.asarray(sizes, jnp.int32), rows=rows, height=16, interpret=True)
        owners = np.repeat(np.arange(9), [*sizes, rows - sizes.sum()])
        seen = np.full(rows, -1)
        for expert, first, count in np.asarray(tiles):
            assert count <= 16
            assert (seen[first : first + count] == -1).all()
            seen[first : first + count] = expert
        assert (seen == owners).all(), case


H200 = Device("cuda", "NVIDIA H200", (9, 0))


def test_the_body_follows_from_device_and_features():
    def experts(count: int, dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, 4096, 7168), dtype)

    weights, _ = random_weight(KINDS["int4"], OUTPUTS, COLUMNS, EXPERTS)
    for device, matrices, x_dtype, body, why in (
        (Device("cpu"), experts(8, jnp.float32), jnp.float32, "segments", ""),
        (H200, experts(256, jnp.bfloat16), jnp.bfloat16, "triton", ""),
        (H200, weights, jnp.bfloat16, "triton", ""),
        (H200, experts(8, jnp.float32), jnp.float32, "segments_static", "round float32"),
        (H200, experts(8, jnp.float16), jnp.bfloat16, "segments_static", "float16 weights"),
    ):
        chosen = choose_body(device, matrices, x_dtype)
        assert chosen.implementation == body and why in chosen.why
        assert bool(chosen.why) == bool(why)


def test_experts_that_do_not_fit_are_refused():
    weights, _ = random_weight(KINDS["int8"], OUTPUTS, COLUMNS)
    with pytest.raises(ValueError, match="experts"):
        multiply(
            jnp.ones((4, COLUMNS)), weights, jnp.zeros(3, jnp.int32), implementation="segments"
        )
