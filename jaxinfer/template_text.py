"""Text that knows which of its characters a chat template wrote.

A special token counts only where the template itself wrote it, so a rendered chat has to tell the
template's characters from those of messages. Messages go into a template as they are, plain `str`,
so that it sees and measures just what users wrote. The template's own words are `MarkedText`, a
`str` with a mark a character, whose operations do to the marks what they do to the characters.

What has no override here gives a plain `str`, which nobody vouches for: an operation that is not
followed loses marks and never makes any.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from markupsafe import Markup, escape

from jaxinfer.template_limits import TemplateLimitError, check_size, check_widths, made, spelled

_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<form>[#0\- +]*(?:\*|\d*)(?:\.(?:\*|\d*))?[hlL]?)(?P<type>.)",
    re.DOTALL,
)


class MarkedText(str):
    """A string with a byte a character: 1 where the template wrote it, 0 where it comes from a
    message or from nobody knows where.

    Strings that would be too long are refused before they are made.
    """

    _marks: bytes

    def __new__(cls, text: str, marks: bytes) -> MarkedText:
        self = super().__new__(cls, text)
        self._marks = marks
        return self

    @classmethod
    def written(cls, text: str) -> MarkedText:
        """All of it is the template's."""
        return cls(_plain(text), b"\1" * len(text))

    @classmethod
    def of(cls, text: str) -> MarkedText:
        """The text as it is marked; a plain one is nobody's."""
        return text if isinstance(text, MarkedText) else cls(text, bytes(len(text)))

    def unmarked(self) -> tuple[str, bytes]:
        """The plain text, and its marks."""
        return _plain(self), self._marks

    def __str__(self) -> str:
        return self  # not a copy without marks

    # -- parts -----------------------------------------------------------------------------------

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        part = str.__getitem__(self, key)
        if not isinstance(key, slice):
            start = operator.index(key)
            key = slice(start, start + 1 or None)
        return MarkedText(part, self._marks[key])

    def __iter__(self) -> Iterator[str]:
        for i, c in enumerate(str.__iter__(self)):
            yield made(MarkedText(c, self._marks[i : i + 1]))

    def lstrip(self, chars: str | None = None, /) -> MarkedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> MarkedText:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> MarkedText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> MarkedText:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> MarkedText:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, sep, tail = self._found(str.partition(self, sep))
        return head, sep, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, sep, tail = self._found(str.rpartition(self, sep))
        return head, sep, tail

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._found(str.splitlines(self, keepends=True))
        shown = str.splitlines(self, keepends)
        return [line[: len(part)] for line, part in zip(whole, shown, strict=True)]

    def _found(self, parts: Iterable[str], gap: int = 0) -> list[str]:
        """Parts of this text in their order, where they are. Between them are `gap` characters, or
        white space that no part starts with."""
        found: list[str] = []
        at = 0
        for part in parts:
            at = str.index(self, part, at + gap if found else at)
            found.append(made(self[at : at + len(part)]))
            at += len(part)
        return found

    # -- more ------------------------------------------------------------------------------------

    def __add__(self, other: str) -> MarkedText:
        if not isinstance(other, str) or hasattr(other, "__html__"):  # escaped text has its own way
            return NotImplemented
        return joined((self, other))

    def __radd__(self, other: str) -> MarkedText:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return joined((other, self))

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        check_size(len(self) * operator.index(count))
        return MarkedText(str.__mul__(self, count), self._marks * operator.index(count))

    __rmul__ = __mul__

    def join(self, iterable: Iterable[str], /) -> MarkedText:
        return joined(iterable, self)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:  # type: ignore[override]
        times = str.count(self, old)
        check_size(len(self) + times * (len(new) - len(old)))
        marks = set(self._marks + (MarkedText.of(new)._marks if times else b""))
        if len(marks) == 1 or not old:  # all the same, or too small to follow
            replaced = str.replace(self, old, new, count)
            return MarkedText.written(replaced) if marks == {1} else replaced
        return MarkedText.of(new).join(self.split(old, count))

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        check_size(operator.index(width))
        return self + str.ljust(self, width, fillchar)[len(self) :]

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        check_size(operator.index(width))
        filled = str.rjust(self, width, fillchar)
        return filled[: len(filled) - len(self)] + self

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        check_size(operator.index(width))
        return str.center(self, width, fillchar)

    def zfill(self, width: SupportsIndex, /) -> str:
        check_size(operator.index(width))
        return str.zfill(self, width)

    # -- other characters ------------------------------------------------------------------------

    def lower(self) -> str:
        return self._mapped(str.lower)

    def upper(self) -> str:
        return self._mapped(str.upper)

    def casefold(self) -> str:
        return self._mapped(str.casefold)

    def capitalize(self) -> str:
        return self._mapped(str.capitalize)

    def title(self) -> str:
        return self._mapped(str.title)

    def swapcase(self) -> str:
        return self._mapped(str.swapcase)

    def _mapped(self, change: Callable[[str], str]) -> str:
        """No character becomes less than one: where the length is kept, each is in its place."""
        changed = change(self)
        return MarkedText(changed, self._marks) if len(changed) == len(self) else changed

    # -- formats ---------------------------------------------------------------------------------

    def __mod__(self, values: Any) -> str:
        check_widths(self)
        spelled(values)
        if any("*" in match["form"] for match in _CONVERSION.finditer(self)):
            raise TemplateLimitError("formats a text to a width that is not in the format")
        plain = str.__mod__(_plain(self), values)  # refuses what does not fit, too
        return like(plain, self._filled(values))

    def _filled(self, values: Any) -> Iterator[str]:
        """The pieces of `self % values`."""
        in_order = iter(values if isinstance(values, tuple) else (values,))
        end = 0
        for match in _CONVERSION.finditer(self):
            yield self[end : match.start()]
            end = match.end()
            key, form, kind = match["key"], match["form"], match["type"]
            if kind == "%":
                yield self[end - 1 : end]
                continue
            value = next(in_order) if key is None else values[key]
            whole = isinstance(value, str) and not form and kind == "s"
            yield value if whole else f"%{form}{kind}" % (value,)
        yield self[end:]


