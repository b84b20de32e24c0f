"""Gives pages to sequences and takes them back, in every KV group. Host only.

Pages come from the prefix cache where it has them, else from the allocator. They are released only
once the last step that may write them was read. A preempted sequence's pages may go to host memory
meanwhile.
"""

from __future__ import annotations

import math

from jaxinfer.page_allocator import PageAllocator
from jaxinfer.prefix_cache import PrefixCache, extend_keys
from jaxinfer.sequence import Sequence

PageMove = tuple[int, int, int]  # KV group, page on the device, page in host memory


class SequencePages:
    """`num_pages` and `host_pages` are by KV group, null pages included in the former only."""

    def __init__(
        self, num_pages: tuple[int, ...], page_size: int, host_pages: tuple[int, ...] = ()
    ):
        self.page_size = page_size
        self.caches = [PrefixCache(n) for n in num_pages]
        self.host_pages = host_pages
        self._free_host = [list(range(n - 1, -1, -1)) for n in host_pages]
        self._vacated: list[tuple[int, list[int]]] = []  # host pages to be read by the next step
        self._releases: list[tuple[int, list[list[int]]]] = []  # last step, pages by group
        self.retired = -1  # the last step that was read

    @property
    def allocators(self) -> list[PageAllocator]:
        return [cache.allocator for cache in self.caches]

    @property
    def releases_pending(self) -> bool:
        """Whether pages come back without anything being preempted."""
        return bool(self._releases)

    def count(self) -> tuple[int, int, int]:
        """(free, cached, used) pages of all groups."""
        free = sum(cache.allocator.num_free for cache in self.caches)
        cached = sum(cache.allocator.num_cached for cache in self.caches)
        total = sum(cache.allocator.num_pages - 1 for cache in self.caches)
        return free, cached, total - free - cached

    # -- admission ---------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> list[list[int]]:
        """By group, the cached pages a sequence could begin with; one token at least is left."""
        if sequence.root is None:
            return [[] for _ in self.caches]
        extend_keys(sequence.keys, sequence.root, sequence.tokens, self.page_size)
        keys = sequence.keys[: (len(sequence.tokens) - 1) // self.page_size]
        found = [cache.match(keys) for cache in self.caches]
        usable = min(map(len, found))
        return [pages[:usable] for pages in found]

    def lacking(self, needed: int, found: list[list[int]], reserved: float) -> int:
        """Pages short in the tightest group for `needed` a group, `found` among them.

        `reserved` is the fraction of each group that is to stay available. At most 0: it fits.
        """
        short = []
        for allocator, pages in zip(self.allocators, found):
            left = allocator.num_available - allocator.num_idle(pages) - (needed - len(pages))
            short.append(math.ceil(reserved * (allocator.num_pages - 1)) - left)
        return max(short)

    def give(self, sequence: Sequence, needed: int, found: list[list[int]]) -> None:
        """Let a sequence hold `needed` pages a group, of which `found` are cached ones."""
        sequence.pages = []
        for cache, pages in zip(self.caches, found):
            cache.allocator.hold(pages)
            sequence.pages.append(pages + cache.allocator.allocate(needed - len(pages)))
        sequence.num_published = len(found[0])

    def grow(self, sequence: Sequence) -> None:
        """One page more in each group."""
        for pages, allocator in zip(sequence.pages, self.allocators):
            pages += allocator.allocate(1)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the full pages of the first `tokens` tokens, which steps have computed
        or are about to."""
        count = tokens // self.page_size
        if sequence.root is None or count <= sequence.num_published:
            return
        extend_keys(sequence.keys, sequence.root, sequence.tokens, self.page_size)
        for cache, pages in zip(self.caches, sequence.pages):
            for index in range(sequence.num_published, count):
                cache.publish(sequence.keys[index], pages[index])
        sequence.num_published = count

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the pages of a sequence that failed."""
        for cache, pages in zip(self.caches, sequence.pages):
            cache.withdraw(pages)

    # -- pages come back ---------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages back, now or once the last step that may write them was read."""
        if sequence.last_step <= self.retired:
            self._give_back(sequence.pages)
        else:
            self._releases.append((sequence.last_step, sequence.pages))
        sequence.pages = []

    def retire(self, step: int) -> None:
        """Step number `step` was read."""
        self.retired = step
        for last_step, pages in self._releases:
            if last_step <= step:
                self._give_back(pages)
        self._releases = [release for release in self._releases if release[0] > step]

    def _give_back(self, pages: list[list[int]]) -> None:
        for cache, group in zip(self.caches, pages):
            cache.allocator.release(group)

    def releasable(self, sequence: Sequence) -> int:
        """Pages that would be available without this sequence, in the group with the fewest."""
        return min(
            sum(allocator.holders(page) == 1 for page in pages)
            for allocator, pages in zip(self.allocators, sequence.pages)
        )

    # -- host memory -------------------------------------------------------------------------------

    def offload(self, sequence: Sequence) -> list[PageMove]:
        """Moves that keep the computed pages of a sequence in host memory; none if it is full."""
        count = math.ceil(sequence.num_computed_tokens / self.page_size)
        if not self._free_host or any(len(free) < count for free in self._free_host):
            return []
        moves = []
        for group, (pages, free) in enumerate(zip(sequence.pages, self._free_host)):
            hosts = [free.pop() for _ in range(count)]
            sequence.host_pages.append(hosts)
            moves += [(group, page, host) for page, host in zip(pages, hosts)]
        return moves

    def restore(self, sequence: Sequence) -> list[PageMove]:
        """Moves that bring them back into the sequence's new pages."""
        moves = [
            (group, page, host)
            for group, (pages, hosts) in enumerate(zip(sequence.pages, sequence.host_pages))
            for page, host in zip(pages, hosts)
        ]
        # They are read by the step being planned, and may be written again from the next one on.
        self._vacated += enumerate(sequence.host_pages)
        sequence.host_pages = []
        return moves

    def step_planned(self) -> None:
        """The step that reads restored pages goes out before any later one writes them."""
        for group, hosts in self._vacated:
            self._free_host[group] += hosts
        self._vacated = []

    def forget_host(self, sequence: Sequence) -> None:
        """A sequence ended while its pages were in host memory."""
        for free, hosts in zip(self._free_host, sequence.host_pages):
            free += hosts
        sequence.host_pages = []

    def check_invariants(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """AssertionError unless pages, holders and cache account for each other exactly."""
        for group, cache in enumerate(self.caches):
            cache.check_invariants()
            holders = [0] * cache.allocator.num_pages
            groups = [s.pages[group] for s in running] + [r[1][group] for r in self._releases]
            for page in (page for pages in groups for page in pages):
                holders[page] += 1
            held = [cache.allocator.holders(page) for page in range(len(holders))]
            assert holders == held, "pages leaked or shared by mistake"
            for sequence in running:  # a page that is being written is nobody else's
                own = sequence.pages[group][sequence.num_computed_tokens // self.page_size :]
                assert all(holders[page] == 1 for page in own), "a shared page may be written"
        for group, free in enumerate(self._free_host):
            used = [h for s in waiting if s.host_pages for h in s.host_pages[group]]
            used += [h for g, hosts in self._vacated if g == group for h in hosts]
            assert sorted(free + used) == list(range(self.host_pages[group])), "host pages"
