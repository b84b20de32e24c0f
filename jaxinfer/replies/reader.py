"""Reads one reply while it comes: what of each delta's text is reasoning, calls and content."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.replies.calls import Offered
from jaxinfer.replies.events import Arguments, CallStart, Content, Event, Reading, Reasoning
from jaxinfer.replies.formats import HARMONY, REASONING_PARSERS, TOOL_PARSERS, ReplyFormat
from jaxinfer.replies.harmony import harmony
from jaxinfer.replies.promised import read_promised
from jaxinfer.replies.scan import Text, rest
from jaxinfer.request import RequestError, Violation

if TYPE_CHECKING:
    from jaxinfer.text import Delta


@dataclass(slots=True)
class CallDelta:
    """What is new of a call: its id and name come once, with its beginning."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Replies:
    """How the replies to one request are read.

    Attributes:
        offered: the tools that may be called; None reads no calls.
        parallel: whether there may be several calls; otherwise those behind the first are left out.
        promised: the reply is held to be calls alone (`promised.only_calls`).
    """

    format: ReplyFormat
    offered: Offered | None = None
    parallel: bool = True
    promised: bool = False

    @property
    def kept(self) -> frozenset[int]:
        """Special tokens that are in the text that is read."""
        form = self.format
        return (
            form.reasoning_marks if self.offered is None else form.reasoning_marks | form.tool_marks
        )


def replies_with(
    form: ReplyFormat,
    tools: Mapping[str, Mapping[str, Any]],
    parallel: bool = True,
    promised: bool = False,
) -> Replies | None:
    """How replies are read where these tools may be called, by their parameters' JSON schemas; None
    where there is nothing to read. Raises RequestError where calls cannot be."""
    if tools and not (form.tool_parser or promised):
        why = (
            "is given, and how this model calls tools is not known; serve it with"
            f" --tool-call-parser and one of {', '.join(TOOL_PARSERS)}"
        )
        raise RequestError([Violation("tools", why)])
    if not (tools or form.reasoning_parser or form.harmony):
        return None
    return Replies(form, Offered(tools) if tools else None, parallel, promised)


class ReplyReader:
    """One reply. White space at the ends of its parts is left out where there are several."""

    def __init__(self, replies: Replies, prompt_tail: str):
        self._replies = replies
        self._text = Text()
        self._steps = self._reading(prompt_tail)
        self._space: dict[type[Event], str] = {Content: "", Reasoning: ""}  # held back
        self._begun: set[type[Event]] = set()  # of what something was said
        self._calls = 0
        self._token_starts: list[int] = []  # in characters of the text
        self._characters = 0

    def _reading(self, prompt_tail: str) -> Reading[None]:
        form, offered = self._replies.format, self._replies.offered
        if self._replies.promised and offered is not None:
            yield from read_promised(self._text, offered)
            return
        if form.harmony:
            yield from harmony(self._text, offered)
            return
        if form.reasoning_parser:
            family = REASONING_PARSERS[form.reasoning_parser]
            yield from family.read(self._text, family.opened(prompt_tail))
        if offered is not None and form.tool_parser:
            yield from TOOL_PARSERS[form.tool_parser].read(self._text, offered)
        yield from rest(self._text, Content)

    def token(self, characters: int) -> None:
        """A token made so many characters of the text."""
        if self._replies.format.reasoning_parser:
            self._token_starts.append(self._characters)
            self._characters += characters

    def read(self, delta: Delta) -> None:
        """Take the text of a delta apart."""
        self._text.add(delta.text)
        self._text.ended = delta.finish is not None
        delta.text = ""
        for event in self._steps:
            if event is None:  # it needs more of the text
                break
            self._say(event, delta)
        if delta.finish is not None:
            if not self._calls:
                delta.text += self._space[Content]
            if self._replies.format.reasoning_parser:
                delta.reasoning_tokens = self._reasoning_tokens()

    def _say(self, event: Event, delta: Delta) -> None:
        if isinstance(event, CallStart):
            self._calls += 1
            if self._takes_call:
                new_id = TOOL_PARSERS[self._replies.format.tool_parser or HARMONY].new_id()
                delta.calls.append(CallDelta(self._calls - 1, new_id, event.name))
        elif isinstance(event, Arguments):
            if self._takes_call:
                delta.add_call(CallDelta(self._calls - 1, arguments=event.text))
        elif isinstance(event, Content):
            delta.text += self._without_end(event)
        else:
            delta.reasoning += self._without_end(event)

    def _without_end(self, event: Content | Reasoning) -> str:
        """What was held back and what comes, without white space that may be the last of it."""
        kind = type(event)
        whole = self._space[kind] + event.text
        if self._calls and kind not in self._begun:
            whole = whole.lstrip()
        shown = whole.rstrip()
        self._space[kind] = whole[len(shown) :]
        if shown:
            self._begun.add(kind)
        return shown

    @property
    def _takes_call(self) -> bool:
        return self._replies.parallel or self._calls == 1

    def _reasoning_tokens(self) -> int:
        starts = self._token_starts
        return sum(
            bisect.bisect_left(starts, end) - bisect.bisect_left(starts, begin)
            for begin, end in self._text.reasoning
        )
