"""How other JAX projects name and lay out their parameters, in terms of Hugging Face's tensors.

Known are the trees of MaxText (layers scanned, i.e. stacked along an axis, or each its own), of
google-deepmind/gemma (Flax linen), of Tunix (NNX) and of transformers' Flax models. Kernels have
inputs first there and outputs first here; what else differs is said where it is undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig

Shape = tuple[int, ...]
Finish = Callable[[np.ndarray], np.ndarray]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Hugging Face tensor may lie in another project's tree.

    Attributes:
        leaf: path of the parameter.
        shape: of the parameter as one layer has it.
        finish: what makes a Hugging Face tensor of it, or of its `part`.
        part: which one along its first axis; None: it is not one of several.
        layer: (index, count) if layers may be stacked.
        padded: it may have more rows, which mean nothing.
    """

    leaf: str
    shape: Shape
    finish: Finish
    part: int | None = None
    layer: tuple[int, int] | None = None
    padded: bool = False

    def index(self, found: Shape) -> tuple[Any, ...] | None:
        """What to read of a parameter of that shape; None if it is not what it should be."""
        part: tuple[Any, ...] = () if self.part is None else (self.part,)
        if self.layer is not None:
            index, count = self.layer
            for axis in (1, 0):  # MaxText stacks along the second unless told otherwise
                if found == (*self.shape[:axis], count, *self.shape[axis:]):
                    if self.part is None or axis == 0:
                        return (*(slice(None),) * axis, index, *part)
                    return (self.part, index)
            return None
        if self.padded and found[1:] == self.shape[1:] and found[0] > self.shape[0]:
            return (slice(0, self.shape[0]),)
        return part if found == self.shape else None


@dataclass(frozen=True, slots=True)
class Layout:
    """The trees of one project.

    Attributes:
        families: those whose mapping is known.
        marks: leaves, as regular expressions, that together tell it from others.
        places: where a tensor may lie, best guess first.
        ignored: leaves that a text model does not need.
    """

    title: str
    families: frozenset[str]
    marks: tuple[str, ...]
    places: Callable[[ModelConfig, str], Iterator[Place]]
    ignored: str = r"(?!)"

    def matches(self, leaves: list[str]) -> bool:
        return all(any(re.fullmatch(mark, leaf) for leaf in leaves) for mark in self.marks)


def _kernel(array: np.ndarray) -> np.ndarray:
    """[inputs, outputs...] → [outputs, inputs]."""
    return array.reshape(array.shape[0], -1).T


def _output_kernel(array: np.ndarray) -> np.ndarray:
    """[heads, head size, outputs] → [outputs, inputs]."""
    return array.reshape(-1, array.shape[-1]).T


def _by_head(array: np.ndarray) -> np.ndarray:
    """[heads, inputs, head size] → [outputs, inputs]."""
    return array.transpose(0, 2, 1).reshape(-1, array.shape[1])


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


def _split(name: str) -> tuple[int | None, int | None, str]:
    """Layer, expert and the rest of a Hugging Face name."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None, None, name
    expert = _EXPERT.fullmatch(found[2])
    if expert is None:
        return int(found[1]), None, found[2]
    return int(found[1]), int(expert[2]), f"{expert[1]}.experts.{expert[3]}"


def _head_shapes(c: ModelConfig) -> dict[str, Shape]:
    return {
        "q": (c.hidden_size, c.num_heads, c.head_dim),
        "k": (c.hidden_size, c.num_kv_heads, c.head_dim),
        "v": (c.hidden_size, c.num_kv_heads, c.head_dim),
        "o": (c.num_heads, c.head_dim, c.hidden_size),
    }


# -- MaxText ------------------------------------------------------------------------------------

_MAXTEXT_LLAMA = {
    "input_layernorm.weight": "pre_self_attention_layer_norm",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm",
    "self_attn.q_norm.weight": "self_attention.query_norm",
    "self_attn.k_norm.weight": "self_attention.key_norm",
}
_MAXTEXT_GEMMA = _MAXTEXT_LLAMA | {
    "input_layernorm.weight": "pre_self_attention_norm",
    "post_attention_layernorm.weight": "post_self_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
}
_MAXTEXT_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
_MAXTEXT_MLP = {
    "gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo",
    "w1": "wi_0", "w3": "wi_1", "w2": "wo",
}  # fmt: skip
_MAXTEXT_EXPERTS = {"mixtral": "MoeBlock_0", "qwen3_moe": "moe_block"}


def _maxtext(c: ModelConfig, name: str) -> Iterator[Place]:
    """Norms of Gemma are stored with 1 added, its embeddings multiplied as the model would, queries
    of all but normed ones by the attention scale; Llama 3.1's pairs of RoPE lie side by side."""
    layer, expert, rest = _split(name)
    if layer is None:
        yield from _maxtext_outside(c, rest)
        return
    inner, shape, finish = _maxtext_inside(c, rest)
    for module in (inner, inner.removesuffix(".kernel")):
        for prefix, stacked in _maxtext_layers(c, layer):
            leaf = f"decoder.{prefix}.{module}"
            if c.family == "gemma2":  # pairs of layers: one with a window, one without
                kind = "local" if layer % 2 == 0 else "global"
                leaf = re.sub(r"(self_attention|mlp|norm)(?=\.)", rf"\1_{kind}", leaf, count=1)
            yield Place(leaf, shape, finish, expert, stacked)


