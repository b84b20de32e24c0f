"""What the step expects of a model family, and how a family names its checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.field_rules import agreed, shown
from jaxinfer.models.hf_fields import HfConfig
from jaxinfer.models.rope_config import rope_settings
from jaxinfer.params import Tree

LayerContext = Any  # a family's own pytree, made once a step
Rotary = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cosines and sines
Norms = tuple[Float[Array, " hd"], Float[Array, " hd"]]  # weights for queries and for keys
# attend(q [T, kv_heads, group, head_dim], k [T, kv_heads, head_dim], v, sinks [kv_heads, group] or
# None, rotary, norms) -> like q, as wide as v. v None: the leading `value_dim` of k is. With
# `norms`, heads of q and k are still to be normed; with `rotary`, to be rotated after that.
Attend = Callable[..., Any]
# on_routed(experts i32[T, top_k]): hears which experts the tokens of a layer go to
OnRouted = Callable[[Any], None]
# Rows [R, D] in order of their expert, i32[E] of each, the place of every token's choice [T * k]
# among them, and its share [T, k].
Routed = tuple[Any, Any, Any, Any]
# experts(multiply(rows, matrices [E, N, K], sizes), routed, gate_up, down, biases of gate_up for
# each row, or None) -> [T, D]
Experts = Callable[..., Any]
# run(experts, routed, ...) -> what experts(multiply, routed, ...) is
RunExperts = Callable[..., Any]
# run(a layer's parameters, normed x [T, D], rotary) -> [T, D], its latent attention without o_bias
RunLatent = Callable[..., Any]


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
        given = dict.get(hf, key, values[0])  # whatever it is
        if given not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            only = f"only {known}" if known else "leave it out or null"
            raise ValueError(f"{family}: {key} = {shown(given)} is not supported ({only})")


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
    return ACTIVATIONS[dict.get(hf, key, default)]


# Families that read `partial_rotary_factor`; elsewhere transformers ignores it.
PARTLY_ROTATED = ("glm", "glm4", "glm4_moe", "gpt_neox", "nemotron", "phi", "phi3", "stablelm")


def dense_config(
    family: str,
    hf: HfConfig,
    rope: Any,
    rotary_part: float = 1.0,
    eps: str = "rms_norm_eps",
    **features: Any,
) -> ModelConfig:
    """The sizes that all config.json files name alike, and a family's `features`.

    `rotary_part` is how much of a head rotates if the file does not say, `eps` the key of the
    norms' epsilon.
    """
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        )
    if not hf.get("head_dim") and width % heads:
        raise ValueError(
            f"num_attention_heads (n_head) = {heads} does not divide hidden_size = {width}; if it "
            "need not, head_dim has to be given"
        )
    sizes = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": width,
        "intermediate_size": hf["intermediate_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hf.get("head_dim") or width // heads,
        "max_position": hf["max_position_embeddings"],
        "rms_norm_eps": hf[eps],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    given = {
        "partial_rotary_factor (rotary_pct)": hf.get("partial_rotary_factor"),
        "rope_parameters: partial_rotary_factor": rope_settings(hf).get("partial_rotary_factor"),
    }
    part = agreed(given, rotary_part)
    if family not in PARTLY_ROTATED:
        require(family, {"partial_rotary_factor": part}, partial_rotary_factor=(1, None))
    if part != 1:
        sizes["rotary_dim"] = int(sizes["head_dim"] * part)
    return ModelConfig(family=family, rope=rope, **{**sizes, **features})


def layer_windows(hf: HfConfig, slides: Callable[[int], bool]) -> list[int | None]:
    """What each layer sees, None being everything: as `layer_types` says, or by `slides` without.

    Raises ValueError for types we do not know, and where they want a window that is not given.
    """
    count, types = hf["num_hidden_layers"], hf.get("layer_types")
    known = {"full_attention": False, "sliding_attention": True}
    if types is None:
        sliding = [slides(i) for i in range(count)]
    elif len(types) != count or any(t not in known for t in types):
        raise ValueError(
            f"layer_types = {shown(types)}: expected num_hidden_layers = {count} of "
            f"{', '.join(known)}"
        )
    else:
        sliding = [known[t] for t in types]
    if not any(sliding):  # then the window may be anything: some files have 0
        return [None] * count
    window = hf.get("sliding_window")
    if not (window and hf.get("use_sliding_window", True)):
        raise ValueError(
            f"sliding_window = {window}, but layers want one; give it (and use_sliding_window "
            "true, if it is there), or make all layer_types full_attention"
        )
    return [window if slide else None for slide in sliding]


class Family(Protocol):
    """A module under jaxinfer/models/ that implements one family."""

    def config_from_hf(self, hf: HfConfig, rope: Any) -> ModelConfig: ...
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
        run_experts: RunExperts | None = None,  # likewise; None: as the platform has it
    ) -> Float[Array, "T D"]: ...
    def unembed(
        self, params: Tree, c: ModelConfig, x: Float[Array, "R D"]
    ) -> Float[Array, "R V"]: ...
