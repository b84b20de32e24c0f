"""What the step expects of a model family, and how a family names its checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.params import Tree

LayerContext = Any  # a family's own pytree, made once a step
# attend(q [T, kv_heads, group, head_dim], k [T, kv_heads, head_dim], v, sinks [kv_heads, group] or
# None) -> like q, as wide as v. v None: the leading `value_dim` of k is.
Attend = Callable[..., Any]
# on_routed(experts i32[T, top_k]): hears which experts the tokens of a layer go to
OnRouted = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class HfSource:
    """The Hugging Face tensors (name: shape) one parameter is made of, in order for `combine`.

    Without `combine` the single tensor is taken as it is. Either result is reshaped to the
    parameter's shape, which must have as many elements. With `each`, that many tensors make one
    entry of the parameter's first axis, and the next ones the next: they need not be in memory
    together.

    Checkpoints may hold the same in `others`, forms with tensors of other names. `encoded`: the
    tensors are bytes that `combine` makes numbers of.
    """

    tensors: dict[str, tuple[int, ...]]
    combine: Callable[..., Any] | None = None
    each: int = 0
    others: tuple[HfSource, ...] = ()
    encoded: bool = False

    def found_in(self, names: Container[str]) -> HfSource:
        """The form that a checkpoint with tensors of these `names` has; this one if it has none."""
        forms = (self, *self.others)
        return next((form for form in forms if any(n in names for n in form.tensors)), self)


def require(family: str, hf: dict[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError if config.json asks for what a family's file does not compute.

    `allowed` are the values of a key that are; the first is what its absence means.
    """
    for key, values in allowed.items():
        if hf.get(key, values[0]) not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            only = f"only {known}" if known else "leave it out or null"
            raise ValueError(f"{family}: {key} = {hf[key]!r} is not supported ({only})")


# Activations by the names that config.json files have for them: several mean the tanh form.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(family: str, hf: dict[str, Any], key: str, default: str) -> Any:
    """Our name of the activation that `key` asks for. Raises ValueError naming the known ones."""
    require(family, hf, **{key: (default, *ACTIVATIONS)})
    return ACTIVATIONS[hf.get(key, default)]


# Families that read `partial_rotary_factor`; elsewhere transformers ignores it.
PARTLY_ROTATED = ("glm", "glm4", "gpt_neox", "nemotron", "phi", "phi3", "stablelm")


def dense_config(
    family: str,
    hf: dict[str, Any],
    rope: Any,
    rotary_part: float = 1.0,
    eps: str = "rms_norm_eps",
    **features: Any,
) -> ModelConfig:
    """The sizes that all config.json files name alike, and a family's `features`.

    `rotary_part` is how much of a head rotates if the file does not say, `eps` the key of the
    norms' epsilon.
    """
    heads = hf["num_attention_heads"]
    if not hf.get("head_dim") and hf["hidden_size"] % heads:
        raise ValueError(f"{heads} attention heads do not divide a width of {hf['hidden_size']}")
    sizes = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "max_position": hf["max_position_embeddings"],
        "rms_norm_eps": hf[eps],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    given = hf.get("partial_rotary_factor", rotary_part)
    part = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", given)
    if family not in PARTLY_ROTATED:
        require(family, {"partial_rotary_factor": part}, partial_rotary_factor=(1, None))
    if part not in (1, None):
        sizes["rotary_dim"] = int(sizes["head_dim"] * part)
    return ModelConfig(family=family, rope=rope, **{**sizes, **features})


def layer_types(hf: dict[str, Any], default: Callable[[int], bool]) -> list[bool]:
    """Of each layer, whether it sees a window: from `layer_types`, or by `default` without it."""
    count = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        return [default(i) for i in range(count)]
    known = {"full_attention": False, "sliding_attention": True}
    if len(types) != count or any(t not in known for t in types):
        raise ValueError(f"layer_types = {types}: expected {count} of {', '.join(known)}")
    return [known[t] for t in types]


class Family(Protocol):
    """A module under jaxinfer/models/ that implements one family."""

    def config_from_hf(self, hf: dict[str, Any], rope: Any) -> ModelConfig: ...
    def param_specs(self, c: ModelConfig) -> Tree: ...
    def hf_sources(self, c: ModelConfig) -> dict[str, HfSource]: ...
    def embed(
        self,
        params: Tree,
        c: ModelConfig,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
    ) -> Float[Array, "T D"]: ...
    def layer_context(self, c: ModelConfig, positions: Int[Array, " T"]) -> LayerContext: ...
    def layer(
        self,
        params: Tree,
        c: ModelConfig,
        kind: LayerKind,
        x: Float[Array, "T D"],
        context: LayerContext,
        attend: Attend,
        on_routed: OnRouted | None = None,  # given where `kind.moe`, and called once there
    ) -> Float[Array, "T D"]: ...
    def unembed(
        self, params: Tree, c: ModelConfig, x: Float[Array, "R D"]
    ) -> Float[Array, "R V"]: ...
