"""Frozen configuration: what a model is (`ModelConfig`) and how it is served (`EngineConfig`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.page_dtypes import page_dtype
from jaxinfer.quantization.kinds import check_name
from jaxinfer.request import MAX_PRIORITY

DTYPES = ("float32", "bfloat16", "float16")
# Of a tenant; with far smaller ones a token would be lost in the rounding of the accounts.
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000
MOST_RESERVED = 0.9  # fraction of the pool that admission leaves free, all reasons together

RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope", "divisors"]

# How a token's result is kept independent of its company: not at all; all programs agree to the
# last bit; or it is always the same program that computes it (see `determinism.py`).
Determinism = Literal["off", "invariant", "fixed"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its length scalings.

    Which fields matter depends on `scaling`: `linear` reads `factor`; `llama3` reads `factor`,
    `low_freq_factor`, `high_freq_factor`, `original_max_position`; `yarn` (Peng et al. 2023,
    arXiv:2309.00071) reads `factor`, `beta_fast`, `beta_slow`, `original_max_position`,
    `attention_factor` (None: 0.1 ln(factor) + 1) and `truncate`; `divisors` reads `divisors`, one
    for each frequency (GGUF files carry llama3 scaling in that form); `longrope` reads those and
    `long_divisors`, of which it uses the latter for models served beyond `original_max_position`.
    """

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    def served(self, max_model_len: int) -> RopeConfig:
        """As it is for sequences of at most so many tokens."""
        if self.scaling != "longrope" or max_model_len > self.original_max_position:
            return self
        return dataclasses.replace(self, scaling="divisors", long_divisors=())


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How the layers of one kind attend.

    Attributes:
        window: tokens a query sees, its own included; None: all before it.
        rope: which of the model's rotary tables it uses.
        moe: whether its MLP is the model's mixture of experts.
        query_scale: what its queries are multiplied by, beside the model's scale of scores.
    """

    window: int | None = None
    rope: Literal["global", "local", "none"] = "global"
    moe: bool = False
    query_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts.

    Attributes:
        intermediate_size: of one expert.
        normalised: the weights of a token's experts are made to sum to one.
        shared_size: of the expert that every token goes to besides; 0: there is none.
        shared_gated: a gate weighs the shared expert.
        scoring: how the router's logits become scores. "sigmoid" (DeepSeek-V3, arXiv:2412.19437)
            has a learned correction, which takes part in the choice and not in the weights.
        groups / top_groups: only experts of the best groups are chosen; a group is as good as its
            best expert, with "sigmoid" as its best two.
        weight_scale: what the weights of a token's experts are multiplied by.
        bias: whether the router and the experts' projections have biases.
        swiglu_limit / swiglu_alpha: of `layers.clamped_swiglu`, which replaces the model's
            activation; without a limit (None) it does not.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalised: bool = True
    shared_size: int = 0
    shared_gated: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    weight_scale: float = 1.0
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): `models/mla.py`.

    A token's keys and values are made of one latent of `kv_rank` values and one rotating key of
    `rope_dim` values that all heads share.

    Attributes:
        q_rank: of the queries' own latent; None: there is none.
        nope_dim / rope_dim: parts of a head's query and key that do not rotate, and that do.
        v_dim: of a head's values.
        bias: the projections into latents have biases.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Hashable: it is a static argument of the step.

    What the fields after `rope` do, and which families use them: `models/decoder.py`.
    `rms_norm_eps` is the epsilon of its norms, of whatever kind they are.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    kinds: tuple[LayerKind, ...] = ()  # of each layer; (): all attend to everything
    local_rope: RopeConfig | None = None
    rotary_dim: int | None = None  # leading part of a head that rotates; None: all of it
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "each", "all"] = "none"
    norms: Literal["pre", "post", "both", "shared"] = "pre"
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False  # a logit a head that takes its share of the attention
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None  # then the one KV head is the latent and the rotating key
    norm_type: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    parallel: bool = False
    gated: bool = True
    learned_positions: bool = False
    head_bias: bool = False
    qkv_clip: float | None = None

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer] if self.kinds else LayerKind()

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def value_dim(self) -> int | None:
        """How much of a cached key is the value too; None: values are cached beside keys."""
        return self.mla.kv_rank if self.mla else None

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`. Raises TypeError on unknown or missing fields."""
        fields = dict(data)
        fields["rope"] = _rope_from_json(fields["rope"])
        if fields.get("local_rope") is not None:
            fields["local_rope"] = _rope_from_json(fields["local_rope"])
        if fields.get("moe") is not None:
            fields["moe"] = MoeConfig(**fields["moe"])
        if fields.get("mla") is not None:
            fields["mla"] = MlaConfig(**fields["mla"])
        fields["kinds"] = tuple(LayerKind(**kind) for kind in fields.get("kinds", ()))
        return cls(**fields)


