"""Reading text that comes in pieces, so that how it is cut makes no difference.

A reader is a generator over a `Text`. It says what it finds, and yields None where it needs more of
the text than there is; between the two it never looks at where a piece ended. So it is written as
if all of the text were there, and what it says depends on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

from jaxinfer.literals import one_of

type Steps[Said, Result] = Generator[Said | None, None, Result]
type Quiet[Result] = Generator[None, None, Result]  # steps that say nothing


class Text:
    """What has come of a text and was not read yet, and of what was read, what must be kept.

    Attributes:
        ended: no more will come.
        reasoning: where reasoning was found, as [start, end) in characters.
    """

    def __init__(self) -> None:
        self.ended = False
        self.reasoning: list[tuple[int, int]] = []
        self._buffer = ""
        self._at = 0  # in the buffer; what is before it was read
        self._before = 0  # characters read and no longer in the buffer
        self._kept: int | None = None

    @property
    def position(self) -> int:
        """How many characters were read."""
        return self._before + self._at

    @property
    def waiting(self) -> int:
        """How many characters have come and were not read."""
        return len(self._buffer) - self._at

    def add(self, piece: str) -> None:
        """More of the text."""
        cut = self._at if self._kept is None else self._kept
        self._buffer = self._buffer[cut:] + piece
        self._before += cut
        self._at -= cut
        if self._kept is not None:
            self._kept = 0

    @property
    def next(self) -> str:
        """The next character."""
        return self._buffer[self._at]

    def last(self, count: int) -> str:
        """The last characters that have come, of those that were not read."""
        return self._buffer[len(self._buffer) - count :]

    def take(self, count: int) -> str:
        """Read so many characters, which have come."""
        self._at += count
        return self._buffer[self._at - count : self._at]

    def starts(self, prefix: str) -> bool:
        return self._buffer.startswith(prefix, self._at)

    def may_start(self, prefix: str) -> bool:
        """Whether what has come is a part of the prefix, and more may follow."""
        short = self.waiting < len(prefix)
        return short and not self.ended and prefix.startswith(self._buffer[self._at :])

    def run(self, pattern: re.Pattern[str]) -> int:
        """How many of the characters that have come match from here on."""
        match = pattern.match(self._buffer, self._at)
        return match.end() - self._at if match else 0

    def search(self, pattern: re.Pattern[str]) -> tuple[int, str] | None:
        """How far away the first match is, and what it is."""
        match = pattern.search(self._buffer, self._at)
        return (match.start() - self._at, match[0]) if match else None

    def keep(self, back: int = 0) -> None:
        """Keep what is read from now on, and the last `back` characters."""
        self._kept = self._at - back

    def release(self) -> str:
        """What was kept, which is kept no longer."""
        assert self._kept is not None
        kept, self._kept = self._buffer[self._kept : self._at], None
        return kept


class Marks:
    """Strings to look for."""

    def __init__(self, marks: Sequence[str]):
        self.marks = tuple(marks)
        self._pattern = re.compile(one_of(list(marks)))
        self._starts = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, self._starts), default=0)

    def found(self, text: Text) -> tuple[int, str] | None:
        """How far away the first one is, and which."""
        return text.search(self._pattern)

    def begun(self, text: Text) -> int:
        """How many of the last characters that have come may become a mark."""
        if text.ended:
            return 0
        for size in range(min(self._longest, text.waiting), 0, -1):
            if text.last(size) in self._starts:
                return size
        return 0


def more(text: Text) -> Quiet[bool]:
    """Wait for more of the text; whether there is some."""
    before = text.waiting
    while text.waiting == before:
        if text.ended:
            return False
        yield None
    return True


def peek(text: Text) -> Quiet[str]:
    """The next character, "" at the end."""
    if not text.waiting and not (yield from more(text)):
        return ""
    return text.next


def skip_space(text: Text) -> Quiet[None]:
    """Read white space, which is layout."""
    while (yield from peek(text)).isspace():
        text.take(text.run(_SPACE))


def match(text: Text, *words: str) -> Quiet[str]:
    """Read the longest of the words that the text goes on with. Returns it, "" for none."""
    while True:
        found = max((word for word in words if text.starts(word)), key=len, default="")
        longer = any(len(word) > len(found) and text.may_start(word) for word in words)
        if not longer or not (yield from more(text)):
            return text.take(len(found))


def name(text: Text, pattern: re.Pattern[str], longest: int = 256) -> Quiet[str]:
    """Read as far as characters match, which must be few: "" if there are more."""
    found = ""
    while (yield from peek(text)) and (size := text.run(pattern)):
        found += text.take(size)
        if len(found) > longest:
            return ""
    return found


def until[Said](text: Text, marks: Marks, says: Callable[[str], Said]) -> Steps[Said, str]:
    """Say what comes before the first of the marks, and read that. Returns it, "" at the end."""
    while True:
        found = marks.found(text)
        size = found[0] if found else text.waiting - marks.begun(text)
        if size:
            yield says(text.take(size))
        if found:
            return text.take(len(found[1]))
        if not (yield from more(text)):
            if text.waiting:
                yield says(text.take(text.waiting))
            return ""


def rest[Said](text: Text, says: Callable[[str], Said]) -> Steps[Said, None]:
    """Say all that follows."""
    while text.waiting or (yield from more(text)):
        yield says(text.take(text.waiting))


def told[Said](steps: Steps[str, bool], says: Callable[[str], Said]) -> Steps[Said, bool]:
    """The same steps, saying something of each piece."""
    while True:
        try:
            piece = next(steps)
        except StopIteration as end:
            return end.value
        yield None if piece is None else says(piece)


def collected[Result](steps: Steps[str, Result]) -> Quiet[tuple[str, Result]]:
    """All pieces that the steps say, and what they come to."""
    pieces: list[str] = []
    while True:
        try:
            piece = next(steps)
        except StopIteration as end:
            return "".join(pieces), end.value
        if piece is None:
            yield None
        else:
            pieces.append(piece)


_SPACE = re.compile(r"\s*")