class EscapedText(Markup):
    """What the filter `safe` makes of a text: whatever is added to it is escaped, as for web pages.

    Marks are kept as far as adding goes; other operations give some without marks.
    """

    _marks = b""

    @classmethod
    def of(cls, text: MarkedText) -> EscapedText:
        self = cls(_plain(text))
        self._marks = text._marks
        return self

    def __str__(self) -> str:
        return MarkedText(_plain(self), self._marks or bytes(len(self)))

    def __add__(self, other: str) -> EscapedText:  # type: ignore[override]
        return self.of(joined((str(self), _escaped(other))))

    def __radd__(self, other: str) -> EscapedText:  # type: ignore[override]
        return self.of(joined((_escaped(other), str(self))))


def _escaped(text: str) -> str:
    escaped = str(escape(text))
    return text if escaped == text and not hasattr(text, "__html__") else escaped


def joined(pieces: Iterable[str], separator: MarkedText | None = None) -> MarkedText:
    """The pieces in a row, with their marks. Raises TemplateLimitError, and TypeError for what is
    no string."""
    texts: list[str] = []
    marks: list[bytes] = []
    size = 0
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"expected a string to join, not {type(piece).__name__}")
        size += len(piece) + len(separator or "")
        check_size(size)
        texts.append(piece)
        marks.append(piece._marks if isinstance(piece, MarkedText) else bytes(len(piece)))
    between, mark = separator.unmarked() if separator else ("", b"")
    return MarkedText(between.join(texts), mark.join(marks))


def like(plain: str, pieces: Iterable[str]) -> str:
    """The text with the marks of the pieces that it should be made of; without, if it is not."""
    marked = joined(pieces)
    return marked if marked == plain else plain


def _plain(text: str) -> str:
    return str.__str__(text)  # without marks, as `MarkedText` has overridden it
