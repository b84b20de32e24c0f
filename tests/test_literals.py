"""The pattern for many fixed strings, against looking for each."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.literals import one_of

WORDS = st.lists(st.text("ab<|.\\", min_size=1, max_size=5), min_size=1, max_size=8)


@given(WORDS, st.text("ab<|.\\", max_size=20))
def test_it_finds_the_longest_of_the_strings(words: list[str], text: str) -> None:
    pattern = re.compile(one_of(words))
    for start in range(len(text) + 1):
        here = [word for word in words if text.startswith(word, start)]
        match = pattern.match(text, start)
        assert (match.group() if match else "") == max(here, key=len, default="")


def test_common_beginnings_are_compared_once() -> None:
    assert one_of(f"<|reserved_{i}|>" for i in range(3)) == r"<\|reserved_(?:0\|>|1\|>|2\|>)"
    assert one_of(["a", "abc", "x"]) == "(?:a(?:bc)?|x)"
