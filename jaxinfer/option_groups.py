"""Options of a command line that belong together, declared once for all commands that take them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in place of each parameter that is a group, the group's options.

    A group is a dataclass whose fields are annotated as Typer's options and have defaults. The
    command itself receives what was given as one object of it.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made: dict[str, Any] = {}
        for name, group in groups.items():
            members = {field.name: given.pop(field.name) for field in dataclasses.fields(group)}
            made[name] = group(**members)
        command(**given, **made)

    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: t for n, t in hints.items() if dataclasses.is_dataclass(t)}
    parameters = list(_parameters(command, hints, groups))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameters(
    command: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    """The command's own and those of its groups, in the order in which help shows them."""
    for name, parameter in inspect.signature(command).parameters.items():
        members, types = {name: parameter}, hints
        if name in groups:
            members = dict(inspect.signature(groups[name]).parameters)
            types = get_type_hints(groups[name], include_extras=True)
        for member in members.values():
            yield member.replace(annotation=types[member.name], kind=inspect.Parameter.KEYWORD_ONLY)
