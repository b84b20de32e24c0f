"""Programs that break a promise each, compiled for GPUs: prints which checks fail, as JSON.

Run by test_gpu_check.py in a process of its own, with `gpu_check.target.environment()`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from quantised_weights import with_body

from jaxinfer.gpu_check.cases import Plan, Served, make_plan
from jaxinfer.gpu_check.checks import assess
from jaxinfer.gpu_check.target import TARGETS
from jaxinfer.sharding import replicated
from jaxinfer.step import forward
from jaxinfer.step_plan import StepShape

SHAPE = StepShape(64, 0, 64)
NAME = f"forward {SHAPE.rows}+{SHAPE.chunk}"


def packed(plan: Plan) -> Any:
    whole = replicated(plan.model.mesh)
    return jax.ShapeDtypeStruct((SHAPE.packed_size,), jnp.int32, sharding=whole)


def step(
    plan: Plan,
    wrap: Callable[..., Any] | None = None,
    donate: bool = True,
    params: Any = None,
    **changes: Any,
) -> Any:
    """The decode program of a plan, traced anew with something changed."""
    model = dataclasses.replace(plan.model, **changes)

    def run(params: Any, pools: Any, slots: Any, inputs: Any) -> Any:
        results = forward.__wrapped__(params, pools, slots, inputs, model=model, shape=SHAPE)
        return wrap(*results) if wrap else results

    program = jax.jit(run, donate_argnums=(1, 2) if donate else ())
    with jax.set_mesh(plan.model.mesh):  # kernels are compiled for the device they find there
        return program.lower(params or plan.state[0], *plan.state[1:3], packed(plan))


def roll_pages(pools: Any, *others: Any) -> Any:
    (k, v), *layers = pools
    return [(jnp.roll(k, 1, axis=0), v), *layers], *others


def roll_scales(pools: Any, *others: Any) -> Any:
    (k, v, k_scale, v_scale), *layers = pools
    return [(k, v, jnp.roll(k_scale, 1, axis=0), v_scale), *layers], *others


def branch(pools: Any, slots: Any, rows: Any, logits: Any, *others: Any) -> Any:
    def smooth(x: Any) -> Any:  # branches without a loop are merged into a select
        return jax.lax.fori_loop(0, 9, lambda _, y: jnp.roll(y, 1, axis=1) * 0.5 + x, x)

    return pools, slots, rows, jax.lax.cond(slots.done[0], smooth, jnp.tanh, logits), *others


def failures(plan: Plan, lowered: Any, compiled: Any = None, **changes: Any) -> dict[str, str]:
    """Checks of the plan's decode program that a lowered one fails, and what was found."""
    expect = dataclasses.replace(plan.expectation(plan.programs[NAME]), **changes)
    _, checks = assess(lowered, compiled or lowered.compile(), expect)
    return {check.name: check.detail for check in checks if not check.passed}


def main() -> None:
    one, eight = (make_plan(TARGETS["h200"], Served("llama-3-8b", ways), 1) for ways in (1, 8))
    int4 = make_plan(TARGETS["h200"], Served("llama-3-8b", 1, "int4"), 1)
    pages = make_plan(TARGETS["h200"], Served("llama-3-8b", kv_dtype="int8"), 1)
    with jax.set_mesh(one.model.mesh):
        right = one.programs[NAME].lower()
    compiled = right.compile()
    unpinned = step(eight, mesh=None, attention="reference_static")
    found = {
        "none": failures(one, right, compiled),
        "too little memory": failures(one, right, compiled, memory=64 << 30),
        "too little room for temporaries": failures(one, right, compiled, temp_limit=1 << 20),
        "not donated": failures(one, step(one, donate=False)),
        "copies the pool": failures(one, step(one, roll_pages)),
        "copies the scales": failures(pages, step(pages, roll_scales)),
        "loops while the device says so": failures(one, step(one, attention="reference")),
        "branches as the device says": failures(one, step(one, branch)),
        "attention by XLA": failures(one, step(one, attention="reference_static")),
        "weights made numbers of": failures(int4, step(int4, params=with_body(int4.state[0]))),
        "not pinned to the mesh": failures(eight, unpinned),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
