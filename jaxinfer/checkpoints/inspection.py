"""What a checkpoint is, from its headers alone: no tensor is read and no device is touched."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.device_fit import device_fit, not_known
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load import (
    check_dtype,
    open_model_folder,
    open_source,
    resolve_model,
)
from jaxinfer.checkpoints.source import check_inventory
from jaxinfer.checkpoints.storage import (
    Storage,
    chosen_kind,
    chosen_storage,
    on_cpus,
    weight_bytes,
)
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.generation import sampling_defaults
from jaxinfer.kv_pool import kv_groups
from jaxinfer.models import family_of
from jaxinfer.params import ParamSpec, named_leaves
from jaxinfer.quantization.kinds import KINDS, NONE
from jaxinfer.quantization.weight import Layouts, Quantised, own_layouts, quantised_specs
from jaxinfer.sizes import size_text
from jaxinfer.tokenizer import Tokenizer

Tensor = tuple[tuple[int, ...], str, int]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Facts of a checkpoint.

    Attributes:
        parameters: how many numbers the model has; a tied head counts once.
        stored: dtype as stored -> bytes of the tensors stored so.
        dtype: what it is served in unless told otherwise.
        eos_ids / tokenizer_size / chat_template: of the tokenizer.
        generation: defaults of requests, and what is stated but not honoured, in words.
        missing: what it lacks for being served, "" when nothing.
        quantization: the kind that its weights are stored in, or that they would be served in.
        layouts: of the parameters, where they are not the kind's own.
        on_cpus: what a host with room for it would make of them at load, as bytes and in words;
            None: nothing.
        tensors: name -> (shape, as what it is stored, bytes).
    """

    description: str
    config: ModelConfig
    parameters: int
    stored: dict[str, int]
    dtype: str
    tokenizer_size: int
    eos_ids: tuple[int, ...]
    chat_template: bool
    generation: str
    missing: str = ""
    quantization: str = NONE
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layouts: Layouts | None = None
    on_cpus: tuple[int, str] | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored.values())

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the parameters in memory."""
        return weight_bytes(self.config, (self.quantization, self.layouts), dtype)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes one token takes in the KV pool: a key and a value of every layer and KV head, or
        the latent of every layer."""
        return sum(group.page_bytes for group in kv_groups(self.config, 1, 1, dtype))

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        fields["tensors"] = {
            name: {"shape": shape, "stored": stored, "bytes": size}
            for name, (shape, stored, size) in self.tensors.items()
        }
        fields["layouts"] = self.layouts and {n: at.to_json() for n, at in self.layouts.items()}
        if self.on_cpus is not None:
            fields["on_cpus"] = dict(zip(("weight_bytes", "made"), self.on_cpus))
        return fields | {
            "kv_bytes_per_token": self.kv_bytes_per_token(self.dtype),
            "weight_bytes": self.weight_bytes(self.dtype),
        }


def inspect_checkpoint(
    path: str | Path,
    config_file: str | Path | None = None,
    quantization: str | None = None,
) -> CheckpointInfo:
    """The facts of any checkpoint `load_model` takes; `config_file` as in `convert`, and
    `quantization` the kind that it would be served in (None: as it is stored).

    Raises CheckpointError when headers show that it could not be loaded, but for a tokenizer that
    is missing: the rest is of interest without.
    """
    path = resolve_model(path)
    if orbax_io.is_orbax_folder(path):
        if config_file is not None:
            raise CheckpointError(f"{path} has a config of its own; leave out {config_file}")
        manifest, tokenizer = open_model_folder(path)
        orbax_io.check(path, manifest)
        tensors: dict[str, Tensor] = {
            name: (shape, kind, math.prod(shape) * jnp.dtype(kind).itemsize)
            for name, (shape, kind) in manifest.tensors.items()
        }
        description = f"Orbax checkpoint {path}, from {manifest.source}"
        info = _info(description, manifest.config, tensors, manifest.dtype, tokenizer)
        kind, layouts = chosen_kind(quantization, manifest.quantization, "cpu"), manifest.layouts
        if layouts is None and NONE not in (kind, manifest.quantization):
            specs = family_of(manifest.config.family).param_specs(manifest.config)
            layouts = own_layouts(specs, manifest.quantization)
        return _stored_as(info, quantization, (kind, None if kind == NONE else layouts))
    source = open_source(path, config_file)
    check_inventory(source)
    tensors = {
        name: (shape, *source.tensors.storage(name))
        for name, shape in source.tensors.shapes.items()
    }
    dtype = check_dtype(source.dtype)
    info = _info(source.description, source.config, tensors, dtype, source.tokenizer)
    info = dataclasses.replace(info, missing=source.no_tokenizer)
    return _stored_as(info, quantization, chosen_storage(source, quantization, "cpu"))


