"""Which pages of host memory hold what preempted sequences had computed. Host only."""

from __future__ import annotations

import math

from jaxinfer.page_allocator import NULL_PAGE, present
from jaxinfer.sequence import Sequence

NOWHERE = -1  # the place in host memory of a page that was given back before
PageMove = tuple[int, int, int]  # KV group, page on the device, page in host memory


class HostPages:
    """Pages of host memory, `counts` by KV group; (): there are none."""

    def __init__(self, counts: tuple[int, ...], page_size: int):
        self.counts, self._page_size = counts, page_size
        self._free = [list(range(n - 1, -1, -1)) for n in counts]
        self._vacated: list[tuple[int, list[int]]] = []  # to be read by the next step

    def offload(self, sequence: Sequence) -> list[PageMove]:
        """Moves that keep the computed pages of a sequence in host memory; none if it is full."""
        count = math.ceil(sequence.num_computed_tokens / self._page_size)
        computed = [pages[:count] for pages in sequence.pages]
        room = zip(computed, self._free)
        if not self._free or any(len(present(pages)) > len(free) for pages, free in room):
            return []
        moves = []
        for group, (pages, free) in enumerate(zip(computed, self._free)):
            hosts = [NOWHERE if page == NULL_PAGE else free.pop() for page in pages]
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
            self._free[group] += [host for host in hosts if host != NOWHERE]
        self._vacated = []

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended while its pages were in host memory."""
        for free, hosts in zip(self._free, sequence.host_pages):
            free += [host for host in hosts if host != NOWHERE]
        sequence.host_pages = []

    def check_invariants(self, waiting: list[Sequence]) -> None:
        """AssertionError unless every page is free, one sequence's, or about to be read."""
        for group, free in enumerate(self._free):
            used = [h for s in waiting if s.host_pages for h in s.host_pages[group]]
            used += [h for g, hosts in self._vacated if g == group for h in hosts]
            used = [host for host in used if host != NOWHERE]
            assert sorted(free + used) == list(range(self.counts[group])), "host pages"


def _stored(pages: list[int], hosts: list[int]) -> list[tuple[int, int]]:
    """Pages and where in host memory they are, without those that were or are given back."""
    both = zip(pages, hosts)
    return [(page, host) for page, host in both if host != NOWHERE and page != NULL_PAGE]
