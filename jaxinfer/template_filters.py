"""The filters of chat templates: Jinja's, metered, and where those would lose marks, ours.

Jinja's filters that only choose, order or test work with marked text as they are. The others give
plain text, which counts as nobody's: none of them has a use around a template's special tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Environment, pass_environment, pass_eval_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.sandbox import MAX_RANGE

from jaxinfer.template_limits import TemplateLimitError, check_operands, check_size, made, spelled
from jaxinfer.template_text import EscapedText, MarkedText

_MAX_JSON_SPACE = 64  # characters before or after each part
_WITHOUT_USE = ("urlize", "wordwrap", "xmlattr")  # for web pages, and costly
_SPELLING = frozenset({  # what these get becomes text, containers too
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint",
    "replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper",
    "urlencode", "wordcount",
})  # fmt: skip


def metered_filters() -> dict[str, Callable[..., Any]]:
    """All filters by their names."""
    kept = {name: function for name, function in FILTERS.items() if name not in _WITHOUT_USE}
    return {name: _metered(name, function) for name, function in (kept | _OURS).items()}


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        if name in _SPELLING:
            for value in args:
                spelled(value)
        return made(function(*args, **kwargs))

    return filter_


@pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return MarkedText.of(str(d)).join(str(spelled(each)) for each in value)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = MarkedText.of(str(s))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes values by place or by name, not both")
    return MarkedText.of(str(value)) % (kwargs or args)


def _safe(value: Any) -> str:
    if hasattr(value, "__html__"):
        return FILTERS["safe"](value)
    return EscapedText.of(MarkedText.of(str(value)))


def _center(value: Any, width: int = 80) -> str:
    return MarkedText.of(str(value)).center(width)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    step = len(width) if isinstance(width, str) else width
    check_size(len(text) + step * (text.count("\n") + 1))
    return FILTERS["indent"](text, width, first, blank)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterable[Any]:
    _check_count("batch", linecount)
    return FILTERS["batch"](value, linecount, fill_with)


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> Iterable[Any]:
    _check_count("slice", slices)
    return list(FILTERS["slice"](value, slices, fill_with))


def _check_count(what: str, count: int) -> None:
    if count > MAX_RANGE:
        raise TemplateLimitError(f"asks {what} for {count} parts; {MAX_RANGE} is the limit")


@pass_environment
def _sum(
    environment: Environment,
    iterable: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for value in iterable:
        check_operands("+", start, value)
        start = made(start + value)
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would escape for HTML."""
    widths = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
    if max(widths) > _MAX_JSON_SPACE:
        raise TemplateLimitError(
            f"puts {max(widths)} characters between JSON's parts; {_MAX_JSON_SPACE} is the limit"
        )
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_OURS: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "safe": _safe,
    "slice": _slice,
    "sum": _sum,
    "tojson": _tojson,
}
