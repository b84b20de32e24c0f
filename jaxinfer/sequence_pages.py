"""Gives pages to sequences and takes them back, in every KV group. Host only.

Pages come from the prefix cache where it has them, else from the allocator. They are released only
once the last step that may use them was read. A preempted sequence's pages may go to host memory
meanwhile.

Layers that see a window need the pages of the last tokens only: what lies before the window is
given back while the sequence runs, and its place in the list is the null page's. What the prefix
cache has of a beginning is of use to them if it has the window's end of it.
"""

from __future__ import annotations

import math
from collections import Counter

from jaxinfer.page_allocator import NULL_PAGE, PageAllocator
from jaxinfer.prefix_cache import PrefixCache, extend_keys
from jaxinfer.sequence import Sequence

NOWHERE = -1  # the place in host memory of a page that was given back before
PageMove = tuple[int, int, int]  # KV group, page on the device, page in host memory
TableEntry = tuple[int, int, int, int]  # of a page table: KV group, slot, index, page


class SequencePages:
    """All tuples are by KV group. `num_pages` includes the null page, `host_pages` has none;
    `windows` are the tokens that a group's layers see, None or (): all. Unless `publishes_outputs`
    nobody finds more of a sequence than its prompt."""

    def __init__(
        self,
        num_pages: tuple[int, ...],
        page_size: int,
        host_pages: tuple[int, ...] = (),
        windows: tuple[int | None, ...] = (),
        publishes_outputs: bool = True,
    ):
        self.page_size = page_size
        self._publishes_outputs = publishes_outputs
        self.windows = windows or (None,) * len(num_pages)
        self.caches = [PrefixCache(n) for n in num_pages]
        self._trims = any(window is not None for window in self.windows)
        self.host_pages = host_pages
        self._free_host = [list(range(n - 1, -1, -1)) for n in host_pages]
        self._vacated: list[tuple[int, list[int]]] = []  # host pages to be read by the next step
        self._releases: list[tuple[int, list[list[int]]]] = []  # last step, pages by group
        self._unnamed: dict[bytes, list[Sequence]] = {}  # see `note_filled`
        self.retired = -1  # the last step that was read

    @property
    def allocators(self) -> list[PageAllocator]:
        return [cache.allocator for cache in self.caches]

    @property
    def available(self) -> int:
        """Pages that every group can give."""
        return min(cache.allocator.num_available for cache in self.caches)

    @property
    def releases_pending(self) -> bool:
        """Whether pages come back without anything being preempted."""
        return bool(self._releases)

    def count(self) -> tuple[int, int, int]:
        """(free, cached, used) pages of all groups."""
        free = cached = used = 0
        for cache in self.caches:
            free += cache.allocator.num_free
            cached += cache.allocator.num_cached
            used += cache.allocator.num_used
        return free, cached, used

    # -- admission ---------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> list[list[int]]:
        """By group, the cached pages a sequence could begin with, see `Sequence.may_skip`.

        Lists are of equal length. Pages before a group's window are the null page.
        """
        if sequence.root is None:
            return [[] for _ in self.caches]
        extend_keys(sequence.keys, sequence.root, sequence.tokens, self.page_size)
        most = sequence.keys[: sequence.may_skip // self.page_size]
        keys = self._leading(most)
        while self._publish_after([sequence.root, *keys]):
            keys = self._leading(most)
        known = [
            cache.match(keys) if window is None else [cache.find(key) for key in keys]
            for cache, window in zip(self.caches, self.windows)
        ]
        count = self._longest(known, len(keys))
        firsts = [self._first_seen(window, count * self.page_size) for window in self.windows]
        return [[NULL_PAGE] * first + pages[first:count] for pages, first in zip(known, firsts)]

    def _leading(self, keys: list[bytes]) -> list[bytes]:
        """The first of these, as many as all groups know whose layers see all tokens."""
        for cache, window in zip(self.caches, self.windows):
            if window is None:
                keys = keys[: len(cache.match(keys))]
        return keys

    def _longest(self, known: list[list[int]], count: int) -> int:
        """The most leading pages, at most `count`, of which every group has what is seen after."""
        for pages, window in zip(known, self.windows):
            if NULL_PAGE in pages[self._first_seen(window, count * self.page_size) : count]:
                break
        else:
            return count
        missing = [-1] * len(known)  # by group, the last page that it lacks
        longest = 0
        for end in range(1, count):
            for group, pages in enumerate(known):
                if pages[end - 1] == NULL_PAGE:
                    missing[group] = end - 1
            firsts = (self._first_seen(window, end * self.page_size) for window in self.windows)
            if all(last < first for last, first in zip(missing, firsts)):
                longest = end
        return longest

    def _first_seen(self, window: int | None, position: int) -> int:
        """Index of the first page that a query at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def lacking(self, needed: int, found: list[list[int]], reserved: float) -> int:
        """Pages short in the tightest group for `needed` a group, `found` among them.

        `reserved` is the fraction of each group that is to stay available. At most 0: it fits.
        """
        short = []
        for allocator, pages in zip(self.allocators, found):
            idle = allocator.num_idle(present(pages))
            left = allocator.num_available - idle - (needed - len(pages))
            short.append(math.ceil(reserved * (allocator.num_pages - 1)) - left)
        return max(short)

    def give(self, sequence: Sequence, needed: int, found: list[list[int]]) -> None:
        """Let a sequence hold `needed` pages a group, of which `found` are cached ones."""
        sequence.pages = []
        for cache, pages in zip(self.caches, found):
            cache.allocator.hold(present(pages))
            sequence.pages.append(pages + cache.allocator.allocate(needed - len(pages)))
        sequence.num_published = len(found[0])

    def grow(self, sequences: list[Sequence]) -> list[TableEntry]:
        """One page more in each group for each of these, and less what they do not see any more;
        returns where they were entered."""
        entries = []
        for group, cache in enumerate(self.caches):
            for sequence, page in zip(sequences, cache.allocator.allocate(len(sequences))):
                pages = sequence.pages[group]
                entries.append((group, sequence.slot, len(pages), page))
                pages.append(page)
        if self._trims:
            for sequence in sequences:
                self.trim(sequence, sequence.num_computed_tokens)
        return entries

    def note_filled(self, sequences: list[Sequence]) -> None:
        """Sequences are about to grow that have filled their pages with outputs.

        Those are found from now on, but named only when somebody looks for what they may continue:
        several at once cost a fraction, and for most of them nobody looks before the sequence ends.
        Not so where a page may be given back before: it would not be kept without a name.
        """
        for sequence in sequences:
            if self._trims:
                self.publish(sequence, min(len(sequence.tokens), sequence.num_computed_tokens))
            elif sequence.root is not None and not sequence.has_unnamed:
                sequence.has_unnamed = True
                self._unnamed.setdefault(_last_name(sequence), []).append(sequence)

    def _publish_after(self, keys: list[bytes]) -> bool:
        """Let the pages be found that follow one of these names; False: there are none."""
        if self._unnamed.keys().isdisjoint(keys):
            return False
        for key in keys:
            for sequence in self._unnamed.get(key, [])[:]:
                known = min(len(sequence.tokens), sequence.num_computed_tokens)
                filled = (len(sequence.pages[0]) - 1) * self.page_size
                self.publish(sequence, min(known, filled))
        return True

    def _forget_unnamed(self, sequence: Sequence) -> None:
        if sequence.has_unnamed:
            sequence.has_unnamed = False
            name = _last_name(sequence)
            self._unnamed[name].remove(sequence)
            if not self._unnamed[name]:
                del self._unnamed[name]

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the full pages of the first `tokens` tokens, which steps have computed
        or are about to."""
        self._forget_unnamed(sequence)
        if not self._publishes_outputs:
            tokens = min(tokens, sequence.prompt_len)
        first, end = sequence.num_published, tokens // self.page_size
        if sequence.root is None or end <= first:
            return
        extend_keys(sequence.keys, sequence.root, sequence.tokens, self.page_size)
        keys = sequence.keys[first:end]
        for cache, pages in zip(self.caches, sequence.pages):
            cache.publish(keys, pages[first:end])
        sequence.num_published = end

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the pages of a sequence that failed."""
        self._forget_unnamed(sequence)
        for cache, pages in zip(self.caches, sequence.pages):
            cache.withdraw(present(pages))

    def trim(self, sequence: Sequence, position: int) -> None:
        """Give back the pages that no query at `position` or later sees. Steps on their way may
        still read them."""
        if not self._trims:
            return
        passed: list[list[int]] = []
        for pages, window in zip(sequence.pages, self.windows):
            end = self._first_seen(window, position)
            first = end
            while first and pages[first - 1] != NULL_PAGE:
                first -= 1
            passed.append(pages[first:end])
            pages[first:end] = [NULL_PAGE] * (end - first)
        if any(passed):
            self._release_after(sequence.last_step, passed)

    # -- pages come back ---------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's pages back, now or once the last step that may write them was read."""
        self._release_after(sequence.last_step, sequence.pages)
        sequence.pages = []

    def _release_after(self, step: int, pages: list[list[int]]) -> None:
        if step <= self.retired:
            self._give_back(pages)
        else:
            self._releases.append((step, pages))

    def retire(self, step: int) -> None:
        """Step number `step` was read."""
        self.retired = step
        for last_step, pages in self._releases:
            if last_step <= step:
                self._give_back(pages)
        self._releases = [release for release in self._releases if release[0] > step]

    def _give_back(self, pages: list[list[int]]) -> None:
        for cache, group in zip(self.caches, pages):
            cache.allocator.release(present(group))

    def how_many_give(self, sequences: list[Sequence], wanted: int) -> int:
        """How many of these, from the first, must go for `wanted` pages to be available in every
        group; 0: all of them would not do. A page that they share comes with the last of them."""
        most = (sum(len(s.pages[g]) for s in sequences) for g in range(len(self.caches)))
        if min(most) < wanted:
            return 0
        holders = [Counter[int]() for _ in self.caches]
        given = [0] * len(self.caches)
        for number, sequence in enumerate(sequences, 1):
            for group, allocator in enumerate(self.allocators):
                counts = holders[group]
                for page in present(sequence.pages[group]):
                    counts[page] += 1
                    given[group] += counts[page] == allocator.holders(page)
            if min(given) >= wanted:
                return number
        return 0

    # -- host memory -------------------------------------------------------------------------------

    def to_compute(self, sequence: Sequence, follows: bool) -> int:
        """Prompt tokens that it will compute, as far as is known when it comes; `follows` another
        sample of its prompt."""
        if follows:
            found = (sequence.prompt_len - 1) // self.page_size
        else:
            found = len(self.lookup(sequence)[0])
        return sequence.prompt_len - found * self.page_size

    def offload(self, sequence: Sequence) -> list[PageMove]:
        """Moves that keep the computed pages of a sequence in host memory; none if it is full."""
        count = math.ceil(sequence.num_computed_tokens / self.page_size)
        if not self._free_host or any(len(free) < count for free in self._free_host):
            return []
        moves = []
        for group, (pages, free) in enumerate(zip(sequence.pages, self._free_host)):
            hosts = [NOWHERE if page == NULL_PAGE else free.pop() for page in pages[:count]]
            sequence.host_pages.append(hosts)
            moves += [(group, page, host) for page, host in _stored(pages, hosts)]
        return moves

    def restore(self, sequence: Sequence) -> list[PageMove]:
        """Moves that bring them back into the sequence's new pages."""
        moves = [
            (group, page, host)
            for group, (pages, hosts) in enumerate(zip(sequence.pages, sequence.host_pages))
            for page, host in _stored(pages, hosts)
        ]
        # They are read by the step being planned, and may be written again from the next one on.
        self._vacated += enumerate(sequence.host_pages)
        sequence.host_pages = []
        return moves

    def step_planned(self) -> None:
        """The step that reads restored pages goes out before any later one writes them."""
        for group, hosts in self._vacated:
            self._free_host[group] += [host for host in hosts if host != NOWHERE]
        self._vacated = []

    def forget_host(self, sequence: Sequence) -> None:
        """A sequence ended while its pages were in host memory."""
        for free, hosts in zip(self._free_host, sequence.host_pages):
            free += [host for host in hosts if host != NOWHERE]
        sequence.host_pages = []

    def check_invariants(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """AssertionError unless pages, holders and cache account for each other exactly."""
        unnamed = {id(s): name for name, behind in self._unnamed.items() for s in behind}
        noted = {id(s): _last_name(s) for s in running if s.has_unnamed}
        assert unnamed == noted, "pages to be named"
        for group, cache in enumerate(self.caches):
            cache.check_invariants()
            holders = [0] * cache.allocator.num_pages
            groups = [s.pages[group] for s in running] + [r[1][group] for r in self._releases]
            for page in (page for pages in groups for page in present(pages)):
                holders[page] += 1
            held = [cache.allocator.holders(page) for page in range(len(holders))]
            assert holders == held, "pages leaked or shared by mistake"
            for sequence in running:  # a page that is being written is nobody else's
                own = sequence.pages[group][sequence.num_computed_tokens // self.page_size :]
                assert NULL_PAGE not in own, "a page that will be written is missing"
                assert all(holders[page] == 1 for page in own), "a shared page may be written"
        for group, free in enumerate(self._free_host):
            used = [h for s in waiting if s.host_pages for h in s.host_pages[group]]
            used += [h for g, hosts in self._vacated if g == group for h in hosts]
            used = [host for host in used if host != NOWHERE]
            assert sorted(free + used) == list(range(self.host_pages[group])), "host pages"


def _last_name(sequence: Sequence) -> bytes:
    """Of its last published page, or where its chain begins."""
    assert sequence.root is not None
    return sequence.keys[sequence.num_published - 1] if sequence.num_published else sequence.root


def present(pages: list[int]) -> list[int]:
    """Without the places of pages that were given back."""
    return [page for page in pages if page != NULL_PAGE] if NULL_PAGE in pages else pages


def _stored(pages: list[int], hosts: list[int]) -> list[tuple[int, int]]:
    """Pages and where in host memory they are, without those that were given back."""
    return [(page, host) for page, host in zip(pages, hosts) if host != NOWHERE]
