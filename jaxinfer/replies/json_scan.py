"""JSON as it comes: read piece by piece, each known to be good so far (RFC 8259)."""

from __future__ import annotations

import json
import re

from jaxinfer.replies.scan import Quiet, Steps, Text, collected, match, peek

DEEPEST = 64  # levels of a value

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PARTS = re.compile(r"[0-9+\-.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]")
_WORDS = {"t": "true", "f": "false", "n": "null"}


def value(text: Text, depth: int = 0) -> Steps[str, bool]:
    """Say a value, as it is written. Returns False at the first character that makes it none.

    Control characters in strings, which models write and JSON forbids, are said as their escapes.
    """
    first = yield from peek(text)
    if first in ("{", "["):
        return (yield from _container(text, depth))
    if first == '"':
        return (yield from string(text))
    if first in _WORDS:
        word = yield from match(text, _WORDS[first])
        if word:
            yield word
        return bool(word)
    number = ""
    while (yield from peek(text)) and (size := text.run(_NUMBER_PARTS)):
        number += text.take(size)
    if number:
        yield number
    return _NUMBER.fullmatch(number) is not None


def space(text: Text) -> Steps[str, None]:
    """Say white space."""
    while (yield from peek(text)) and (size := text.run(_SPACE)):
        yield text.take(size)


def _container(text: Text, depth: int) -> Steps[str, bool]:
    if depth == DEEPEST:
        return False
    opened = text.take(1)
    yield opened
    closing = "}" if opened == "{" else "]"
    yield from space(text)
    if (yield from peek(text)) == closing:
        yield text.take(1)
        return True
    while True:
        if opened == "{" and not (yield from _key(text)):
            return False
        if not (yield from value(text, depth + 1)):
            return False
        yield from space(text)
        if (following := (yield from peek(text))) not in (",", closing) or not following:
            return False
        yield text.take(1)
        if following == closing:
            return True
        yield from space(text)


def _key(text: Text) -> Steps[str, bool]:
    """Say a member's key, up to its value."""
    if (yield from peek(text)) != '"' or not (yield from string(text)):
        return False
    yield from space(text)
    if (yield from peek(text)) != ":":
        return False
    yield text.take(1)
    yield from space(text)
    return True


def string(text: Text) -> Steps[str, bool]:
    """Say a string, whose first quote is next."""
    yield text.take(1)
    while char := (yield from peek(text)):
        if size := text.run(_PLAIN):
            yield text.take(size)
        elif char == '"':
            yield text.take(1)
            return True
        elif char == "\\":
            if not (yield from _escape(text)):
                return False
        else:
            yield json.dumps(text.take(1))[1:-1]
    return False


def _escape(text: Text) -> Steps[str, bool]:
    written = text.take(1)
    char = yield from peek(text)
    if char and char in '"\\/bfnrt':
        yield written + text.take(1)
        return True
    if char == "u":
        written += text.take(1)
        while len(written) < 6 and (char := (yield from peek(text))) and _HEX.match(char):
            written += text.take(1)
    yield written
    return len(written) == 6


def read_string(text: Text) -> Quiet[str | None]:
    """What a string says, read whole; None if there is none here."""
    if (yield from peek(text)) != '"':
        return None
    written, good = yield from collected(string(text))
    return json.loads(written) if good else None


def read_value(text: Text) -> Quiet[str]:
    """A value as it is written, read whole; "" for none."""
    written, good = yield from collected(value(text))
    return written if good else ""
