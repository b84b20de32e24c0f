"""Which pages of a KV group are in use. Host only; page 0 is the null page and never handed out.

A page is *free*, *used* while sequences hold it (*shared* if several do), or *cached*: nobody holds
it, but what it contains is worth keeping. Cached pages are evicted, least recently used first, only
when no page is free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NULL_PAGE = 0
FREE, USED, CACHED, SHARED = 0, 1, 2, 3


def present(pages: list[int]) -> list[int]:
    """Without the places of pages that were given back."""
    return [page for page in pages if page != NULL_PAGE] if NULL_PAGE in pages else pages


class OutOfPagesError(RuntimeError):
    """Fewer pages are available than were asked for; nothing was allocated."""


class PageAllocator:
    """Hands out pages 1 … num_pages - 1 of one KV group. Last freed, first reused.

    `on_evict` is told of the cached pages that are given to someone else.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[list[int]], None] = lambda pages: None):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}: a pool needs the null page and one more")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._holders = [0] * num_pages
        self._kept = bytearray(num_pages)  # 1: to be cached once nobody holds it
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each, or OutOfPagesError and nothing changed."""
        if count > self.num_available:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_available} available")
        if count > len(self._free):
            self._evict(count - len(self._free))
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def _evict(self, count: int) -> None:
        """Free the cached pages that were used longest ago."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._kept[page] = 0
        self._on_evict(pages)
        self._free += pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for used or cached pages. Raises ValueError for a free one."""
        for page in pages:
            if self._holders[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free: it holds nothing to share")
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less for each. Raises ValueError, changing nothing, for an unheld page.

        Of pages that nobody holds then, the last in the list is evicted first: a sequence's end
        is of less use to others than its beginning.
        """
        holders, kept, idle, free = self._holders, self._kept, self._idle, self._free
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is released twice in {pages}")
        for page in pages:
            if not (NULL_PAGE < page < self.num_pages and holders[page]):
                raise ValueError(f"page {page} is not in use")
        for page in reversed(pages):
            left = holders[page] = holders[page] - 1
            if left:
                continue
            if kept[page]:
                idle[page] = None
            else:
                free.append(page)

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages are cached, not held by anyone."""
        return [self._holders[page] for page in pages].count(0)

    def keep(self, page: int) -> None:
        """Cache this used page once nobody holds it."""
        self._kept[page] = 1

    def discard(self, page: int) -> None:
        """Do not cache this page; if it is cached now, it is free."""
        self._kept[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def states(self) -> bytes:
        """One byte a page but the null page: FREE, USED, SHARED or CACHED."""
        states = bytearray(SHARED if holders > 1 else USED for holders in self._holders)
        for page in self._free.copy():
            states[page] = FREE
        for page in self._idle.copy():
            states[page] = CACHED
        return bytes(states[NULL_PAGE + 1 :])

    def holders(self, page: int) -> int:
        return self._holders[page]

    def check_invariants(self) -> None:
        """AssertionError unless every page is exactly one of null, free, used and cached."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert NULL_PAGE not in free | idle, "the null page is free"
        assert not self._holders[NULL_PAGE], "the null page is in use"
        for page in range(1, self.num_pages):
            states = (page in free) + (page in idle) + (self._holders[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
            assert self._kept[page] or page not in idle, f"page {page} is cached for nothing"
            assert not (self._kept[page] and page in free), f"page {page} is kept but free"
