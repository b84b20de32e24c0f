"""What the step expects of a model family, and how a family names its checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig
from jaxinfer.params import Tree

LayerContext = Any  # a family's own pytree, made once a step
# attend(q [T, kv_heads, group, head_dim], k [T, kv_heads, head_dim], v) -> like q
Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class HfSource:
    """The Hugging Face tensors (name: shape) one parameter is made of, in order for `combine`.

    Without `combine` the single tensor is taken as it is. Either result is reshaped to the
    parameter's shape, which must have as many elements.
    """

    tensors: dict[str, tuple[int, ...]]
    combine: Callable[..., Any] | None = None


class Family(Protocol):
    """A module under jaxinfer/models/ that implements one family."""

    def config_from_hf(self, hf: dict[str, Any], rope: Any) -> ModelConfig: ...
    def param_specs(self, c: ModelConfig) -> Tree: ...
    def hf_sources(self, c: ModelConfig) -> dict[str, HfSource]: ...
    def embed(
        self, params: Tree, c: ModelConfig, tokens: Int[Array, " T"]
    ) -> Float[Array, "T D"]: ...
    def layer_context(self, c: ModelConfig, positions: Int[Array, " T"]) -> LayerContext: ...
    def layer(
        self,
        params: Tree,
        c: ModelConfig,
        x: Float[Array, "T D"],
        context: LayerContext,
        attend: Attend,
    ) -> Float[Array, "T D"]: ...
    def unembed(
        self, params: Tree, c: ModelConfig, x: Float[Array, "R D"]
    ) -> Float[Array, "R V"]: ...
