"""Finding many fixed strings in a text at the cost of few."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def one_of(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of some strings, none of them empty.

    It branches as their beginnings do, so a place where none begins costs as many comparisons as
    there are first characters: special tokens by the thousand have a few.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}  # one ends here
    return _pattern(root)


def _pattern(node: dict[str, Any]) -> str:
    branches = []
    for char, below in node.items():
        if char:
            literal = re.escape(char)
            while len(below) == 1 and "" not in below:  # a stretch without branches
                (char, below), *_ = below.items()
                literal += re.escape(char)
            branches.append(literal + _pattern(below))
    if not branches:
        return ""
    either = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{either}?" if "" in node else either
