"""Gives pages to sequences and takes them back, in every KV group. Host only.

Pages come from the prefix cache where it has them, else from the allocator. They are released only
once the last step that may use them was read. A preempted sequence's pages may go to host memory
meanwhile (`host`).

Layers that see a window need the pages of the last tokens only. They take them as the prompt's
chunks come to them, and give back what lies before the window, whose place in the list is the null
page's; so their lists are shorter than the others' until the prompt is computed. What the prefix
cache has of a beginning is of use to them if it has the window's end of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Row

from jaxinfer.host_pages import HostPages
from jaxinfer.page_allocator import NULL_PAGE, PageAllocator, present
from jaxinfer.prefix_cache import PrefixCache, extend_keys
from jaxinfer.sequence import Sequence
from jaxinfer.window_pages import Growing, WindowPages, first_seen

TableEntry = tuple[int, int, int, int]  # of a page table: KV group, slot, index, page


class SequencePages:
    """All tuples are by KV group. `num_pages` includes the null page, `host_pages` has none;
    `windows` are the tokens that a group's layers see, None or (): all; `chunk_tokens` is the most
    that a step computes of prompts. Unless `publishes_outputs` nobody finds more of a sequence than
    its prompt."""

    def __init__(
        self,
        num_pages: tuple[int, ...],
        page_size: int,
        host_pages: tuple[int, ...] = (),
        windows: tuple[int | None, ...] = (),
        publishes_outputs: bool = True,
        chunk_tokens: int = 0,
    ):
        self.page_size = page_size
        self._publishes_outputs = publishes_outputs
        self.windows = windows or (None,) * len(num_pages)
        self.caches = [PrefixCache(n) for n in num_pages]
        self._windowed = {
            group: WindowPages(window, page_size, chunk_tokens, num_pages[group])
            for group, window in enumerate(self.windows)
            if window is not None
        }
        self.growing = Growing(self._windowed)
        self._advanced: list[Sequence] = []
        self.host = HostPages(host_pages, page_size)
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
    def unclaimed(self) -> int:
        """Pages that every group can give beside what is promised to prompts in progress."""
        if not self.growing.prompts:
            return self.available
        return min(
            cache.allocator.num_available - self.growing.promised(group, self.growing.claims(group))
            for group, cache in enumerate(self.caches)
        )

    def come_back(self, short: Row[int] = ()) -> bool:
        """Whether pages come back of themselves in groups that are short; (): that have none."""
        groups = [
            group
            for group, cache in enumerate(self.caches)
            if (short[group] > 0 if short else not cache.allocator.num_available)
        ]
        return bool(self._releases) and all(
            any(pages[group] and pages[group][-1] != NULL_PAGE for _, pages in self._releases)
            for group in groups
        )

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
        firsts = self._firsts_seen(count * self.page_size)
        return [[NULL_PAGE] * first + pages[first:count] for pages, first in zip(known, firsts)]

    def to_compute(self, sequence: Sequence, follows: bool) -> int:
        """Prompt tokens that it will compute, as far as is known when it comes; `follows` another
        sample of its prompt."""
        if follows:
            found = (sequence.prompt_len - 1) // self.page_size
        else:
            found = len(self.lookup(sequence)[0])
        return sequence.prompt_len - found * self.page_size

    def _leading(self, keys: list[bytes]) -> list[bytes]:
        """The first of these, as many as all groups know whose layers see all tokens."""
        for cache, window in zip(self.caches, self.windows):
            if window is None:
                keys = keys[: len(cache.match(keys))]
        return keys

    def _longest(self, known: list[list[int]], count: int) -> int:
        """The most leading pages, at most `count`, of which every group has what is seen after."""
        for pages, first in zip(known, self._firsts_seen(count * self.page_size)):
            if NULL_PAGE in pages[first:count]:
                break
        else:
            return count
        missing = [-1] * len(known)  # by group, the last page that it lacks
        longest = 0
        for end in range(1, count):
            for group, pages in enumerate(known):
                if pages[end - 1] == NULL_PAGE:
                    missing[group] = end - 1
            firsts = self._firsts_seen(end * self.page_size)
            if all(last < first for last, first in zip(missing, firsts)):
                longest = end
        return longest

    def _firsts_seen(self, position: int) -> list[int]:
        """By group, the index of the first page that a query at `position` sees."""
        return [first_seen(window, position, self.page_size) for window in self.windows]

    def wanted(self, sequence: Sequence) -> tuple[int, list[list[int]]]:
        """Pages a group that a waiting sequence fills, and what it begins with instead of fresh
        ones: what `lookup` finds, but if it has its own in host memory, nothing that it sees."""
        whole = -(-len(sequence.tokens) // self.page_size)
        if sequence.host_pages:  # they come back to the last bit
            return whole, [[NULL_PAGE] * n for n in self._firsts_seen(len(sequence.tokens) - 1)]
        return whole, self.lookup(sequence)

    def lacking(self, whole: int, found: list[list[int]], reserved: float) -> list[int]:
        """By group, the pages short for a sequence that fills `whole`, `found` among them.

        `reserved` is the fraction of each group that is to stay available. None above 0: it fits.
        """
        short = []
        for group, (cache, pages) in enumerate(zip(self.caches, found)):
            allocator = cache.allocator
            idle = allocator.num_idle(present(pages))
            needed = whole - len(pages)
            if group in self._windowed:
                needed = self.growing.promised(group, self.growing.claims(group, needed, idle))
            left = allocator.num_available - idle - needed
            short.append(math.ceil(reserved * (allocator.num_pages - 1)) - left)
        return short

    def give(self, sequence: Sequence, whole: int, found: list[list[int]]) -> None:
        """Let a sequence hold the cached pages `found` and fresh ones, `whole` a group in all.

        Where layers see a window, a prompt has the fresh ones by and by, see `extend`.
        """
        returns = bool(sequence.host_pages)
        sequence.pages = []
        for group, (cache, pages) in enumerate(zip(self.caches, found)):
            cache.allocator.hold(present(pages))
            fresh = whole - len(pages) if returns or group not in self._windowed else 0
            sequence.pages.append(pages + cache.allocator.allocate(fresh))
        sequence.num_published = 0 if returns else len(found[0])
        if self._windowed and not returns:
            self.growing.prompts[sequence] = whole

    def room(self, sequence: Sequence) -> int:
        """Tokens of its prompt that a sequence has pages for, or can take them."""
        ends = [
            len(sequence.pages[group]) + self.caches[group].allocator.num_available
            for group in self._windowed
        ]
        return min(ends) * self.page_size - sequence.num_computed_tokens

    def extend(self, sequence: Sequence, end: int) -> list[TableEntry]:
        """Pages for a prompt up to `end` where layers see a window; where they were entered."""
        entries, count = [], -(-end // self.page_size)
        for group in self._windowed:
            pages = sequence.pages[group]
            for page in self.caches[group].allocator.allocate(count - len(pages)):
                entries.append((group, sequence.slot, len(pages), page))
                pages.append(page)
        if count == self.growing.prompts.get(sequence):
            del self.growing.prompts[sequence]
        return entries

    def grow(self, sequences: list[Sequence]) -> list[TableEntry]:
        """One page more in each group for each of these, and less what they do not see any more;
        returns where they were entered."""
        entries = []
        for group, cache in enumerate(self.caches):
            for sequence, page in zip(sequences, cache.allocator.allocate(len(sequences))):
                pages = sequence.pages[group]
                entries.append((group, sequence.slot, len(pages), page))
                pages.append(page)
        if self._windowed:
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
            if self._windowed:
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

    def flush(self) -> None:
        """Let nobody find any page that is there now."""
        for cache in self.caches:
            cache.flush()

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the pages of a sequence that failed, nor those its windows passed."""
        self._forget_unnamed(sequence)
        names = sequence.keys[: sequence.num_published]
        for group, (cache, pages) in enumerate(zip(self.caches, sequence.pages)):
            cache.withdraw(present(pages))
            if group in self._windowed:
                cache.withdraw(present([cache.find(name) for name in names]))

    def advanced(self, sequence: Sequence) -> None:
        """A part of its prompt is in the step being planned, which still needs all its pages."""
        if self._windowed:
            self._advanced.append(sequence)

    def trim_advanced(self) -> None:
        """That step went out: the next ones do not need what is before their windows."""
        for sequence in self._advanced:
            self.trim(sequence, sequence.num_computed_tokens)
        self._advanced.clear()

    def trim(self, sequence: Sequence, position: int) -> None:
        """Give back the pages that no query at `position` or later sees. Steps on their way may
        still read them."""
        if not self._windowed:
            return
        passed: list[list[int]] = []
        for pages, end in zip(sequence.pages, self._firsts_seen(position)):
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
        self.growing.prompts.pop(sequence, None)
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

    def how_many_give(
        self, sequences: list[Sequence], whole: int, found: list[list[int]], short: list[int]
    ) -> int:
        """How many of these, from the first, must go for a sequence that is `short` of pages, see
        `lacking`; 0: all of them would not do. A page that they share comes with the last."""
        for group in range(len(self.caches)):
            most = sum(len(sequence.pages[group]) for sequence in sequences)
            if group not in self._windowed and most < short[group]:
                return 0
        holders = [Counter[int]() for _ in self.caches]
        given = [0] * len(self.caches)
        claims = [self.growing.claims(g, whole - len(pages)) for g, pages in enumerate(found)]
        before = [self.growing.promised(group, claim) for group, claim in enumerate(claims)]
        for number, sequence in enumerate(sequences, 1):
            enough = True
            for group, allocator in enumerate(self.allocators):
                counts = holders[group]
                for page in present(sequence.pages[group]):
                    counts[page] += 1
                    given[group] += counts[page] == allocator.holders(page)
                claims[group] = self.growing.without(group, claims[group], sequence)
                promised = before[group] - self.growing.promised(group, claims[group])
                enough = enough and given[group] + promised >= short[group]
            if enough:
                return number
        return 0

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
                grows = group in self._windowed and sequence in self.growing.prompts
                filled = -(-sequence.num_computed_tokens // self.page_size)
                whole = self.growing.prompts.get(sequence, len(sequence.pages[0]))
                assert len(sequence.pages[group]) == (filled if grows else whole), "length"
                own = sequence.pages[group][sequence.num_computed_tokens // self.page_size :]
                assert NULL_PAGE not in own, "a page that will be written is missing"
                assert all(holders[page] == 1 for page in own), "a shared page may be written"
        self.host.check_invariants(waiting)


def _last_name(sequence: Sequence) -> bytes:
    """Of its last published page, or where its chain begins."""
    assert sequence.root is not None
    return sequence.keys[sequence.num_published - 1] if sequence.num_published else sequence.root
