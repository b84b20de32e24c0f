"""Reasoning before a reply, between two marks: <think>…</think> and its like."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.replies.events import Content, Reading, Reasoning
from jaxinfer.replies.scan import Marks, Text, match, skip_space, until

TAIL = 16  # tokens of a prompt's end that show whether it begins the reasoning


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family writes its reasoning.

    Attributes:
        pairs: marks of its beginning and its end.
        reply: marks around the reply behind it, which are left out.
    """

    pairs: tuple[tuple[str, str], ...]
    reply: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return sum(self.pairs, self.reply or ())

    def opened(self, tail: str) -> str:
        """The mark that ends the reasoning which a prompt's end began, "" if it began none."""
        ends = [end for start, end in self.pairs if tail.rstrip().endswith(start)]
        return ends[0] if ends else ""

    def read(self, text: Text, opened: str = "") -> Reading[None]:
        """Read the reasoning that a reply begins with, if it does."""
        begin = text.position
        text.keep()
        yield from skip_space(text)
        mark = yield from match(text, *(start for start, _ in self.pairs))
        space = text.release()
        end = dict(self.pairs)[mark] if mark else opened
        if not end:
            if space:
                yield Content(space)
            return
        yield from skip_space(text)
        yield from until(text, Marks([end]), Reasoning)
        text.reasoning.append((begin, text.position))
        yield from skip_space(text)
        if self.reply is not None and (yield from match(text, self.reply[0])):
            yield from skip_space(text)
            yield from until(text, Marks([self.reply[1]]), Content)


THINK = Thinking((("<think>", "</think>"),))
SEED = Thinking((("<seed:think>", "</seed:think>"),))
MAGISTRAL = Thinking((("[THINK]", "[/THINK]"),))
COHERE = Thinking((("<|START_THINKING|>", "<|END_THINKING|>"),))
GRANITE = Thinking(
    (
        ("<think>", "</think>"),
        ("Here is my thought process:", "Here is my response:"),
        ("Here's my thought process:", "Here's my response:"),
    ),
    ("<response>", "</response>"),
)
