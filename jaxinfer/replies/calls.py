"""Calls of tools between marks, and as JSON objects.

What looks like the beginning of a call and is none, is content, the marks too. A call begins when
its name and the brace of its arguments have come. If it breaks after that, what follows up to its
end is still given as its arguments, which are then no JSON: the name was said already.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.replies.events import Arguments, CallStart, Content, Reading, Says
from jaxinfer.replies.json_scan import read_string, read_value, value
from jaxinfer.replies.scan import (
    Marks,
    Quiet,
    Text,
    match,
    peek,
    rest,
    skip_space,
    told,
    until,
)

_NAME = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_WITHOUT_USE = ("id", "type", "tool_call_id")  # members that some families write besides


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools that a request offers: the JSON schema of their parameters by their names."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> Container[str]:
        return self.parameters


class Outcome(enum.Enum):
    """What trying to read calls came to."""

    NONE = enum.auto()  # what was read is kept in the text
    DONE = enum.auto()
    BROKEN = enum.auto()  # within the arguments


Body = Callable[[Text, Offered], Reading[Outcome]]


def attempt(text: Text, offered: Offered, mark: str, body: Body) -> Reading[Outcome]:
    """Read calls by `body` after a mark that was read; what is none is content with its mark."""
    text.keep(len(mark))
    yield from skip_space(text)
    outcome = yield from body(text, offered)
    if outcome is Outcome.NONE:
        yield Content(text.release())
    return outcome


def tagged(
    text: Text, offered: Offered, starts: Sequence[str], ends: Sequence[str], body: Body
) -> Reading[None]:
    """Read content with calls after each of the starts, and before each of the ends, if any."""
    marks = Marks([*starts, *ends])
    within = False
    mark = yield from until(text, marks, Content)
    while mark:
        outcome = Outcome.NONE
        if mark in starts:
            outcome = yield from attempt(text, offered, mark, body)
            within = outcome is not Outcome.NONE
        elif not within:
            yield Content(mark)
        else:
            within = False
        says: Says = Arguments if outcome is Outcome.BROKEN else Content
        mark = yield from until(text, marks, says)


def unmarked(text: Text, offered: Offered, tag: str, body: Body) -> Reading[None]:
    """Read a reply that begins with calls, maybe after a tag; the tag marks others behind it."""
    text.keep()
    yield from skip_space(text)
    yield from match(text, tag)
    outcome = Outcome.DONE
    while outcome is Outcome.DONE:
        yield from skip_space(text)
        outcome = yield from body(text, offered)
        if outcome is Outcome.DONE:
            text.keep()
            yield from skip_space(text)
            yield from match(text, ";")
    if outcome is Outcome.BROKEN:
        yield from rest(text, Arguments)
    else:
        yield Content(text.release())
        yield from tagged(text, offered, [tag], [], body)


def bare_arguments(text: Text, name: str) -> Reading[Outcome]:
    """Read the arguments of a call whose name is known: an object by itself."""
    if not name or (yield from peek(text)) != "{":
        return Outcome.NONE
    yield from begin(text, name)
    good = yield from told(value(text), Arguments)
    return Outcome.DONE if good else Outcome.BROKEN


def json_calls(text: Text, offered: Offered) -> Reading[Outcome]:
    """Read an object that is a call, or a list of them."""
    return (yield from _calls(text, None))


def known_json_calls(text: Text, offered: Offered) -> Reading[Outcome]:
    """The same of tools that are offered alone: without marks, other JSON is no call."""
    return (yield from _calls(text, offered.names))


def _calls(text: Text, known: Container[str] | None) -> Reading[Outcome]:
    if not (yield from match(text, "[")):
        return (yield from _call(text, known))
    return (yield from several(text, lambda: _call(text, known), ",", "]"))


def several(
    text: Text, call: Callable[[], Reading[Outcome]], between: str = "", after: str = ""
) -> Reading[Outcome]:
    """Read calls one after the other; what comes in the place of a further one is content."""
    outcome = Outcome.NONE
    while True:
        if outcome is Outcome.DONE:
            text.keep()
        yield from skip_space(text)
        before, outcome = outcome, (yield from call())
        if outcome is Outcome.NONE and before is Outcome.DONE:
            yield Content(text.release())
            return before
        if outcome is not Outcome.DONE:
            return outcome
        if between:
            yield from skip_space(text)
            if (yield from match(text, between, after)) != between:
                return outcome


def _call(text: Text, known: Container[str] | None) -> Reading[Outcome]:
    """Read an object with a name and arguments, in any order."""
    if not (yield from match(text, "{")):
        return Outcome.NONE
    name, held, begun = "", None, False
    while (key := (yield from _key(text))) is not None:
        if key in _NAME and not name:
            name = (yield from read_string(text)) or ""
            good = name.isprintable() and bool(name) and (known is None or name in known)
            if good and held is not None:
                begun = yield from _say_call(text, name, held)
        elif key in _ARGUMENTS and not begun and held is None:
            if name and (yield from peek(text)) == "{":
                yield from begin(text, name)
                if not (yield from told(value(text), Arguments)):
                    return Outcome.BROKEN
                begun = good = True
                text.keep()
            else:
                held = _as_object((yield from read_value(text)))
                good = held is not None
                if good and name:
                    begun = yield from _say_call(text, name, held)
        else:
            good = key in _WITHOUT_USE and (yield from read_value(text)) != ""
        if not good:
            break
        yield from skip_space(text)
        closing = yield from match(text, ",", "}")
        if closing == "}" and name:
            if not begun:
                yield from _say_call(text, name, "{}")
            text.release()
            return Outcome.DONE
        if closing != ",":
            break
    if begun:
        yield Content(text.release())
    return Outcome.DONE if begun else Outcome.NONE


def begin(text: Text, name: str) -> Reading[None]:
    """The call is certain: what was read for it is not content."""
    text.release()
    yield CallStart(name)


def _say_call(text: Text, name: str, arguments: str | None) -> Reading[bool]:
    yield from begin(text, name)
    yield Arguments(arguments or "{}")
    text.keep()
    return True


def _key(text: Text) -> Quiet[str | None]:
    """Read a member's key, up to its value."""
    yield from skip_space(text)
    key = yield from read_string(text)
    yield from skip_space(text)
    if not (yield from match(text, ":")):
        return None
    yield from skip_space(text)
    return key


def _as_object(written: str) -> str | None:
    """Arguments that are an object, nothing, or a string that says an object; None for others."""
    if written == "null":
        return "{}"
    if written.startswith('"'):
        written = json.loads(written)
    try:
        written.encode()  # which half of a surrogate pair, escaped twice, fails
        return written if isinstance(json.loads(written), dict) else None
    except (ValueError, RecursionError):
        return None
