"""The work of a whole step, kernel by kernel, and its floor on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models import family_of
from jaxinfer.page_dtypes import page_dtype
from jaxinfer.params import ParamSpec
from jaxinfer.quantization.kinds import Kind
from jaxinfer.quantization.weight import activations_for, own_layout
from jaxinfer.roofline import kernels
from jaxinfer.roofline.devices import Device
from jaxinfer.roofline.kernels import AttentionShape, Work
from jaxinfer.roofline.storage import Storage, kind_called, stored_so
from jaxinfer.sharding import MESH_AXES, sharding_of

_ATTENTION = ("qkv", "o", "q", "q_a", "kv_a")
_HEADS = ("k_b", "v_b")  # latents' matrices, one a head
_PARTS = {"router": "experts", "shared_gate": "experts"}


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served: types, storage of weights, and devices that share it.

    Raises ValueError for names that are not known.
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # by a name of `page_dtypes`; None: as dtype
    quantization: str | None = None
    gpus: int = 1
    page_size: int = 64

    def __post_init__(self) -> None:
        _ = self.pages, self.kind
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; it must be at least 1")

    @property
    def pages(self) -> str:
        return page_dtype(self.kv_dtype) or self.dtype

    @property
    def kind(self) -> Kind | None:
        return kind_called(self.quantization)

    def storage_of(self, spec: ParamSpec) -> Storage | None:
        """How a parameter is stored; None: as plain numbers."""
        layout = own_layout(spec, self.kind) if self.kind else None
        if self.kind is None or layout is None:
            return None
        return stored_so(layout, activations_for(layout, self.kind))

    def shard(self, spec: ParamSpec, name: str) -> tuple[int, ...]:
        """The shape of one device's part. Raises ShardingError where an axis does not divide."""
        sizes = tuple(self.gpus if axis == "model" else 1 for axis in MESH_AXES)
        mesh = AbstractMesh(sizes, MESH_AXES)
        return sharding_of(spec, mesh, name=name).shard_shape(spec.shape)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step works on: `batch` rows that decode with `context` cached tokens each, and a
    `chunk` of a prompt, the last one of a prompt as long as the context."""

    batch: int
    context: int
    chunk: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 0), ("context", 1), ("chunk", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.batch and not self.chunk:
            raise ValueError("batch and chunk are 0; a step has rows or a chunk")
        if self.chunk > self.context:
            raise ValueError(f"chunk is {self.chunk}; a prompt of {self.context} has no such chunk")

    @property
    def tokens(self) -> int:
        return self.batch + self.chunk

    @property
    def sampled(self) -> int:
        """Rows that yield a token: the chunk's prompt ends."""
        return self.batch + (1 if self.chunk else 0)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return [(self.context - self.chunk, self.chunk)] if self.chunk else []


def step_work(model: ModelConfig, load: StepLoad, serving: Serving) -> list[Work]:
    """Every kernel of a step on one device, in order.

    Raises ShardingError when the model does not divide over the devices.
    """
    size = jnp.dtype(serving.dtype).itemsize
    stream = load.tokens * model.hidden_size
    specs = family_of(model.family).param_specs(model)
    work = [kernels.elementwise("elementwise", stream, stream, serving.dtype)]
    parallel = serving.gpus > 1
    if parallel:
        work.append(kernels.all_reduce(stream * size, serving.gpus))
    for i, layer in enumerate(specs["layers"]):
        work += _layer_work(model, model.kind(i), layer, load, serving)
        if parallel:
            work += [kernels.all_reduce(stream * size, serving.gpus)] * (1 if model.parallel else 2)
    name = "embed" if model.tie_embeddings else "head"
    vocabulary, width = serving.shard(specs[name], name)
    work.append(
        kernels.matmul(
            *("head", load.sampled, vocabulary, width, serving.dtype),
            serving.storage_of(specs[name]),
            out_dtype="float32",
        )
    )
    if parallel:
        logits = load.sampled * model.vocab_size * kernels.LOGIT
        work.append(kernels.all_gather(logits, serving.gpus))
    return [*work, kernels.sampler(load.sampled, model.vocab_size)]


def attention_shape(model: ModelConfig, kind: LayerKind, serving: Serving) -> AttentionShape:
    """Attention of a layer of that kind on one device: heads are divided, a latent is not."""
    latent = model.mla is not None
    heads = model.num_heads // model.num_kv_heads // (serving.gpus if latent else 1)
    return AttentionShape(
        kv_heads=model.num_kv_heads // (1 if latent else serving.gpus),
        group=heads,
        head_dim=model.head_dim,
        value_dim=model.value_dim or model.head_dim,
        page_dtype=serving.pages,
        dtype=serving.dtype,
        latent=latent,
        window=kind.window,
        page_size=serving.page_size,
    )


