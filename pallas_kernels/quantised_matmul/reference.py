"""Products with quantised weights in plain jax: the path of CPUs, and of what kernels do not do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels.quantised_matmul.activations import rounded
from pallas_kernels.quantised_matmul.pairs import pair_product
from pallas_kernels.quantised_matmul.weight import (
    QuantisedWeight,
    dequantise,
    integers,
    scales_by_output,
)

FEWEST_ROWS = 2  # XLA's int8 product of one row is ten times as slow as that of two on CPUs


def quantised_matmul(
    x: Float[Array, "M K"], weight: QuantisedWeight | Float[Array, "N K"], *, out_dtype: Any
) -> Float[Array, "M N"]:
    """See the package. Where x is rounded to int8, integers are multiplied as integers."""
    if not isinstance(weight, QuantisedWeight):
        return _dot(x, weight, jnp.float32).astype(out_dtype)
    if weight.activations == "as_given":
        return _as_given(x, weight, out_dtype)
    x = x if weight.order is None else x[:, weight.order]
    if weight.activations == "int8_pair" and weight.groups == 1:
        scales = scales_by_output(weight)[:, 0]
        values = integers(weight)
        return pair_product(x, lambda x: _dot(x, values, jnp.int32), scales).astype(out_dtype)
    taken = rounded(x, weight.activations)
    assert taken.scales is not None
    if taken.values.dtype == jnp.int8:
        product = _of_integers(taken.values, weight)
    else:
        rows, stored = lax.optimization_barrier((taken.values, weight))
        whole = dequantise(QuantisedWeight(stored.values, stored.scales, block=weight.block))
        product = _dot(rows.astype(jnp.float32), whole, jnp.float32)
    return taken.total(product * taken.scales[:, None]).astype(out_dtype)


def _as_given(x: Float[Array, "M K"], weight: QuantisedWeight, out_dtype: Any) -> Array:
    # Nothing else keeps XLA from having the numbers of all layers' weights at once.
    x, weight = lax.optimization_barrier((x, weight))
    if weight.groups > 1 or not weight.integral:
        return _dot(x, dequantise(weight, x.dtype), jnp.float32).astype(out_dtype)
    x = x if weight.order is None else x[:, weight.order]
    product = _dot(x, integers(weight).astype(x.dtype), jnp.float32)
    return (product * scales_by_output(weight)[:, 0][None]).astype(out_dtype)


def _of_integers(x: Num[Array, "R K"], weight: QuantisedWeight) -> Float[Array, "R N"]:
    """int8 times int8 in int32: over all columns, or over each group of them."""
    rows, (outputs, columns) = x.shape[0], weight.shape
    if rows < FEWEST_ROWS:
        x = jnp.pad(x, ((0, FEWEST_ROWS - rows), (0, 0)))
    values, scales = integers(weight), scales_by_output(weight)
    if weight.groups == 1:
        return _dot(x, values, jnp.int32).astype(jnp.float32)[:rows] * scales[:, 0][None]
    by_group = lax.dot_general(
        x.reshape(-1, weight.groups, columns // weight.groups),
        values.reshape(outputs, weight.groups, -1),
        (((2,), (2,)), ((1,), (1,))),
        preferred_element_type=jnp.int32,
    )
    return jnp.sum(by_group.astype(jnp.float32) * scales.T[:, None], axis=0)[:rows]


def _dot(x: Array, values: Array, dtype: Any) -> Array:
    return lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
