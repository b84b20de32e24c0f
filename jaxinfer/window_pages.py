"""What layers that see a window need of a KV pool. Host only.

Between steps their group keeps the pages that a sequence's next token sees. A part of a prompt
takes pages besides, which come back when the step that computes it was read: all parts of a step
together no more than a chunk fills. So a prompt, however long, needs the window's pages, and all
prompts in progress share what a chunk takes.
"""

from __future__ import annotations

from jaxinfer.sequence import Sequence
from jaxinfer.step_plan import chunk_pages

Claim = tuple[int, int]  # pages still to be taken in all, and how many of them are to be kept


def first_seen(window: int | None, position: int, page_size: int) -> int:
    """Index of the first page that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // page_size


def most_kept(window: int, page_size: int) -> int:
    """Pages that a sequence holds at most between steps, and the one that it goes on with.

    Tokens of a window lie in one page more than they fill, where they do not begin with one.
    """
    return -(-(window - 1) // page_size) + 2


def pages_of_one(window: int | None, length: int, page_size: int, chunk_tokens: int) -> int:
    """Pages with which a sequence of `length` tokens is computed at full speed when it is alone."""
    whole = -(-length // page_size)
    if window is None:
        return whole
    return min(whole, most_kept(window, page_size) + chunk_pages(chunk_tokens, page_size))


class WindowPages:
    """How many pages one group of such layers needs, of `num_pages`."""

    def __init__(self, window: int, page_size: int, chunk_tokens: int, num_pages: int):
        self._window, self._page_size = window, page_size
        self._kept = most_kept(window, page_size)
        # For the chunk, but in a small pool no more than half of what one sequence leaves.
        beside = max(0, num_pages - 1 - self._kept)
        self._spare = min(chunk_pages(chunk_tokens, page_size), beside // 2)

    def claim(self, lacks: int, has: int) -> Claim:
        """Of a prompt that will take so many pages more and holds `has`."""
        return lacks, min(lacks, max(0, self._kept - has))

    def claim_of(self, sequence: Sequence, whole: int, pages: list[int]) -> Claim:
        """Of a prompt in progress that fills `whole` pages and has come to the end of `pages`."""
        passed = first_seen(self._window, sequence.num_computed_tokens, self._page_size)
        return self.claim(whole - len(pages), len(pages) - passed)

    def promised(self, claim: Claim) -> int:
        """Pages that stay available for the prompts whose claims these are the sum of."""
        lacks, keep = claim
        return min(lacks, keep + self._spare)


class Growing:
    """Prompts in progress that have pages of windows to take yet: the pages that each fills.

    What they will take is promised to them: nobody else is admitted in their place, and streams
    behind them do not grow into it. Otherwise prompts could stand still half done, each waiting for
    pages that another one has.
    """

    def __init__(self, groups: dict[int, WindowPages]):
        self._groups = groups
        self.prompts: dict[Sequence, int] = {}

    def claims(self, group: int, lacks: int = 0, has: int = 0) -> Claim:
        """The sum of theirs in a group, and of one that will take `lacks` and brings `has`."""
        if group not in self._groups:  # there they have all pages
            return lacks, lacks
        window = self._groups[group]
        claims = [window.claim_of(s, whole, s.pages[group]) for s, whole in self.prompts.items()]
        claims.append(window.claim(lacks, has))
        return sum(lacks for lacks, _ in claims), sum(keep for _, keep in claims)

    def without(self, group: int, claim: Claim, sequence: Sequence) -> Claim:
        """What a sum comes to if a sequence takes no more."""
        whole = self.prompts.get(sequence)
        if whole is None or group not in self._groups:
            return claim
        lacks, keep = self._groups[group].claim_of(sequence, whole, sequence.pages[group])
        return claim[0] - lacks, claim[1] - keep

    def promised(self, group: int, claim: Claim) -> int:
        """Pages that stay available for claims that come to that."""
        return self._groups[group].promised(claim) if group in self._groups else claim[0]