def _rope_from_json(data: dict[str, Any]) -> RopeConfig:
    lists = {name: tuple(data.get(name, ())) for name in ("divisors", "long_divisors")}
    return RopeConfig(**{**data, **lists})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine serves. Everything here is fixed for the life of the engine.

    Attributes:
        max_num_seqs: slots, the sequences that run at once.
        max_model_len: prompt + output tokens of one sequence; None takes the model's own limit.
        max_num_batched_tokens: prompt tokens one step may prefill, the largest chunk bucket.
        page_size: tokens a KV page holds.
        kv_pool_bytes: bytes of each device for the KV pool; None: what is left of its memory (on
            a CPU, whose memory is shared with others, at most 2 GiB).
        memory_utilization: fraction of the device's memory the engine may plan with.
        dtype: weights and activations.
        kv_dtype: the KV pool, by a name of `page_dtypes`; None or auto: as dtype.
        overlap: dispatch a step before the previous one was read.
        tensor_parallel_size: devices one model replica is sharded over.
        max_queued_requests / max_queued_tokens: bounds of the waiting queue.
        prefix_cache: keep full pages of ended sequences for requests that begin alike.
        kv_watermark: fraction of the KV pool that admission leaves free for running sequences.
        kv_offload_bytes: host memory for the pages of preempted sequences; 0: recompute them.
        priority_ageing: seconds after which a waiting request rises to the next more urgent
            priority in the queue.
        tenant_weights: (tenant, share) pairs; who is not named has share 1.
        tpot_target_ms: bound on the time between a running stream's tokens, by which the chunk of
            prompt tokens in a step is chosen; None: as large as max_num_batched_tokens.
        batch_priority: priorities from this on are the batch class.
        interactive_reserve: fraction of slots and pages that the batch class may not take.
        quantization: how weights are stored and multiplied: a kind of `quantization.kinds`, none or
            auto (None: as the checkpoint has them; on CPUs see `checkpoints.storage.on_cpus`).
        deterministic: a request's logprobs have the same bits whatever runs beside it.
        cpu_kernels: on a CPU, use the kernels that are there for it, and not XLA's products.

    Raises ValueError for a value nothing could be served with.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    page_size: int = 64
    kv_pool_bytes: int | None = None
    memory_utilization: float = 0.9
    dtype: str = "float32"
    kv_dtype: str | None = None
    overlap: bool = True
    tensor_parallel_size: int = 1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 22
    prefix_cache: bool = True
    kv_watermark: float = 0.01
    kv_offload_bytes: int = 0
    priority_ageing: float = 30.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    tpot_target_ms: float | None = None
    batch_priority: int = 1
    interactive_reserve: float = 0.0
    deterministic: bool = False
    quantization: str | None = None
    cpu_kernels: bool = True

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "tensor_parallel_size",
            "max_queued_requests",
            "max_queued_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(
                f"memory_utilization is {self.memory_utilization}; it must be above 0, at most 1"
            )
        for name in ("kv_watermark", "interactive_reserve"):
            if not 0 <= getattr(self, name) <= MOST_RESERVED:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from 0 to {MOST_RESERVED}"
                )
        for name in ("priority_ageing", "tpot_target_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.kv_offload_bytes < 0:
            raise ValueError(f"kv_offload_bytes is {self.kv_offload_bytes}; it cannot be negative")
        if not -MAX_PRIORITY <= self.batch_priority <= MAX_PRIORITY + 1:
            raise ValueError(
                f"batch_priority is {self.batch_priority}; it must be from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY + 1}, which is above every priority"
            )
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.tenant_weights):
            raise ValueError(
                f"tenant_weights is {self.tenant_weights!r}; give (tenant, share) pairs, such as "
                '(("a", 2.0),)'
            )
        for tenant, weight in self.tenant_weights:
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                raise ValueError(
                    f"tenant_weights of {tenant!r} is {weight}; it must be from {LEAST_WEIGHT} to "
                    f"{MOST_WEIGHT}"
                )
        check_name(self.quantization)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        object.__setattr__(self, "kv_dtype", page_dtype(self.kv_dtype))  # by its own name

    @property
    def pages(self) -> str:
        """The dtype of the KV pool."""
        return self.kv_dtype or self.dtype
