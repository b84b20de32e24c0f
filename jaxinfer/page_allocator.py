"""Which pages of a KV group are in use. Host only; page 0 is the null page and never handed out."""

from __future__ import annotations

NULL_PAGE = 0


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than were asked for; nothing was allocated."""


class PageAllocator:
    """Hands out pages 1 … num_pages - 1 of one KV group. Last freed, first reused."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}: a pool needs the null page and one more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._used = bytearray(num_pages)  # 1: handed out

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, or OutOfPagesError and nothing changed."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._used[page] = 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Take pages back. Raises ValueError, changing nothing, for a page that is not in use."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is freed twice in {pages}")
        for page in pages:
            if not (NULL_PAGE < page < self.num_pages and self._used[page]):
                raise ValueError(f"page {page} is not in use")
        for page in pages:
            self._used[page] = 0
        self._free.extend(reversed(pages))

    def check_invariants(self) -> None:
        """AssertionError unless every page is exactly one of null, free and used."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert NULL_PAGE not in free, "the null page is free"
        assert not self._used[NULL_PAGE], "the null page is in use"
        for page in range(1, self.num_pages):
            assert (page in free) != bool(self._used[page]), f"page {page} is both or neither"
