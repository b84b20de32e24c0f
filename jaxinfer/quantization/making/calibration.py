"""What a layer's weights are multiplied with, over calibration text: layer by layer, in plain jax,
with the family's own functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of
from jaxinfer.models.layers import rms_norm
from jaxinfer.params import Tree
from jaxinfer.quantization.weight import Heard
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_attention import apply_rope

LENGTH = 256  # tokens of a sequence: all have as many, so that one shape is compiled


def sequences(texts: Sequence[Sequence[int]], most: int) -> Int[np.ndarray, "S L"]:
    """Texts in tokens, one after the other and cut into pieces of one length; at most `most`
    tokens. Raises ValueError for less than one piece of 32."""
    flat = [token for text in texts for token in text][:most]
    length = min(LENGTH, len(flat))
    if length < 32:
        raise ValueError(f"the calibration text has {len(flat)} tokens; give at least 32")
    count = len(flat) // length
    return np.array(flat[: count * length], np.int32).reshape(count, length)


class Calibration:
    """Activations of all sequences between two layers; `advance` takes them through the next."""

    def __init__(self, config: ModelConfig, vocabulary: Tree, tokens: Int[np.ndarray, "S L"]):
        """`vocabulary` are the parameters before the layers."""
        self._config, self._family = config, family_of(config.family)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        self._context = self._family.layer_context(config, positions)
        self._states = [
            np.asarray(self._family.embed(vocabulary, config, jnp.asarray(row), positions))
            for row in tokens
        ]

    def moments(self, layer: int, params: Tree, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Second moments [K, K] of what meets the parameters of those `names`; all experts of a
        mixture have those of all of its tokens."""
        sums: dict[str, Any] = dict.fromkeys(names)
        rows = dict.fromkeys(names, 0)

        def hear(name: str, x: Float[Array, "R K"]) -> None:
            product = np.asarray(jnp.matmul(x.T, x), np.float32)
            sums[name] = product if sums[name] is None else sums[name] + product
            rows[name] += x.shape[0]

        heard = {
            name: Heard(array, functools.partial(hear, name)) if name in sums else array
            for name, array in params.items()
        }
        for state in self._states:
            self._through(layer, heard, state)
        return {name: sums[name] / rows[name] for name in names}

    def advance(self, layer: int, params: Tree) -> None:
        self._states = [np.asarray(self._through(layer, params, state)) for state in self._states]

    def _through(self, layer: int, params: Tree, state: np.ndarray) -> Array:
        c, kind = self._config, self._config.kind(layer)
        attend = functools.partial(_attend, c, kind.window)
        return self._family.layer(
            params, c, kind, jnp.asarray(state), self._context, attend,
            (lambda experts: None) if c.moe and kind.moe else None,
            _run_experts if c.moe and kind.moe else None,
        )  # fmt: skip


def _run_experts(compute: Any, *arrays: Any) -> Array:
    return compute(functools.partial(grouped_matmul, implementation="segments"), *arrays)


def _attend(
    config: ModelConfig,
    window: int | None,
    q: Float[Array, "T KV G hd"],
    k: Float[Array, "T KV hd"],
    v: Float[Array, "T KV hd"] | None,
    sinks: Float[Array, "KV G"] | None = None,
    rotary: tuple[Array, Array] | None = None,
    norms: tuple[Array, Array] | None = None,
) -> Float[Array, "T KV G vd"]:
    """`base.Attend` over one whole sequence: no pages."""
    if norms is not None:
        q, k = (
            rms_norm(
                x.reshape(-1, x.shape[-1]), weight, config.rms_norm_eps, config.norm_offset
            ).reshape(x.shape)
            for x, weight in zip((q, k), norms, strict=True)
        )
    if rotary is not None:
        heads = q.reshape(q.shape[0], -1, q.shape[-1])
        q = apply_rope(heads, *rotary, config.rope_pairs).reshape(q.shape)
        k = apply_rope(k, *rotary, config.rope_pairs)
    v = k[..., : config.value_dim] if v is None else v
    ages = jnp.arange(q.shape[0])[:, None] - jnp.arange(q.shape[0])[None]
    seen = (ages >= 0) if window is None else (ages >= 0) & (ages < window)
    scores = jnp.einsum("tkgd,skd->kgts", q, k).astype(jnp.float32) * config.scale
    if config.attention_soft_cap is not None:
        scores = jnp.tanh(scores / config.attention_soft_cap) * config.attention_soft_cap
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    if sinks is not None:
        last = jnp.broadcast_to(sinks[:, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, last.astype(scores.dtype)], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : q.shape[0]].astype(v.dtype)
    return jnp.einsum("kgts,skd->tkgd", shares, v)
