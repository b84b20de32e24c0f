"""Random weights of every kind, and the numbers they stand for, made by NumPy alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.quantization.weight import Multiplier, Quantised
from pallas_kernels.quantised_matmul import QuantisedWeight, pack_int4


class Kind(NamedTuple):
    """How a random weight is stored; `group` 0: one scale for all columns of a row. "e2m1" are
    floats of 4 bits."""

    stored: str
    group: int = 0
    rows: int = 1
    zeros: str = ""  # their dtype
    order: bool = False
    activations: str = "as_given"


# OCP Microscaling Formats specification 1.0, the sign highest.
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_HALF, -_HALF])
KINDS = {
    "int8": Kind("int8"),
    "int8 in groups": Kind("int8", 64),
    "int4": Kind("int4", 128),
    "int4 of channels": Kind("int4"),
    "int4 with zeros, in order": Kind("int4", 32, zeros="uint8", order=True),
    "int4 with float zeros": Kind("int4", 64, zeros="float32"),
    "int4 of channels with float zeros": Kind("int4", zeros="float32"),
    "e2m1": Kind("e2m1", 32),
    "e2m1 of channels": Kind("e2m1"),
    "float8": Kind("float8_e4m3fn"),
    "float8 in blocks": Kind("float8_e4m3fn", 128, rows=128),
    "w8a8": Kind("int8", activations="int8"),
    "w8a8 of pairs": Kind("int8", activations="int8_pair"),
    "w4a8": Kind("int4", 64, zeros="uint8", activations="int8"),
    "w8a8 float8": Kind("float8_e4m3fn", activations="float8_e4m3fn"),
    "w8a8 float8 in blocks": Kind("float8_e4m3fn", 128, rows=128, activations="float8_e4m3fn"),
}


def random_weight(
    kind: Kind, outputs: int, columns: int, *lead: int, seed: int = 0
) -> tuple[QuantisedWeight, np.ndarray]:
    """A weight [*lead, outputs, columns], and its matrices in float64."""
    rng = np.random.default_rng(seed)
    group, bits = kind.group or columns, 4 if kind.stored in ("int4", "e2m1") else 8
    shape = (*lead, outputs, columns)
    if kind.stored == "float8_e4m3fn":
        values = np.asarray(rng.uniform(-400, 400, size=shape), jnp.float8_e4m3fn)
    else:
        low, high = (0, 16) if bits == 4 else (-127, 128)
        values = rng.integers(low, high, size=shape)
    scale_shape = (*lead, columns // group, -(-outputs // kind.rows))
    scales = rng.uniform(0.5, 2, scale_shape).astype(np.float32) / (8 if bits == 4 else 127)
    zeros = None
    if kind.zeros:
        zeros = rng.uniform(0, 15, scale_shape).astype(kind.zeros)
    order = rng.permutation(columns) if kind.order else None

    def spread(array: np.ndarray) -> np.ndarray:
        """One for each value."""
        rows = np.repeat(array, kind.rows, axis=-1)[..., :outputs]
        return np.repeat(rows.swapaxes(-1, -2), group, axis=-1).astype(np.float64)

    numbers = E2M1[values] if kind.stored == "e2m1" else values.astype(np.float64)
    zero = spread(zeros) if kind.zeros else 8.0 * (kind.stored == "int4")
    dense = (numbers - zero) * spread(scales)
    if kind.order:
        dense = dense[..., np.argsort(order)]
    stored = pack_int4(jnp.asarray(values), group) if bits == 4 else jnp.asarray(values)
    weight = QuantisedWeight(
        stored if bits == 4 or kind.stored != "int8" else stored.astype(jnp.int8),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros),
        None if order is None else jnp.asarray(order, jnp.int32),
        bits=bits,
        block=(kind.rows, group),
        activations=kind.activations,
        codes="e2m1" if kind.stored == "e2m1" else "integers",
    )
    weight.check()
    return weight, dense


def with_body(params: Any, body: str = "reference", mesh: Mesh | None = None) -> Any:
    """Parameters whose quantised weights are multiplied with by that body."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Quantised):
            return leaf
        return dataclasses.replace(leaf, multiplier=Multiplier(body, mesh))

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, Quantised))


def rounded_rows(x: np.ndarray, activations: str) -> np.ndarray:
    """What is left of x [M, K] after its rounding, in float64."""
    x = x.astype(np.float64)
    if activations == "as_given":
        return x
    most = 448.0 if activations == "float8_e4m3fn" else 127.0
    # The scale and the units in float32, as they are computed: where a unit lies between two
    # integers, the last bit decides.
    scales = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(most)
    scales = np.maximum(scales, np.float32(1e-12))
    units = (x.astype(np.float32) * (np.float32(1) / scales)).astype(np.float32)
    if activations == "float8_e4m3fn":
        kept = units.astype(jnp.float8_e4m3fn).astype(np.float64)
    else:
        kept = np.round(units).astype(np.float64)
        if activations == "int8_pair":
            left = (units - np.round(units)) * np.float32(254)
            kept += np.round(left).astype(np.float64) / 254
    return kept * scales