def _maxtext_layers(c: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    index, count = layer, c.num_layers
    if c.family == "gemma2":
        index, count = layer // 2, c.num_layers // 2
    yield f"layers_{index}", None
    yield "layers", (index, count)


def _maxtext_outside(c: ModelConfig, rest: str) -> Iterator[Place]:
    vocab, norm = (c.vocab_size, c.hidden_size), _maxtext_norm(c)
    multiplier = np.float32(c.embedding_multiplier)
    if c.family == "gemma3_text":  # rounded, as the model itself rounds it
        multiplier = np.float32(jnp.bfloat16(multiplier))
    plain = _same if multiplier == 1 else lambda a: a.astype(np.float32) / multiplier
    places = {
        "model.embed_tokens.weight": Place("token_embedder.embedding", vocab, plain, padded=True),
        "model.norm.weight": Place("decoder.decoder_norm.scale", vocab[1:], norm),
        "lm_head.weight": Place("decoder.logits_dense.kernel", vocab[::-1], _kernel),
    }
    yield places[rest]


def _maxtext_inside(c: ModelConfig, rest: str) -> tuple[str, Shape, Finish]:
    """Path within a layer, shape and what to do of one of its tensors."""
    norms = _MAXTEXT_GEMMA if c.family.startswith("gemma") else _MAXTEXT_LLAMA
    width, module, projection = c.hidden_size, *rest.split(".")[:1], rest.split(".")[-2]
    if rest in norms:
        size = c.head_dim if module == "self_attn" else width
        return f"{norms[rest]}.scale", (size,), _maxtext_norm(c)
    if module == "self_attn":
        which = projection[0]
        finish = _output_kernel if which == "o" else _maxtext_rotated(c, which)
        inner = f"self_attention.{_MAXTEXT_ATTENTION[which]}.kernel"
        return inner, _head_shapes(c)[which], finish
    size = c.intermediate_size
    if c.moe:
        block, size = _MAXTEXT_EXPERTS[c.family], c.moe.intermediate_size
        if projection == "gate":
            return f"{block}.gate.kernel", (width, c.moe.num_experts), _kernel
        shape = (width, size) if projection not in ("down_proj", "w2") else (size, width)
        inner = f"{block}.{_MAXTEXT_MLP[projection]}.kernel"
        return inner, (c.moe.num_experts, *shape), _kernel
    shape = (size, width) if projection == "down_proj" else (width, size)
    return f"mlp.{_MAXTEXT_MLP[projection]}.kernel", shape, _kernel


def _maxtext_norm(c: ModelConfig) -> Finish:
    offset = np.float32(c.norm_offset)
    return (lambda a: a.astype(np.float32) - offset) if offset else _same


def _maxtext_rotated(c: ModelConfig, which: str) -> Finish:
    def finish(array: np.ndarray) -> np.ndarray:
        if c.rope.scaling == "llama3" and which in "qk":
            array = np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        if which == "q" and c.qk_norm == "none":
            array = array.astype(np.float32) / np.float32(c.scale)
        return _kernel(array)

    return finish


# -- google-deepmind/gemma ----------------------------------------------------------------------

_GEMMA_NORMS = {
    "input_layernorm.weight": "pre_attention_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
}


def _gemma(c: ModelConfig, name: str) -> Iterator[Place]:
    """Queries, keys and values by head; gate and up in one, in either order of its axes."""
    layer, _, rest = _split(name)
    width, inner = c.hidden_size, c.intermediate_size
    if layer is None:
        vocab = (c.vocab_size, width)
        if rest == "model.embed_tokens.weight":
            yield Place("embedder.input_embedding", vocab, _same, padded=True)
        elif rest == "model.norm.weight":
            yield Place("final_norm.scale", (width,), _same)
        return
    for prefix in (f"layer_{layer}", f"layers.{layer}"):
        if rest in _GEMMA_NORMS:
            yield Place(f"{prefix}.{_GEMMA_NORMS[rest]}.scale", (width,), _same)
        elif rest.endswith("_norm.weight"):
            norm = {"q_norm": "query_norm", "k_norm": "key_norm"}[rest.split(".")[1]]
            yield Place(f"{prefix}.attn._{norm}.scale", (c.head_dim,), _same)
            yield Place(f"{prefix}.attn.{norm}.scale", (c.head_dim,), _same)
        elif rest.startswith("self_attn."):
            yield from _gemma_attention(c, f"{prefix}.attn", rest.split(".")[1])
        else:
            projection, mlp = rest.split(".")[1], f"{prefix}.mlp"
            down = projection == "down_proj"
            shape = (inner, width) if down else (width, inner)
            yield Place(f"{mlp}.{projection}.kernel", shape, _kernel)
            part = {"gate_proj": 0, "up_proj": 1}.get(projection)
            for end in ("", ".w"):
                if down:
                    yield Place(f"{mlp}.linear{end}", (inner, width), _kernel)
                    continue
                yield Place(f"{mlp}.gating_einsum{end}", (2, inner, width), _same, part)
                yield Place(f"{mlp}.gating_einsum{end}", (2, width, inner), _kernel, part)


def _gemma_attention(c: ModelConfig, attn: str, projection: str) -> Iterator[Place]:
    width, heads, kv, size = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    if projection == "o_proj":
        yield Place(f"{attn}.attn_vec_einsum.w", (heads, size, width), _output_kernel)
        return
    if projection == "q_proj":
        yield Place(f"{attn}.q_einsum.w", (heads, width, size), _by_head)
    else:
        part = {"k_proj": 0, "v_proj": 1}[projection]
        yield Place(f"{attn}.kv_einsum.w", (2, kv, width, size), _by_head, part)
    part = {"q_proj": 0, "k_proj": 1, "v_proj": 2}[projection]
    if heads == kv:
        yield Place(f"{attn}.qkv_einsum.w", (3, heads, width, size), _by_head, part)


# -- Tunix --------------------------------------------------------------------------------------


def _tunix(c: ModelConfig, name: str) -> Iterator[Place]:
    """Heads are an axis of their own; the names are close to Hugging Face's."""
    layer, _, rest = _split(name)
    width, inner = c.hidden_size, c.intermediate_size
    if layer is None:
        vocab = (c.vocab_size, width)
        yield {
            "model.embed_tokens.weight": Place("embedder.input_embedding", vocab, _same),
            "model.norm.weight": Place("final_norm.w", (width,), _same),
            "lm_head.weight": Place("lm_head.w", vocab[::-1], _kernel),
        }[rest]
        return
    prefix, module, projection = f"layers.{layer}", *rest.split(".")[:2]
    if rest.endswith("layernorm.weight"):
        yield Place(f"{prefix}.{module}.w", (width,), _same)
    elif module == "mlp":
        shape = (inner, width) if projection == "down_proj" else (width, inner)
        yield Place(f"{prefix}.mlp.{projection}.kernel", shape, _kernel)
    elif rest.endswith("norm.weight"):
        yield Place(f"{prefix}.attn.{projection}.w", (c.head_dim,), _same)
    elif rest.endswith(".bias"):
        _, heads, size = _head_shapes(c)[projection[0]]
        for found in ((heads, size), (heads * size,)):
            yield Place(f"{prefix}.attn.{projection[0]}_bias", found, _flat)
    else:
        finish = _output_kernel if projection == "o_proj" else _kernel
        yield Place(f"{prefix}.attn.{projection}.w", _head_shapes(c)[projection[0]], finish)


# -- modules named as Hugging Face's -------------------------------------------------------------


def _flax(c: ModelConfig, name: str) -> Iterator[Place]:
    """Plain Linear and Embed modules, as in transformers' Flax models."""
    stem, _, end = name.rpartition(".")
    rows = _head_shapes(c)
    width, inner, projection = c.hidden_size, c.intermediate_size, stem.split(".")[-1]
    if projection == "embed_tokens":
        yield Place(f"{stem}.embedding", (c.vocab_size, width), _same)
    elif projection == "lm_head":
        yield Place(f"{stem}.kernel", (width, c.vocab_size), _kernel)
    elif projection.endswith("norm"):
        size = c.head_dim if projection in ("q_norm", "k_norm") else width
        for leaf in ("weight", "scale"):
            yield Place(f"{stem}.{leaf}", (size,), _same)
    elif end == "bias":
        _, heads, size = rows[projection[0]]
        yield Place(f"{stem}.bias", (heads * size,), _same)
    elif projection in ("gate_proj", "up_proj"):
        yield Place(f"{stem}.kernel", (width, inner), _kernel)
    elif projection == "down_proj":
        yield Place(f"{stem}.kernel", (inner, width), _kernel)
    elif projection == "o_proj":
        yield Place(f"{stem}.kernel", (c.num_heads * c.head_dim, width), _kernel)
    else:
        _, heads, size = rows[projection[0]]
        yield Place(f"{stem}.kernel", (width, heads * size), _kernel)


LAYOUTS = (
    Layout(
        "MaxText",
        frozenset({"llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"}),
        (r"token_embedder\.embedding", r"decoder\.layers.*"),
        _maxtext,
    ),
    Layout(
        "gemma",
        frozenset({"gemma2", "gemma3_text"}),
        (r"embedder\.input_embedding", r"layers?[._]\d+\.attn\..*_einsum\.w"),
        _gemma,
        ignored=r"vision_encoder\..*|SigLiP.*|embedder\.mm_.*",
    ),
    Layout(
        "Tunix",
        frozenset({"llama", "qwen2", "qwen3"}),
        (r"embedder\.input_embedding", r"layers\.\d+\.attn\.q_proj\.w"),
        _tunix,
    ),
    Layout(
        "Flax, named as Hugging Face's",
        frozenset({"llama", "mistral", "qwen2", "qwen3"}),
        (r"model\.embed_tokens\.embedding", r"model\.layers\.\d+\.self_attn\.q_proj\.kernel"),
        _flax,
    ),
)