def _stored_as(info: CheckpointInfo, asked: str | None, stored: Storage) -> CheckpointInfo:
    """The facts with what weights are kept as, and what CPUs would make of them."""
    info = dataclasses.replace(info, quantization=stored[0], layouts=stored[1])
    chosen = on_cpus(info.config, asked, stored, info.dtype)
    if chosen == stored:
        return info
    what = f"numbers in {info.dtype}" if chosen[0] == NONE else chosen[0]
    size = weight_bytes(info.config, chosen, info.dtype)
    return dataclasses.replace(info, on_cpus=(size, what))


def _info(
    description: str,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    dtype: str,
    tokenizer: Tokenizer | None,
) -> CheckpointInfo:
    stored: dict[str, int] = {}
    for _, kind, size in tensors.values():
        stored[kind] = stored.get(kind, 0) + size
    specs = family_of(config.family).param_specs(config)
    return CheckpointInfo(
        description=description,
        config=config,
        parameters=sum(math.prod(spec.shape) for _, spec in named_leaves(specs)),
        stored=stored,
        dtype=dtype,
        tokenizer_size=tokenizer.vocab_size if tokenizer else 0,
        eos_ids=tokenizer.eos_ids if tokenizer else (),
        chat_template=tokenizer is not None and tokenizer.has_chat_template,
        generation=_generation(tokenizer) if tokenizer else "none",
        tensors=tensors,
    )


def _generation(tokenizer: Tokenizer) -> str:
    try:
        defaults = sampling_defaults(tokenizer.generation)
    except ValueError as error:
        return f"unusable: {error}"
    ignored = ", ".join(defaults.not_honoured)
    return defaults.describe() + (f"; not honoured: {ignored}" if ignored else "")


def describe(
    info: CheckpointInfo, device_bytes: int | None = None, kv_dtype: str | None = None
) -> Table:
    """A table of the facts with KV pages of a dtype (None: of the model's), and of what fits on a
    device with so much memory."""
    c = info.config
    table = Table(title=info.description, show_header=False, title_justify="left")
    heads = f"{c.num_heads} query, {c.num_kv_heads} KV, of {c.head_dim}"
    if m := c.mla:
        latent = f"one latent of {m.kv_rank} + {m.rope_dim}"
        heads = f"{c.num_heads} query, of {m.nope_dim} + {m.rope_dim}, over {latent}"
    stored = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(info.stored.items()))
    rows = [
        ("family", c.family),
        ("parameters", f"{info.parameters:,}"),
        ("layers", f"{c.num_layers} of width {c.hidden_size}, MLP {c.intermediate_size}"),
        *_experts(c),
        ("heads", heads),
        ("head of the vocabulary", "tied to the embedding" if c.tie_embeddings else "its own"),
        ("stored", f"{size_text(info.stored_bytes)}: {stored}"),
        ("served in", f"{info.dtype}: {size_text(info.weight_bytes(info.dtype))} of weights"),
        *_quantised(info),
        *_on_cpus(info),
        ("KV per token", _per_token(info, kv_dtype)),
        ("context length", f"{c.max_position:,} tokens"),
        *_attention(c),
        ("vocabulary", f"{c.vocab_size:,} embeddings, {info.tokenizer_size:,} tokens"),
        ("EOS ids", ", ".join(map(str, info.eos_ids)) or "none"),
        ("chat template", "yes" if info.chat_template else "no"),
        ("sampling defaults", info.generation),
    ]
    if info.missing:
        rows.append(("missing", info.missing))
    for row in rows:
        table.add_row(*row)
    if device_bytes is not None:
        ways: list[tuple[str, str, str | None]]
        ways = [(dtype, NONE, None) for dtype in (info.dtype, "bfloat16")]
        for dtype, kind, pages in dict.fromkeys([*ways, (info.dtype, info.quantization, kv_dtype)]):
            fit = device_fit(c, dtype, device_bytes, kind, info.layouts, pages)
            table.add_row(fit.title, "\n".join(fit.lines()))
        table.add_row("", not_known())
    return table


