"""AWQ and GPTQ tensors, packed value by value, stand for (q - z) * s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantised_matmul import dequantise, quantised_matmul
from pallas_kernels.quantised_matmul.packings import from_awq, from_gptq

OUTPUTS, COLUMNS, GROUP = 16, 64, 32
GROUPS = COLUMNS // GROUP
ORDER_OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each nibble of a word holds


class Layer:
    """Values [K, N], zero points and scales [groups, N]; the group of each column, in any order."""

    def __init__(self, sorted_columns: bool, symmetric: bool = False) -> None:
        rng = np.random.default_rng(5)
        self.q = rng.integers(0, 16, (COLUMNS, OUTPUTS))
        self.z = rng.integers(1, 16, (GROUPS, OUTPUTS))
        if symmetric:
            self.z[:] = 8
        self.s = rng.uniform(0.01, 0.1, (GROUPS, OUTPUTS)).astype(np.float16)
        self.group = np.arange(COLUMNS) // GROUP
        if not sorted_columns:
            self.group = rng.permutation(self.group)

    def dense(self) -> np.ndarray:
        """[N, K] in float64."""
        return ((self.q - self.z[self.group]) * self.s.astype(np.float64)[self.group]).T


def pack(rows: np.ndarray, order=range(8)) -> np.ndarray:
    """int32 words of eight neighbours of a row; nibble i holds the one that `order` says."""
    words = np.zeros((rows.shape[0], rows.shape[1] // 8), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            for nibble, column in enumerate(order):
                words[row, word] |= np.uint32(int(rows[row, 8 * word + column]) << (4 * nibble))
    return words.view(np.int32)


def on_device(weight):
    return jax.tree.map(jnp.asarray, weight)


def test_awq():
    layer = Layer(sorted_columns=True)
    packed = (pack(layer.q, ORDER_OF_AWQ), pack(layer.z, ORDER_OF_AWQ), layer.s)
    weight = on_device(from_awq(*packed))
    assert weight.shape == (OUTPUTS, COLUMNS) and weight.zeros is not None
    np.testing.assert_allclose(dequantise(weight), layer.dense(), rtol=1e-6)


@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("sorted_columns", [True, False])
def test_gptq(sorted_columns, less_one):
    layer = Layer(sorted_columns)
    packed = (pack(layer.q.T).T, pack(layer.z - less_one), layer.s, layer.group)
    weight = on_device(from_gptq(*packed, zeros_less_one=less_one))
    assert (weight.order is None) == sorted_columns
    np.testing.assert_allclose(dequantise(weight), layer.dense(), rtol=1e-6)
    x = np.random.default_rng(1).normal(size=(3, COLUMNS)).astype(np.float32)
    for body in ("reference", "triton_interpreted"):
        found = quantised_matmul(jnp.asarray(x), weight, implementation=body)
        np.testing.assert_allclose(found, x @ layer.dense().T, atol=1e-4)


def test_symmetric_weights_need_no_zero_points():
    layer = Layer(True, symmetric=True)
    weight = on_device(from_gptq(pack(layer.q.T).T, pack(layer.z - 1), layer.s))
    assert weight.zeros is None
    np.testing.assert_allclose(dequantise(weight), layer.dense(), rtol=1e-6)


def test_what_does_not_fit_is_named():
    layer = Layer(True)
    words, zeros = pack(layer.q.T).T, pack(layer.z)
    with pytest.raises(ValueError, match="qzeros has shape"):
        from_gptq(words, zeros[:1], layer.s)
    with pytest.raises(ValueError, match="g_idx has shape"):
        from_gptq(words, zeros, layer.s, layer.group[1:])
    with pytest.raises(ValueError, match=r"g_idx: groups of \[31, 33\] columns"):
        from_gptq(words, zeros, layer.s, np.where(np.arange(COLUMNS) == 0, 1, layer.group))
    with pytest.raises(ValueError, match="words a row"):
        from_awq(pack(layer.q)[:, 1:], zeros, layer.s)
    with pytest.raises(ValueError, match="do not divide 64 columns"):
        from_gptq(words, np.concatenate([zeros, zeros[:1]]), layer.s[[0, 1, 0]])
