"""Log-probabilities as the device computes them: of tokens that are drawn, and of a prompt's.

Both are columns of the same form, so what is said of a token does not depend on who asked for it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.models import family_of
from jaxinfer.params import Tree
from jaxinfer.request import MAX_LOGPROBS
from jaxinfer.sharding import constrain
from jaxinfer.step_model import StepModel


def logprob_columns(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"]
) -> list[Int[Array, "R columns"]]:
    """Columns: the token's logprob, its rank, the most likely ids, their logprobs; floats as bits.

    A token's rank is 1 and as many as are more likely; of equally likely ones all have the same.
    """
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + (logits > chosen).sum(-1, keepdims=True, dtype=jnp.int32)
    bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    return [bits(chosen - norm), rank, ids, bits(top - norm)]


@functools.partial(jax.jit, static_argnames=("model",))
def score(
    params: Tree,
    hidden: Float[Array, "C D"],
    packed: Int[Array, "2 B"],
    *,
    model: StepModel,
) -> Int[Array, "B columns"]:
    """What the model thought of tokens of prompts: `logprob_columns` of one block of them.

    `hidden` is the last layer's output of a step's chunk. `packed` has the rows of it that are
    looked at, and for each the token that follows it. So many logits are made at a time and no
    more, however long the chunk is.
    """
    rows, following = packed
    family = family_of(model.config.family)
    x = hidden.at[rows].get(mode="promise_in_bounds")
    logits = constrain(family.unembed(params, model.config, x), model.mesh, None, "vocab")
    logits = constrain(logits, model.mesh)
    return jnp.concatenate(logprob_columns(logits, following), axis=1)
