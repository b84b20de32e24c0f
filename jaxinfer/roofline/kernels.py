"""What each kind of kernel must move and compute, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.roofline.devices import Device
from jaxinfer.roofline.storage import Storage, page_entry_bytes

INT = 4  # bytes of an id, a page number, a length
LOGIT = 4  # bytes of a float32 logit


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel's work on one device.

    Attributes:
        part: what of a step it belongs to, "attention, decode".
        bytes: read from memory and written to it.
        flops: operations, a multiplication and an addition being two.
        unit: the type that is multiplied, which says what units do it.
        link_bytes: sent to other devices.
    """

    part: str
    bytes: float
    flops: float = 0.0
    unit: str = "float32"
    link_bytes: float = 0.0

    def floor(self, device: Device) -> tuple[float, str]:
        """Microseconds that the device needs at least, and what of it is the limit."""
        times = {
            "memory": self.bytes / device.memory_bandwidth,
            "arithmetic": self.flops / device.rate(self.unit) if self.flops else 0.0,
            "links": self.link_bytes / device.link_bandwidth,
        }
        bound = max(times, key=lambda name: times[name])
        return 1e6 * times[bound], bound


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer on one device.

    Attributes:
        kv_heads / group: key/value heads, and query heads of each.
        head_dim / value_dim: dimensions of a key and of a value.
        page_dtype: of the pages; queries and results are in `dtype`.
        latent: keys begin with their values, which have no pages of their own (MLA).
        window: tokens a query sees, its own included; None: all before it.
    """

    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    page_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    latent: bool = False
    window: int | None = None
    page_size: int = 64

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        dims = [self.head_dim] if self.latent else [self.head_dim, self.value_dim]
        return self.kv_heads * sum(page_entry_bytes(self.page_dtype, size) for size in dims)

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's queries and of what comes of them."""
        heads = self.kv_heads * self.group
        return heads * (self.head_dim + self.value_dim) * jnp.dtype(self.dtype).itemsize

    @property
    def key_flops(self) -> int:
        """Operations for one token's queries and one key: its score and its value's share."""
        return 2 * self.kv_heads * self.group * (self.head_dim + self.value_dim)


def decode_attention(shape: AttentionShape, lengths: Iterable[int]) -> Work:
    """One query token a row, over the last `window` of its `lengths` cached tokens."""
    seen = [min(length, shape.window or length) for length in lengths]
    pages = sum(-(-length // shape.page_size) for length in seen)
    moved = sum(seen) * shape.token_bytes + len(seen) * shape.query_bytes + INT * pages
    return Work("attention, decode", moved, sum(seen) * shape.key_flops, shape.dtype)


def prefill_attention(shape: AttentionShape, pieces: Iterable[tuple[int, int]]) -> Work:
    """Pieces of prompts, (first position, tokens) each, causal: every key that any query of a
    piece sees is read once."""
    moved, scores = 0, 0
    for start, tokens in pieces:
        window = shape.window or start + tokens
        first = max(0, start - window + 1)
        read = start + tokens - first
        pages = -(-read // shape.page_size)
        moved += read * shape.token_bytes + tokens * shape.query_bytes + INT * pages
        scores += sum(min(position + 1, window) for position in range(start, start + tokens))
    return Work("attention, prefill", moved, scores * shape.key_flops, shape.dtype)


def kv_write(shape: AttentionShape, tokens: int) -> Work:
    """New keys and values, read as they were computed and stored as pages are."""
    dims = shape.head_dim + (0 if shape.latent else shape.value_dim)
    computed = shape.kv_heads * dims * jnp.dtype(shape.dtype).itemsize
    return Work("KV write", tokens * (computed + shape.token_bytes + 2 * INT))


def matmul(
    part: str,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: str = "bfloat16",
    storage: Storage | None = None,
    out_dtype: str | None = None,
) -> Work:
    """x[rows, inputs] times the transpose of a weight [outputs, inputs]."""
    size = jnp.dtype(dtype).itemsize
    weight = storage.weight_bytes(outputs, inputs) if storage else outputs * inputs * size
    unit = (storage and storage.unit) or dtype
    taken = rows * inputs * (1 if storage and storage.unit else size)
    given = rows * outputs * jnp.dtype(out_dtype or dtype).itemsize
    return Work(part, weight + taken + given, 2.0 * rows * outputs * inputs, unit)


def touched_experts(tokens: int, experts: int, top_k: int) -> float:
    """Experts that tokens are expected to go to, were each as likely as another."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def grouped_matmul(
    part: str,
    tokens: int,
    experts: int,
    top_k: int,
    outputs: int,
    inputs: int,
    dtype: str = "bfloat16",
    storage: Storage | None = None,
) -> Work:
    """`top_k` rows a token, each times the matrix of its expert: of the weights, those of experts
    that some token goes to are read."""
    one = matmul(part, 0, outputs, inputs, dtype, storage).bytes
    all_rows = matmul(part, tokens * top_k, outputs, inputs, dtype, storage)
    moved = all_rows.bytes + (touched_experts(tokens, experts, top_k) - 1) * one
    return Work(part, moved, all_rows.flops, all_rows.unit)


def sampler(rows: int, vocabulary: int) -> Work:
    """One pass over float32 logits: a maximum, and an exponential that is summed."""
    return Work("sampler", rows * (vocabulary * LOGIT + INT), 4.0 * rows * vocabulary)


def elementwise(part: str, reads: float, writes: float, dtype: str = "bfloat16") -> Work:
    """Entries read and written, with an operation or so each."""
    return Work(part, (reads + writes) * jnp.dtype(dtype).itemsize, 4.0 * reads)


def all_reduce(size: float, devices: int) -> Work:
    """Sums of `size` bytes that every device gets: each sends 2 (n-1)/n of them (a ring)."""
    return Work("collectives", 2.0 * size, link_bytes=2 * size * (devices - 1) / devices)


def all_gather(size: float, devices: int) -> Work:
    """`size` bytes that every device gets, having its n-th part: each sends (n-1)/n of them."""
    return Work("collectives", size, link_bytes=size * (devices - 1) / devices)
