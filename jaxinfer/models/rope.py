"""The float32 tables of rotary position embedding."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(float32[head_dim/2] radians per position, factor on cos and sin) after length scaling.

    Sources: linear (Chen et al. 2023, arXiv:2306.15595); llama3 as published with Llama 3.1;
    YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2-3.4).
    """
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "none":
        return inv.astype(np.float32), 1.0
    if rope.scaling == "linear":
        return (inv / rope.factor).astype(np.float32), 1.0
    if rope.scaling == "llama3":
        return _llama3(inv, rope).astype(np.float32), 1.0
    if rope.scaling == "yarn":
        return _yarn(inv, rope, head_dim)
    if rope.scaling in ("divisors", "longrope"):
        divisors = rope.divisors if rope.scaling == "divisors" else rope.long_divisors
        scaled = inv / np.asarray(divisors, np.float64)
        return scaled.astype(np.float32), rope.attention_factor or 1.0
    known = "none, linear, llama3, yarn, longrope, divisors"
    raise ValueError(f"rope scaling {rope.scaling!r} is not one of {known}")


def _llama3(inv: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, the band between blended."""
    wavelength = 2 * math.pi / inv
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    keep = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - keep) * inv / rope.factor + keep * inv
    return np.where(wavelength > low, inv / rope.factor, np.where(wavelength < high, inv, blended))


def _yarn(inv: np.ndarray, rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Interpolate dimensions that turn slowly, extrapolate those that turn fast."""

    def dimension(rotations: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scaled = inv / rope.factor * ramp + inv * (1 - ramp)
    factor = rope.attention_factor
    if factor is None:
        factor = yarn_magnitude(rope.factor)
    return scaled.astype(np.float32), factor


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, growing with the length factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """cos and sin of every position, float32, scaled by the attention factor.

    The barrier keeps XLA from computing them again for every head of every layer.
    """
    inv, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * inv[None, :]
    return lax.optimization_barrier((jnp.cos(angles) * factor, jnp.sin(angles) * factor))
