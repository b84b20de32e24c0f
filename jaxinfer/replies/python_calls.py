"""Calls of tools written as calls of Python: Llama's [f(a=1), g()] and OLMo 3's, one a line."""

from __future__ import annotations

import ast
import json
import re

from jaxinfer.replies.calls import Offered, Outcome, begin, several, tagged, unmarked
from jaxinfer.replies.events import Arguments, Reading
from jaxinfer.replies.scan import Text, match, name, peek, skip_space

_FUNCTION = re.compile(r"[\w.]+")
_KEYWORD = re.compile(r"\w+")
_PLAIN = re.compile(r"""[^"'\\()\[\]{},]+""")  # of a literal, outside of strings
_IN_STRING = re.compile(r"""[^"'\\]+""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def pythonic(text: Text, offered: Offered) -> Reading[None]:
    """The reply is [f(a=1, b="x"), g()], of tools that are offered."""
    yield from unmarked(text, offered, "<|python_tag|>", _list)


def olmo3(text: Text, offered: Offered) -> Reading[None]:
    """<function_calls>, a call a line, </function_calls>"""
    yield from tagged(text, offered, ["<function_calls>"], ["</function_calls>"], _lines)


def _list(text: Text, offered: Offered) -> Reading[Outcome]:
    if not (yield from match(text, "[")):
        return Outcome.NONE
    return (yield from several(text, lambda: _call(text, offered), ",", "]"))


def _lines(text: Text, offered: Offered) -> Reading[Outcome]:
    return (yield from several(text, lambda: _call(text, offered)))


def _call(text: Text, offered: Offered) -> Reading[Outcome]:
    called = yield from name(text, _FUNCTION)
    if called not in offered.names or not (yield from match(text, "(")):
        return Outcome.NONE
    yield from begin(text, called)
    before_next, may_follow = "{", True
    while True:
        yield from skip_space(text)
        if (yield from match(text, ")")):
            yield Arguments("{}" if before_next == "{" else "}")
            return Outcome.DONE
        if not may_follow or not (yield from _argument(text, before_next)):
            return Outcome.BROKEN
        before_next = ", "
        yield from skip_space(text)
        may_follow = bool((yield from match(text, ",")))


def _argument(text: Text, before: str) -> Reading[bool]:
    """Say keyword=literal as a member of an object; as it is written, if it is something else."""
    keyword = yield from name(text, _KEYWORD)
    yield from skip_space(text)
    if not keyword or not (yield from match(text, "=")):
        yield Arguments(keyword)
        return False
    written = yield from _literal(text)
    said = _as_json(written)
    yield Arguments(f"{keyword}={written}" if said is None else f'{before}"{keyword}": {said}')
    return said is not None


def _literal(text: Text) -> Reading[str]:
    """Read up to the comma or bracket behind a literal."""
    pieces: list[str] = []
    opened: list[str] = []
    quote = ""
    while char := (yield from peek(text)):
        if size := text.run(_IN_STRING if quote else _PLAIN):
            pieces.append(text.take(size))
        elif char == "\\":
            pieces.append(text.take(1))
            if (yield from peek(text)):
                pieces.append(text.take(1))
        elif quote:
            if char == quote:
                quote = ""
            pieces.append(text.take(1))
        elif not opened and char in ",)]}":
            break
        else:
            if char in "\"'":
                quote = char
            elif char in _CLOSING:
                opened.append(_CLOSING[char])
            elif opened and char == opened[-1]:
                opened.pop()
            pieces.append(text.take(1))
    return "".join(pieces)


def _as_json(written: str) -> str | None:
    """A Python literal as JSON; None for what is none."""
    try:
        value = ast.literal_eval(written.strip())
        said = json.dumps(value, ensure_ascii=False, allow_nan=False)
        said.encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return said