def _per_token(info: CheckpointInfo, kv_dtype: str | None) -> str:
    plain = size_text(info.kv_bytes_per_token(info.dtype))
    if kv_dtype in (None, info.dtype):
        return plain
    assert kv_dtype is not None
    return f"{size_text(info.kv_bytes_per_token(kv_dtype))} as {kv_dtype}, not {plain}"


def tensor_table(info: CheckpointInfo) -> Table:
    """Every tensor: its shape, as what it is stored, and its bytes."""
    table = Table("tensor", "shape", "stored as", "bytes", title=info.description)
    for name, (shape, stored, size) in info.tensors.items():
        table.add_row(name, " x ".join(map(str, shape)), stored, f"{size:,}")
    return table


def _quantised(info: CheckpointInfo) -> Iterator[tuple[str, str]]:
    """Which parameters are rounded, and which stay as they are."""
    if info.quantization == NONE:
        return
    specs = family_of(info.config.family).param_specs(info.config)
    stored = quantised_specs(specs, info.quantization, info.dtype, info.layouts)
    ways: dict[str, Counter[str]] = {}
    leaves = jax.tree.leaves(stored, is_leaf=lambda leaf: isinstance(leaf, (Quantised, ParamSpec)))
    for (name, _), leaf in zip(named_leaves(specs), leaves, strict=True):
        way = leaf.layout.describe() if isinstance(leaf, Quantised) else ""
        ways.setdefault(way, Counter())[name.rpartition(".")[2]] += 1
    kept = ways.pop("", Counter())
    yield "quantization", f"{info.quantization}: {KINDS[info.quantization].what}"
    for way, names in ways.items():
        yield "", f"{names.total()} parameters, {way}: {_counted(names)}"
    yield "", f"{kept.total()} as they are: {_counted(kept)}"


def _on_cpus(info: CheckpointInfo) -> Iterator[tuple[str, str]]:
    if info.on_cpus is not None:
        size, what = info.on_cpus
        text = f"{what} from loading on, {size_text(size)} of weights, if memory holds them"
        yield "on CPUs", f"{text}; --quantization {info.quantization} keeps them as stored"


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in names.items())


def _attention(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What layers see, and how positions enter."""
    kinds = [config.kind(i) for i in range(config.num_layers)]
    windows = Counter(kind.window for kind in kinds if kind.window is not None)
    for window, layers in sorted(windows.items()):
        yield "window", f"{window:,} tokens, in {layers} of {config.num_layers} layers"
    without = sum(kind.rope == "none" for kind in kinds)
    if config.learned_positions:
        yield "positions", f"learned, {config.max_position:,} of them"
    if without < config.num_layers:
        yield "RoPE", _rope(config.rope)
    if config.local_rope is not None:
        yield "RoPE of windows", _rope(config.local_rope)
    if 0 < without < config.num_layers:
        yield "without RoPE", f"{without} of {config.num_layers} layers"


def _rope(rope: RopeConfig) -> str:
    return f"theta {rope.theta:g}, scaling {rope.scaling}"


def _experts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    moe = config.moe
    if moe is None:
        return
    layers = sum(config.kind(i).moe for i in range(config.num_layers))
    shared = f", beside one of MLP {moe.shared_size}" if moe.shared_size else ""
    where = "" if layers == config.num_layers else f", in {layers} of {config.num_layers} layers"
    text = f"{moe.top_k} of {moe.num_experts} a token, MLP {moe.intermediate_size}{shared}{where}"
    yield "experts", text
