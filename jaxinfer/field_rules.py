"""What a value in somebody's file may be, and one way of saying that it is not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field accepts: `what` in words, for messages; `nullable`: null says it is not set."""

    what: str
    accepts: Callable[[Any], bool]
    nullable: bool = False

    def or_null(self) -> Rule:
        return dataclasses.replace(self, nullable=True)

    def check(self, name: str, value: Any) -> Any:
        """The value itself. Raises ValueError naming the field, its value and what is expected."""
        if value is None and not self.nullable:
            raise ValueError(f"{name} is null; expected {self.what}")
        if value is not None and not self.accepts(value):
            raise ValueError(f"{name} = {shown(value)}, expected {self.what}")
        return value


def integer(least: int, most: int) -> Rule:
    return Rule(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float, *, above: bool = False) -> Rule:
    """Between the bounds; `above` the lower one, where that itself is none of them."""

    def accepts(value: Any) -> bool:
        return is_number(value) and least <= value <= most and not (above and value == least)

    bounds = f"above {least:g}, at most {most:g}" if above else f"from {least:g} to {most:g}"
    return Rule(f"a number {bounds}", accepts)


def one_of(*values: Any) -> Rule:
    return Rule(
        " or ".join(map(repr, values)),
        lambda value: any(type(value) is type(own) and value == own for own in values),
    )


def list_of(rule: Rule) -> Rule:
    return Rule(
        f"a list, each of it {rule.what}",
        lambda value: isinstance(value, list) and all(map(rule.accepts, value)),
    )


def either(*rules: Rule) -> Rule:
    return Rule(
        " or ".join(rule.what for rule in rules),
        lambda value: any(rule.accepts(value) for rule in rules),
    )


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a text", lambda value: isinstance(value, str))
SETTINGS = Rule("settings by name", lambda value: isinstance(value, dict))


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)


def agreed(given: Mapping[str, Any], default: Any = None) -> Any:
    """The value of a setting that a file may give under several names; None is not given.

    Raises ValueError naming two that differ.
    """
    stated = {name: value for name, value in given.items() if value is not None}
    if not stated:
        return default
    (first, value), *others = stated.items()
    for name, other in others:
        if other != value:
            raise ValueError(
                f"{first} = {shown(value)} contradicts {name} = {shown(other)}; remove one of them"
            )
    return value


def shown(value: Any) -> str:
    """A value as messages have it, cut short if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