def _layer_work(
    model: ModelConfig,
    kind: LayerKind,
    layer: dict[str, ParamSpec],
    load: StepLoad,
    serving: Serving,
) -> Iterator[Work]:
    tokens, dtype = load.tokens, serving.dtype
    shape = attention_shape(model, kind, serving)
    # Each half of a layer: its result and the residual are read, their sum and its norm written.
    stream = 4 * tokens * model.hidden_size
    yield kernels.elementwise("elementwise", stream, stream, dtype)
    for name, spec in layer.items():
        if len(spec.shape) > 1 and not name.endswith(("_bias", "_norm", "sinks")):
            yield from _product(model, name, spec, tokens, serving)
    heads = shape.kv_heads * shape.group * shape.head_dim + shape.kv_heads * shape.head_dim
    if kind.rope != "none" or model.qk_norm != "none":
        yield kernels.elementwise("elementwise", tokens * heads, tokens * heads, dtype)
    yield kernels.kv_write(shape, tokens)
    if load.batch:
        yield kernels.decode_attention(shape, [load.context] * load.batch)
    if load.chunk:
        yield kernels.prefill_attention(shape, load.pieces)


def matrix_of(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Outputs and inputs of a weight: `o` takes all heads, every other its last dimension."""
    outputs = shape[0] if name == "o" else math.prod(shape[:-1])
    return outputs, math.prod(shape) // outputs


def _product(
    model: ModelConfig, name: str, spec: ParamSpec, tokens: int, serving: Serving
) -> Iterator[Work]:
    """The product with one weight of a layer, and the activation that follows it in an MLP."""
    dtype, storage, moe = serving.dtype, serving.storage_of(spec), model.moe
    shape = serving.shard(spec, name)
    if name.startswith("experts_"):
        assert moe is not None
        inputs, outputs = shape[-1], math.prod(shape[1:-1])
        yield kernels.grouped_matmul(
            "experts", tokens, moe.num_experts, moe.top_k, outputs, inputs, dtype, storage
        )
        rows = tokens * moe.top_k
    elif name in _HEADS:  # a matrix a head: its inputs are that head's alone
        heads, outputs, inputs = shape
        one = kernels.matmul("projections", tokens, outputs, inputs, dtype)
        yield Work(one.part, heads * one.bytes, heads * one.flops, one.unit)
        return
    else:
        outputs, inputs = matrix_of(name, shape)
        part = _PARTS.get(name, "projections" if name in _ATTENTION else "MLP")
        yield kernels.matmul(part, tokens, outputs, inputs, dtype, storage)
        rows = tokens
    part = "experts" if name.startswith("experts_") else "MLP"
    if name.endswith("gate_up"):
        yield kernels.elementwise(part, rows * outputs, rows * outputs // 2, dtype)
    elif name == "up":
        yield kernels.elementwise(part, rows * outputs, rows * outputs, dtype)


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of a step, in microseconds, and of its parts.

    Attributes:
        parts: part -> (microseconds, what limits the most of it).
        bytes / flops / link_bytes: of all kernels, on one device.
    """

    load: StepLoad
    us: float
    parts: dict[str, tuple[float, str]]
    bytes: float
    flops: float
    link_bytes: float

    @property
    def bound(self) -> str:
        """What limits the most of the step."""
        return _largest((bound, us) for us, bound in self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, all rows together."""
        return self.load.sampled / self.us * 1e6


def step_floor(model: ModelConfig, load: StepLoad, serving: Serving, device: Device) -> StepFloor:
    """The floor of a step: the sum of its kernels'.

    Raises ShardingError when the model does not divide over the devices, ValueError when the
    device has no unit for what is multiplied.
    """
    work = step_work(model, load, serving)
    times: dict[str, list[tuple[str, float]]] = {}
    for kernel in work:
        us, bound = kernel.floor(device)
        times.setdefault(kernel.part, []).append((bound, us))
    parts = {part: (sum(us for _, us in found), _largest(found)) for part, found in times.items()}
    return StepFloor(
        load,
        sum(us for us, _ in parts.values()),
        parts,
        sum(kernel.bytes for kernel in work),
        sum(kernel.flops for kernel in work),
        sum(kernel.link_bytes for kernel in work),
    )


def _largest(amounts: Iterator[tuple[str, float]] | list[tuple[str, float]]) -> str:
    """The name that the most belongs to."""
    sums: dict[str, float] = {}
    for name, amount in amounts:
        sums[name] = sums.get(name, 0.0) + amount
    return max(sums, key=lambda name: sums[name])
