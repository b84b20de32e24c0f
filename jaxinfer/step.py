"""The forward pass of a step: the first of its two programs, the second being `sampler.sample`.

One body serves every shape: S decode rows of one token each and one prefill chunk of C tokens made
of pieces of several prompts. Pure; pool and slot state are donated, tokens stay on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.attention import attend_pages, write
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.experts import run_experts
from jaxinfer.kv_pool import Pools
from jaxinfer.latent_attention import run_latent, takes
from jaxinfer.models import family_of
from jaxinfer.models.base import LayerContext, Norms, Rotary
from jaxinfer.params import Tree
from jaxinfer.sampler import SampleRows
from jaxinfer.sharding import constrain
from jaxinfer.slot_state import Slots
from jaxinfer.slot_state import admit as _admit
from jaxinfer.slot_state import load_history as _load_history
from jaxinfer.slot_state import put_masks as _put_masks
from jaxinfer.step_model import Placement, StepModel
from jaxinfer.step_plan import StepShape, layout

admit = jax.jit(_admit, donate_argnames=("slots", "options"))
load_history = jax.jit(_load_history, donate_argnames=("history",))
put_masks = jax.jit(_put_masks, donate_argnames=("options",))


@functools.partial(jax.jit, static_argnames=("model", "shape"), donate_argnames=("pools", "slots"))
def forward(
    params: Tree,
    pools: Pools,
    slots: Slots,
    packed: Int[Array, " size"],
    *,
    model: StepModel,
    shape: StepShape,
) -> tuple[
    Pools,
    Slots,
    SampleRows,
    Float[Array, "R V"],
    Int[Array, "L E"] | None,
    Float[Array, "C D"] | None,
]:
    """Compute one step: keys and values into the pool, float32 logits of the rows that sample.

    Decode rows read their token and position from `slots`; rows that are done compute nothing
    that is kept. Returns the rows for `sample`: decode rows, then one a piece. Last come the tokens
    that went to each expert of the layers that have experts, None if there are none; and the last
    layer's output for the chunk, of which `logprobs.score` makes logits where prompts want them.
    """
    inputs = {name: packed[place].reshape(dims) for name, (place, dims) in layout(shape).items()}
    slots = _map_pages(slots, inputs["deltas"])
    rows = inputs["rows"]
    live = ~slots.done[rows]
    tokens, positions, owners = slots.token[rows], slots.position[rows], rows
    written = live
    if shape.chunk:
        tokens = jnp.concatenate([tokens, inputs["tokens"]])
        positions = jnp.concatenate([positions, inputs["positions"]])
        owners = jnp.concatenate([owners, inputs["slots"]])
        written = jnp.concatenate([live, jnp.ones(shape.chunk, bool)])
    kv_lens = jnp.where(live, slots.position[rows] + 1, 0)
    places = [
        Placement(
            pages=jnp.where(written, table[owners, positions // group.page_size], 0),
            offsets=positions % group.page_size,
            table=table,
            decode_table=table[rows],
            kv_lens=kv_lens,
            tiles=inputs.get("tiles"),
        )
        for table, group in zip(slots.page_tables, model.groups)
    ]
    family = family_of(model.config.family)
    x = family.embed(params, model.config, tokens, positions)
    context = family.layer_context(model.config, positions)
    pools, routed = list(pools), []
    for i, layer_params in enumerate(params["layers"]):
        place = places[model.group_of(i)]
        kind = model.config.kind(i)
        with jax.named_scope(f"layer{i}"):
            x, pools[i], experts = _layer(
                layer_params, x, context, pools[i], place, model=model, kind=kind
            )
        if experts is not None:
            routed.append(experts)
    slots, sampled, last = _finish_rows(slots, rows, live, inputs, shape)
    # By vocabulary first: asked for whole logits, the compiler would gather the head's weight.
    logits = constrain(family.unembed(params, model.config, x[last]), model.mesh, None, "vocab")
    pools = constrain(pools, model.mesh, *model.groups[0].axes)
    padding = owners == slots.token.shape[0] - 1
    load = _expert_load(routed, written & ~padding, model.config)
    hidden = x[shape.rows :] if shape.chunk else None
    return pools, *constrain((slots, sampled, logits, load, hidden), model.mesh)


@functools.partial(jax.jit, static_argnames=("model", "kind"))
def _layer(
    params: Tree,
    x: Float[Array, "T D"],
    context: LayerContext,
    pool: tuple[Array, ...],
    place: Placement,
    *,
    model: StepModel,
    kind: LayerKind,
) -> tuple[Float[Array, "T D"], tuple[Array, ...], Int[Array, "T k"] | None]:
    """One layer: its output, its pool, and each token's experts if it has any.

    An inner jit, so that it is traced once a kind of layer and not once a layer.
    """
    config = model.config
    stored, experts = pool, None

    def attend(
        q: Float[Array, "T KV G hd"],
        k: Float[Array, "T KV hd"],
        v: Float[Array, "T KV hd"] | None,
        sinks: Float[Array, "KV G"] | None = None,
        rotary: Rotary | None = None,
        norms: Norms | None = None,
    ) -> Float[Array, "T KV G vd"]:
        nonlocal stored
        q, stored = write(model, pool, place, q, k, v, rotary, norms)
        return attend_pages(model, kind, place, q, stored, sinks)

    def latent(params: Tree, x: Float[Array, "T D"], rotary: Rotary) -> Float[Array, "T D"]:
        nonlocal stored
        out, stored = run_latent(model, kind, place, pool, params, x, rotary)
        return out

    def on_routed(chosen: Int[Array, "T k"]) -> None:
        nonlocal experts
        experts = chosen

    hears: dict[str, Any] = {}
    if kind.moe:
        run = functools.partial(run_experts, model) if model.experts else None
        hears = {"on_routed": on_routed, "run_experts": run}
    if takes(model, params):
        hears["run_latent"] = latent
    x = family_of(config.family).layer(params, config, kind, x, context, attend, **hears)
    return x, stored, experts


def _expert_load(
    routed: list[Int[Array, "T k"]], counted: Bool[Array, " T"], config: ModelConfig
) -> Int[Array, "L E"] | None:
    """Tokens that went to each expert of each layer, of those `counted`: one sum for all layers."""
    if not routed:
        return None
    assert config.moe is not None
    layers, experts = len(routed), config.moe.num_experts
    places = jnp.stack(routed) + experts * jnp.arange(layers)[:, None, None]
    ones = jnp.broadcast_to(counted[None, :, None], places.shape).astype(jnp.int32)
    load = jnp.zeros(layers * experts, jnp.int32)
    load = load.at[places.reshape(-1)].add(ones.reshape(-1), mode="promise_in_bounds")
    return load.reshape(layers, experts)


def _map_pages(slots: Slots, deltas: Int[Array, "G D 3"]) -> Slots:
    """Enter the step's new pages into the page tables."""
    tables = tuple(
        table.at[delta[:, 0], delta[:, 1]].set(delta[:, 2], mode="promise_in_bounds")
        for table, delta in zip(slots.page_tables, deltas)
    )
    return slots._replace(page_tables=tables)


def _finish_rows(
    slots: Slots, rows: Int[Array, " S"], live: Array, inputs: dict[str, Array], shape: StepShape
) -> tuple[Slots, SampleRows, Int[Array, " R"]]:
    """Advance positions; the rows to sample, and where in the step's tokens each one's last is."""
    position = slots.position.at[rows].add(live.astype(jnp.int32), mode="promise_in_bounds")
    last = jnp.arange(shape.rows)
    if shape.chunk:
        owner, row, end, ends = inputs["pieces"].T
        position = position.at[owner].set(end, mode="promise_in_bounds")
        null_slot = slots.token.shape[0] - 1
        rows = jnp.concatenate([rows, jnp.where(ends > 0, owner, null_slot)])
        live = jnp.concatenate([live, ends > 0])
        last = jnp.concatenate([last, shape.rows + row])
    return slots._replace(position=position), SampleRows(rows, live), last
