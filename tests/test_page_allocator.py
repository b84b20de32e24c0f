"""The page allocator under random use."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.page_allocator import NULL_PAGE, OutOfPagesError, PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """A model that is a plain set of pages in use."""

    @initialize(num_pages=st.integers(2, 20))
    def start(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.held: list[int] = []

    @rule(count=st.integers(0, 21))
    def allocate(self, count):
        if count > self.allocator.num_free:
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(pages) == count
        assert NULL_PAGE not in pages and not set(pages) & set(self.held)
        self.held += pages

    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(
            st.lists(st.sampled_from(self.held), unique=True) if self.held else st.just([])
        )
        self.allocator.release(pages)
        self.held = [page for page in self.held if page not in pages]

    @rule(data=st.data(), wrong=st.integers(-3, 25))
    def free_wrongly(self, data, wrong):
        """A free with one bad page among good ones changes nothing."""
        good = data.draw(
            st.lists(st.sampled_from(self.held), unique=True) if self.held else st.just([])
        )
        if wrong in self.held and wrong not in good:
            return
        with pytest.raises(ValueError, match="page"):
            self.allocator.release([*good, wrong])

    @invariant()
    def everything_is_accounted_for(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_invariants()
        assert self.allocator.num_used == len(self.held)
        assert self.allocator.num_free == self.allocator.num_pages - 1 - len(self.held)


TestAllocator = AllocatorMachine.TestCase


def test_the_last_freed_page_is_reused_first():
    allocator = PageAllocator(10)
    first = allocator.allocate(6)
    assert first == [1, 2, 3, 4, 5, 6]
    allocator.release([2, 5])
    assert allocator.allocate(3) == [2, 5, 7]


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_needs_a_page_beside_the_null_page(num_pages):
    with pytest.raises(ValueError, match="null page"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("damage", ["lost", "free twice", "null free", "null used"])
def test_check_invariants_notices(damage):
    allocator = PageAllocator(5)
    allocator.allocate(2)
    if damage == "lost":
        allocator._free.pop()
    elif damage == "free twice":
        allocator._free.append(allocator._free[0])
    elif damage == "null free":
        allocator._free.append(NULL_PAGE)
    else:
        allocator._holders[NULL_PAGE] = 1
    with pytest.raises(AssertionError):
        allocator.check_invariants()
