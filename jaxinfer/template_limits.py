"""What a chat template may take: time, and the size of what it makes.

Everything is refused before it is made, where that can be known.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import time
from collections.abc import Iterator
from typing import Any

MAX_CHARACTERS = 2**24  # of any one string, and elements of any one list, that a template makes
MAX_SECONDS = 5.0  # of computing, for one rendering
MAX_BITS = 2**16  # of a product or power of integers


class TemplateLimitError(ValueError):
    """A template makes more, or takes longer, than is allowed."""


class _Meter:
    """The time of one rendering. The clock is read once in a thousand units of work."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_SECONDS  # of this thread: others may be busy
        self._until_look = 0

    def spend(self, units: int) -> None:
        self._until_look -= units
        if self._until_look < 0:
            self._until_look = 1000
            if time.thread_time() > self._end:
                raise TemplateLimitError(
                    f"takes more than {MAX_SECONDS:g} s of computing, the limit"
                )


_meter: contextvars.ContextVar[_Meter] = contextvars.ContextVar("the meter of a chat template")


@contextlib.contextmanager
def metered() -> Iterator[None]:
    """A template renders within this; TemplateLimitError ends it when it takes too long."""
    token = _meter.set(_Meter())
    try:
        yield
    finally:
        _meter.reset(token)


def made(value: Any) -> Any:
    """Any value that an operation made, which counts as work. Raises TemplateLimitError."""
    size = len(value) if isinstance(value, str | list | tuple) else 0
    check_size(size)
    _meter.get().spend(1 + size // 1000)
    return value


def spelled(value: Any) -> Any:
    """A value that will be turned into text. Raises TemplateLimitError for containers whose text
    would be too long: those within each other may hold the same ones many times over."""
    if isinstance(value, _CONTAINERS):
        meter, todo, size = _meter.get(), [value], 0
        while todo:
            meter.spend(1)
            each = todo.pop()
            size += len(each) if isinstance(each, str) else 1
            if isinstance(each, dict):
                todo += [*each.keys(), *each.values()]
            elif isinstance(each, _CONTAINERS):
                todo += each
            check_size(size + len(todo))
    return value


_CONTAINERS = (dict, list, tuple, set, frozenset)


def check_size(characters: int) -> None:
    """Raises TemplateLimitError for a string of so many characters, or a list of elements."""
    if characters > MAX_CHARACTERS:
        raise TemplateLimitError(
            f"makes a text of more than {MAX_CHARACTERS} characters, the limit"
        )


def check_widths(form: str) -> None:
    """Raises TemplateLimitError for a format with numbers that may make a text too long."""
    numbers = re.findall(r"\d+", form)
    if any(len(number) > 9 for number in numbers):
        raise TemplateLimitError("formats a text with a width of more than nine digits")
    check_size(sum(map(int, numbers)))


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateLimitError for a product or power that would take too much to compute."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        bits = left.bit_length() * right if operator == "**" else bits
        if operator in ("*", "**") and bits > MAX_BITS:
            raise TemplateLimitError(f"computes a number of more than {MAX_BITS} bits, the limit")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                check_size(len(many) * times)
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        check_size(len(left) + len(right))
