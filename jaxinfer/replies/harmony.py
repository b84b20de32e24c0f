"""gpt-oss's form of replies: messages on channels, with headers of their own.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>reply
Calls of tools are messages to functions.NAME. The prompt has the first <|start|>assistant.
"""

from __future__ import annotations

import re

from jaxinfer.replies.calls import Offered
from jaxinfer.replies.events import Arguments, CallStart, Content, Reading, Reasoning, Says
from jaxinfer.replies.scan import Marks, Text, more, peek, skip_space, until

MARKS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_HEADER_END = Marks(["<|message|>", "<|end|>", "<|call|>", "<|return|>"])
_END = Marks(["<|end|>", "<|call|>", "<|return|>", "<|start|>"])
_LONGEST_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/-]+)")


def harmony(text: Text, offered: Offered | None) -> Reading[None]:
    """Read a reply; calls are for tools that are `offered`."""
    said: set[Says] = set()
    while (yield from peek(text)):
        start = text.position
        text.keep()
        header = yield from _header(text)
        if header is None:
            yield Content(text.release())
            continue
        says = _kind(header, offered)
        if says is Arguments:
            text.release()
            yield from _call(text, header)
            continue
        if says is None:
            yield Content(text.release())
            says = Content
        else:
            text.release()
            if says in said:
                yield says("\n")
            said.add(says)
        yield from until(text, _END, says)
        if says is Reasoning:
            text.reasoning.append((start, text.position))
        yield from skip_space(text)


def _header(text: Text) -> Reading[str | None]:
    """Read up to a message; None, and what was read, where none begins soon."""
    while True:
        found = _HEADER_END.found(text)
        if found and found[0] <= _LONGEST_HEADER:
            header = text.take(found[0])
            return header if text.take(len(found[1])) == "<|message|>" else None
        if text.waiting - _HEADER_END.begun(text) > _LONGEST_HEADER:
            text.take(_LONGEST_HEADER)
            return None
        if not (yield from more(text)):
            text.take(text.waiting)
            return None


def _kind(header: str, offered: Offered | None) -> Says | None:
    """What a message is; None for a call that nobody takes."""
    recipient = _RECIPIENT.search(header)
    if recipient and recipient[1]:
        return Arguments if offered is not None else None
    channel = _CHANNEL.search(header)
    thought = recipient or (channel and channel[1] == "analysis")
    return Reasoning if thought else Content


def _call(text: Text, header: str) -> Reading[None]:
    recipient = _RECIPIENT.search(header)
    assert recipient is not None
    yield CallStart(recipient[2])
    start = text.position
    mark = yield from until(text, _END, Arguments)
    if text.position - start == len(mark):
        yield Arguments("{}")
    yield from skip_space(text)
