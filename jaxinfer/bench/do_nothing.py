"""A model family that computes nothing, to measure what a step costs the host.

Its parameters have the tree of a llama of as many layers, so the step's programs take the real
number of arguments; every leaf is used, or the compiler would drop it. Layers neither write nor
read the KV pool, which passes through donated.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import tokenizers
from jaxtyping import Array, Float, Int
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.checkpoints import LoadedModel
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.generation import GenerationDefaults
from jaxinfer.models import FAMILIES, llama
from jaxinfer.models.base import Attend, Family, LayerContext
from jaxinfer.params import Tree, init_params
from jaxinfer.tokenizer import Tokenizer

NAME = "do-nothing"
VOCAB_SIZE = 256


def do_nothing_model(num_layers: int, max_position: int) -> LoadedModel:
    """A model of this family, ready for `build_engine`."""
    config = ModelConfig(
        family=NAME,
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_position,
        tie_embeddings=True,
    )
    FAMILIES[NAME] = cast(Family, _DoNothing())
    params = init_params(llama.param_specs(config), "float32")
    defaults = GenerationDefaults(eos_ids=())
    return LoadedModel(
        config, params, _byte_tokenizer(), defaults, "float32", "a model that does nothing"
    )


def _byte_tokenizer() -> Tokenizer:
    """A token is a byte: any order of them will do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw.to_str(), {}, ())


class _DoNothing:
    """The family's functions; see `jaxinfer.models.base.Family`."""

    param_specs = staticmethod(llama.param_specs)

    def embed(
        self,
        params: Tree,
        c: ModelConfig,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
    ) -> Float[Array, "T D"]:
        return jnp.zeros((tokens.shape[0], c.hidden_size)) + _touch(params["embed"])

    def layer_context(self, c: ModelConfig, positions: Int[Array, " T"]) -> LayerContext:
        return ()

    def layer(
        self,
        params: Tree,
        c: ModelConfig,
        kind: LayerKind,
        x: Float[Array, "T D"],
        context: LayerContext,
        attend: Attend,
    ) -> Float[Array, "T D"]:
        return x + _touch(params)

    def unembed(self, params: Tree, c: ModelConfig, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return jnp.broadcast_to(x[:, :1] + _touch(params["final_norm"]), (x.shape[0], c.vocab_size))


def _touch(tree: Tree) -> Float[Array, ""]:
    """A scalar that depends on every leaf."""
    return sum((leaf.ravel()[0] for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
