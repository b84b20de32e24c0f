"""Latent attention of a layer by kernels, on each device for its heads.

What `models/mla.py` says in plain jax, in fewer launches: small products are divided over their
columns, and the kernel that takes the result adds the parts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.attention import Pages, attend_own
from jaxinfer.config import LayerKind
from jaxinfer.models.base import Rotary
from jaxinfer.models.layers import add_bias, linear
from jaxinfer.models.mla import LATENT_EPS, mla_specs
from jaxinfer.params import Tree
from jaxinfer.quantization.weight import Quantised, multiply_in_parts, multiply_own
from jaxinfer.sharding import on_each_device, partition_spec
from jaxinfer.step_model import Placement, StepModel
from pallas_kernels.latent_attention import absorbed_queries, norm_and_write
from pallas_kernels.quantised_matmul import quantised_matmul
from pallas_kernels.quantised_matmul.triton_product import step_columns

FEW_ROWS = 64  # up to which a product of ours is one launch, and the compiler's two
WANTED_PROGRAMS, MOST_PARTS, FEWEST_COLUMNS = 264, 8, 64


def takes(model: StepModel, params: Tree) -> bool:
    """Whether kernels compute a layer with these parameters: latent, of 16 bits, since tensor cores
    would round others, or of quantised weights that kernels multiply with."""
    mla = model.config.mla
    if mla is None or model.attention.startswith("reference"):
        return False
    weights = [params[name] for name in mla_specs(model.config, mla)]
    if any(isinstance(w, Quantised) and w.multiplier.body == "reference" for w in weights):
        return False
    return model.attention.endswith("_interpreted") or params["k_b"].dtype.itemsize == 2


def run_latent(
    model: StepModel,
    kind: LayerKind,
    place: Placement,
    pages: Pages,
    params: Tree,
    x: Float[Array, "T D"],
    rotary: Rotary,
) -> tuple[Float[Array, "T D"], Pages]:
    """A layer's attention of normed `x` without its last bias, and the pages with new latents."""
    config = model.config
    assert config.mla is not None
    specs = mla_specs(config, config.mla)
    own = {name: params[name] for name in specs}
    whole, pool = PartitionSpec(), (partition_spec(model.groups[0].axes),)
    weights = {
        name: param.placed() if isinstance(param, Quantised) else partition_spec(specs[name].axes)
        for name, param in own.items()
    }

    def body(place: Placement, pages: Pages, params: Tree, x: Array, rotary: Rotary) -> Any:
        out, stored = _of_own_heads(model, kind, place, pages, params, x, rotary)
        return (out if model.mesh is None else lax.psum(out, "model")), stored

    body = on_each_device(body, model.mesh, (whole, pool, weights, whole, whole), (whole, pool))
    return body(place, pages, own, x, rotary)


def _of_own_heads(
    model: StepModel,
    kind: LayerKind,
    place: Placement,
    pages: Pages,
    params: Tree,
    x: Float[Array, "T D"],
    rotary: Rotary,
) -> tuple[Float[Array, "T D"], Pages]:
    config, tokens = model.config, x.shape[0]
    interpret = model.attention.endswith("_interpreted")
    how: dict[str, Any] = {"pairs": config.rope_pairs, "interpret": interpret}
    low, pool = norm_and_write(
        _projected(params, x),
        (params.get("q_a_norm"), params["kv_a_norm"]),
        rotary,
        pages[0],
        place.pages,
        place.offsets,
        eps=LATENT_EPS,
        dtype=x.dtype,
        **how,
    )
    q = _in_parts(x if low is None else low, params["q"])
    q = q.reshape(-1, tokens, *params["q"].shape[:2])
    queries = absorbed_queries(q, params["k_b"], rotary, **how)[:, None]
    stored = (pool,)
    values = attend_own(model, kind, place, queries, stored, value_weights=params["v_b"])
    flat, weight = values.reshape(tokens, -1), params["o"]
    if isinstance(weight, Quantised):
        return multiply_own(flat, weight, flat.dtype), stored
    weight = weight.reshape(config.hidden_size, -1)
    columns = weight.shape[1]
    if tokens > FEW_ROWS or not step_columns(columns, columns):
        return linear(flat, weight), stored
    body: Any = "triton_interpreted" if interpret else "triton"
    return quantised_matmul(flat, weight, implementation=body, splits=1), stored


def _projected(params: Tree, x: Float[Array, "T D"]) -> tuple[Float[Array, "_ T _"], ...]:
    """Latents of queries, if there are any, and of keys and values with the key that rotates; of
    weights that are no arrays, in two."""
    names = [name for name in ("q_a", "kv_a") if name in params]
    bias = [params[f"{name}_bias"] for name in names] if "kv_a_bias" in params else None
    if isinstance(params["kv_a"], Quantised):
        if bias is None:
            return tuple(multiply_in_parts(x, params[name]) for name in names)
        products = (multiply_own(x, params[name], x.dtype) for name in names)
        return tuple(add_bias(product, b)[None] for product, b in zip(products, bias))
    weight = jnp.concatenate([params[name] for name in names])
    if bias is None:
        return (_in_parts(x, weight),)
    return (add_bias(linear(x, weight), jnp.concatenate(bias))[None],)


def _in_parts(
    x: Float[Array, "T K"], weight: Float[Array, "*outputs K"] | Quantised
) -> Float[Array, "P T N"]:
    """x @ weight.T as parts that add up, float32 if there are several: as many as fill a device."""
    if isinstance(weight, Quantised):
        return multiply_in_parts(x, weight)
    weight = weight.reshape(-1, weight.shape[-1])
    (tokens, columns), outputs = x.shape, weight.shape[0]
    tile, parts = (64 if tokens <= FEW_ROWS else 128), 1  # as the compiler has them
    tiles = -(-tokens // tile) * -(-outputs // tile)
    while parts < MOST_PARTS and 2 * parts * tiles <= WANTED_PROGRAMS:
        parts *= 2
    while parts > 1 and columns % (parts * FEWEST_COLUMNS):
        parts //= 2
    if parts == 1:
        return linear(x, weight)[None]
    x, weight = x.reshape(tokens, parts, -1), weight.reshape(outputs, parts, -1)
    dims = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)
