"""Shared pages: found by content within a namespace, counted, evicted last used first."""

from __future__ import annotations

import random

import pytest
from fakes import GREEDY
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.page_allocator import CACHED, FREE, NULL_PAGE, USED, OutOfPagesError
from jaxinfer.prefix_cache import PrefixCache, extend_keys, namespace_key
from jaxinfer.request import Request
from jaxinfer.sequence import Sequence
from jaxinfer.sequence_pages import SequencePages

ROOT = namespace_key("tenant", "")


def keys_of(tokens: list[int], root: bytes = ROOT, page_size: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, page_size)
    return keys


def published(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Pages that held `tokens` and that nobody holds any more."""
    keys = keys_of(tokens)
    pages = cache.allocator.allocate(len(keys))
    cache.publish(keys, pages)
    cache.allocator.release(pages)
    cache.check_invariants()
    return pages


def test_a_key_names_a_page_and_all_before_it():
    keys = keys_of(list(range(13)))
    assert len(keys) == 3 == len(set(keys)), "full pages only"
    assert keys_of(list(range(12)))[:3] == keys, "what follows does not matter"
    assert keys_of([99, *range(1, 12)])[2] != keys[2], "what comes before does"
    assert keys_of([2**30, 0, 0, 0]) != keys_of([0, 2**30, 0, 0])
    grown = keys[:1]
    extend_keys(grown, ROOT, list(range(13)), 4)
    assert grown == keys


def test_namespaces_have_nothing_in_common():
    roots = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("a", "", ""), ("\ud800", "")]
    assert len({keys_of([1, 2, 3, 4], namespace_key(*names))[0] for names in roots}) == len(roots)


def test_the_longest_known_beginning_is_found():
    cache = PrefixCache(10)
    pages = published(cache, list(range(12)))
    assert cache.match(keys_of([*range(12), 1, 2, 3, 4])) == pages
    assert cache.match(keys_of([*range(8), 0, 0, 0, 0])) == pages[:2]
    assert cache.match(keys_of([5, *range(11)])) == []


def test_the_end_of_what_was_used_longest_ago_is_evicted_first_and_only_when_needed():
    cache = PrefixCache(8)  # seven pages
    old, new = published(cache, list(range(12))), published(cache, list(range(50, 58)))
    assert (cache.allocator.num_free, cache.allocator.num_cached) == (2, 5)
    cache.allocator.allocate(2)
    assert cache.match(keys_of(list(range(12)))) == old, "free pages go first"
    cache.allocator.allocate(1)
    assert cache.match(keys_of(list(range(12)))) == old[:2]
    cache.allocator.hold(old[:2])  # used again: now the others are the oldest
    cache.allocator.release(old[:2])
    cache.allocator.allocate(2)
    assert cache.match(keys_of(list(range(50, 58)))) == []
    assert cache.match(keys_of(list(range(12)))) == old[:2]
    assert new
    cache.check_invariants()


def test_a_held_page_is_never_evicted():
    cache = PrefixCache(4)
    pages = published(cache, list(range(8)))
    cache.allocator.hold(pages)
    cache.allocator.allocate(1)
    with pytest.raises(OutOfPagesError):
        cache.allocator.allocate(1)
    assert cache.match(keys_of(list(range(8)))) == pages


def test_of_two_pages_with_the_same_content_the_first_stays_the_one_found():
    cache = PrefixCache(6)
    first = published(cache, [1, 2, 3, 4])
    (twin,) = cache.allocator.allocate(1)
    cache.publish(keys_of([1, 2, 3, 4]), [twin])
    cache.allocator.release([twin])
    assert cache.match(keys_of([1, 2, 3, 4])) == first
    assert cache.allocator.num_cached == 1, "the twin is free again"
    cache.check_invariants()


def test_withdrawn_and_flushed_pages_are_not_found():
    cache = PrefixCache(8)
    held = published(cache, [1, 2, 3, 4])
    cache.allocator.hold(held)
    published(cache, [5, 6, 7, 8])
    assert cache.flush() == 2
    cache.check_invariants()
    assert cache.match(keys_of([1, 2, 3, 4])) == cache.match(keys_of([5, 6, 7, 8])) == []
    assert cache.allocator.num_cached == 0 and cache.allocator.num_used == 1
    cache.allocator.release(held)
    assert cache.allocator.num_free == 7


def test_states():
    cache = PrefixCache(5)
    (kept,) = published(cache, [1, 2, 3, 4])
    (used,) = cache.allocator.allocate(1)
    states = cache.allocator.states()
    assert states[kept - 1] == CACHED and states[used - 1] == USED  # the null page has none
    assert sorted(states) == sorted([CACHED, USED, FREE, FREE])


@pytest.mark.parametrize("page", [0, 3, 9])
def test_pages_that_hold_nothing_cannot_be_shared_or_released(page):
    allocator = PrefixCache(5).allocator
    for change in (lambda: allocator.hold([page]), lambda: allocator.release([page])):
        with pytest.raises((ValueError, IndexError)):
            change()
    allocator.check_invariants()


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet come, grow and go; a model knows what each page contains."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages):
        self.cache = PrefixCache(num_pages)
        self.running: list[tuple[list[int], list[int]]] = []  # tokens, pages
        self.content: dict[int, tuple[int, ...]] = {}  # page: all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def arrive(self, tokens):
        keys = keys_of(tokens, page_size=2)
        found = self.cache.match(keys)
        for index, page in enumerate(found):
            assert self.content[page] == tuple(tokens[: 2 * index + 2]), "another's content"
        allocator = self.cache.allocator
        fresh = -(-len(tokens) // 2) - len(found)
        if fresh > allocator.num_available - allocator.num_idle(found):
            return
        allocator.hold(found)
        pages = found + allocator.allocate(fresh)
        for index in range(len(found), len(pages)):
            self.content[pages[index]] = tuple(tokens[: 2 * index + 2])
        self.cache.publish(keys, pages)
        self.running.append((tokens, pages))

    @rule(which=st.integers(0, 20), failed=st.booleans())
    def end(self, which, failed):
        if self.running:
            _, pages = self.running.pop(which % len(self.running))
            if failed:
                self.cache.withdraw(pages)
                assert not any(self.cache._keys[page] for page in pages)
            self.cache.allocator.release(pages)

    @rule()
    def flush(self):
        self.cache.flush()

    @invariant()
    def consistent(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        held = [page for _, pages in self.running for page in pages]
        for page in range(1, self.cache.allocator.num_pages):
            assert self.cache.allocator.holders(page) == held.count(page)
        for tokens, pages in self.running:  # nobody's content changed under it
            for index, page in enumerate(pages):
                assert self.content[page] == tuple(tokens[: 2 * index + 2])


TestCacheMachine = CacheMachine.TestCase


def running(pages: SequencePages, prompt: list[int], outputs: list[int]) -> Sequence:
    """A sequence that has computed its prompt and taken a page whenever its outputs filled one."""
    sequence = Sequence(Request("r", tuple(prompt), GREEDY, 99, 0), tokens=[*prompt], root=ROOT)
    pages.give(sequence, -(-len(prompt) // pages.page_size), pages.lookup(sequence))
    pages.extend(sequence, len(prompt))
    pages.publish(sequence, len(prompt))
    for token in outputs:
        sequence.num_computed_tokens = len(sequence.tokens)
        if sequence.num_computed_tokens == len(sequence.pages[0]) * pages.page_size:
            pages.note_filled([sequence])
            pages.grow([sequence])
        sequence.tokens.append(token)
    return sequence


def found(pages: SequencePages, tokens: list[int]) -> list[list[int]]:
    """What a request for these tokens and one more could begin with."""
    prompt = (*tokens, 99)
    return pages.lookup(Sequence(Request("f", prompt, GREEDY, 1, 0), tokens=[*prompt], root=ROOT))


@pytest.mark.parametrize("windows", [(None,), (None, 3), (3,)])
def test_pages_that_outputs_filled_are_found_though_nobody_named_them(windows):
    pages = SequencePages((40,) * len(windows), 2, windows=windows)
    first = running(pages, [1, 2, 3], [4, 5, 6, 7, 8])
    assert found(pages, [6, 2, 3, 4]) == [[]] * len(windows)
    if windows == (None,):
        assert first.num_published == 1, "nobody looked for what it may have"
    shorter = running(pages, [1, 2, 3], [4, 9])
    without_a_page = running(pages, [7], [7, 7])
    pages.check_invariants([first, shorter, without_a_page], [])
    for tokens, count in (([1, 2, 3, 4, 5, 6], 3), ([1, 2, 3, 4, 5, 0], 2), ([7, 7], 1)):
        assert [len(group) for group in found(pages, tokens)] == [count] * len(windows)
    assert [group[-1] for group in found(pages, [1, 2, 3, 4, 5, 6])] == [
        group[2] for group in first.pages
    ]
    pages.check_invariants([first, shorter, without_a_page], [])


def test_what_a_failed_sequence_filled_is_never_found():
    pages = SequencePages((40,), 2)
    failed, other = running(pages, [1, 2, 3], [4, 5]), running(pages, [1, 2, 3], [9, 5])
    pages.withdraw(failed)
    pages.release(failed)
    pages.check_invariants([other], [])
    assert found(pages, [1, 2, 3, 4]) == [[]], "nor what it shared with the other"
    assert found(pages, [1, 2, 3, 9]) == [[]]


def _has(there: list[list[bool]], windows: tuple[int | None, ...], count: int) -> bool:
    """Whether each group has what a query after `count` pages of two tokens sees."""
    seen = [0 if w is None else max(0, 2 * count - w + 1) // 2 for w in windows]
    return all(all(kept[first:count]) for kept, first in zip(there, seen))


@pytest.mark.parametrize("windows", [(None,), (None, 5), (None, 9, 3), (6,), (7, 2)])
def test_the_longest_beginning_that_every_window_has_the_end_of(windows):
    """With random pages missing in each group; compared with trying all lengths."""
    rng = random.Random(1)
    for _ in range(60):
        pages = SequencePages((40,) * len(windows), 2, windows=windows)
        each = Sequence(Request("r", tuple(range(41)), GREEDY, 1, 0), tokens=[*range(41)], root=b"")
        assert pages.lookup(each) == [[]] * len(windows), "which makes the keys"
        there = []
        for cache in pages.caches:
            kept = [rng.random() < 0.8 for _ in range(20)]
            held = cache.allocator.allocate(20)
            cache.publish(each.keys, [page if kept[page - 1] else NULL_PAGE for page in held])
            there.append(kept)

        longest = max(count for count in range(21) if _has(there, windows, count))
        found = pages.lookup(each)
        assert [len(group) for group in found] == [longest] * len(windows)
