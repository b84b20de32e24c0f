"""Which pages hold which beginnings of sequences, so that requests that begin alike share them.

A full page is named by a chain of hashes: of its own tokens, of all before them and of the
namespace (tenant and salt), so equal keys mean equal keys and values, and nothing is found from
another namespace. Shared pages are full and never written again. Host only.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable

from jaxinfer.page_allocator import NULL_PAGE, PageAllocator

_KEY_BYTES = 16


def namespace_key(*names: str) -> bytes:
    """Where chains of a namespace begin. Different tuples of names differ."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: list[int], page_size: int) -> None:
    """Append the keys of the full pages of `tokens` that `keys` lacks."""
    first, end = len(keys) * page_size, len(tokens) // page_size * page_size
    if first >= end:  # a sequence that starts again knows the keys of its outputs already
        return
    size = 4 * page_size
    data = _packing(end - first)(*tokens[first:end])
    key = keys[-1] if keys else root
    blake2b = hashlib.blake2b
    for start in range(0, len(data), size):
        key = blake2b(key + data[start : start + size], digest_size=_KEY_BYTES).digest()
        keys.append(key)


@functools.lru_cache(maxsize=256)
def _packing(count: int) -> Callable[..., bytes]:
    """Of so many integers into 4 bytes each: most calls are for the tokens of one page."""
    return struct.Struct(f"<{count}i").pack


class PrefixCache:
    """Published pages of one KV group, and the allocator whose pages they are."""

    def __init__(self, num_pages: int):
        self.allocator = PageAllocator(num_pages, self._evicted)
        self._pages: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_pages  # by page

    def match(self, keys: list[bytes]) -> list[int]:
        """The pages of the longest run of `keys` from the first. Nobody holds them for it."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, key: bytes) -> int:
        """The page of a key, or the null page."""
        return self._pages.get(key, NULL_PAGE)

    def publish(self, keys: list[bytes], pages: list[int]) -> None:
        """Let others find these used pages, passing over null ones. Another page of the same key
        stays the one found."""
        known, names, keep = self._pages, self._keys, self.allocator.keep
        for key, page in zip(keys, pages):
            if page != NULL_PAGE and key not in known:
                known[key], names[page] = page, key
                keep(page)

    def withdraw(self, pages: list[int]) -> None:
        """Let nobody find these pages any more; those that are not published are passed over."""
        published = [page for page in pages if self._keys[page] is not None]
        self._evicted(published)
        for page in published:
            self.allocator.discard(page)

    def flush(self) -> int:
        """Withdraw every page; returns how many."""
        pages = list(self._pages.values())
        self.withdraw(pages)
        return len(pages)

    def _evicted(self, pages: list[int]) -> None:
        known, names = self._pages, self._keys
        for page in pages:
            key = names[page]
            assert key is not None, f"page {page} was not published"
            del known[key]
            names[page] = None

    def check_invariants(self) -> None:
        """AssertionError unless index and allocator agree."""
        self.allocator.check_invariants()
        keys = {page: key for page, key in enumerate(self._keys) if key is not None}
        assert {page: key for key, page in self._pages.items()} == keys, "two-way index"
        for page in range(1, self.allocator.num_pages):
            kept = bool(self.allocator._kept[page])
            assert kept == (page in keys), f"page {page} is kept but not published"
