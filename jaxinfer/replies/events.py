"""What the readers of replies say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.replies.scan import Steps


@dataclass(frozen=True, slots=True)
class Content:
    """A part of what is for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what the model thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins: its name is known."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments, JSON text, of the call that began last."""

    text: str


Event = Content | Reasoning | CallStart | Arguments
type Reading[Result] = Steps[Event, Result]
Says = Callable[[str], Event]  # what a part of the text is
