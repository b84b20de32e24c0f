"""Calls that are promised: the form that a reply is held to, and how such a reply is read.

Where a call must be made, the reply is a JSON list of calls and nothing else, whatever form the
model was taught. Where one may be made and its arguments must follow a schema, a reply is free up
to the mark of a call, which then has to be one of those offered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.replies.calls import Offered, Outcome, json_calls
from jaxinfer.replies.events import Content, Reading
from jaxinfer.replies.scan import Text, rest
from jaxinfer.structured import StructuredOutput

_ANY = {"type": "object"}
# White space between parts of JSON, without which it is endless in some models' outputs.
_SPACE = {"x-guidance": {"whitespace_pattern": r"[ \n]{1,8}"}}


def only_calls(tools: Mapping[str, Mapping[str, Any]], several: bool) -> StructuredOutput:
    """A list of calls of these tools, by their parameters' JSON schemas; of one, if not several.

    Raises ValueError for a schema that JSON cannot say.
    """
    more = ' (", " call)*' if several else ""
    return StructuredOutput.grammar(f'start: "[" call{more} "]"\n{_call(tools)}')


def tagged_calls(tools: Mapping[str, Mapping[str, Any] | None]) -> StructuredOutput:
    """Hermes' form, held to its tags: text with calls of these tools, whose arguments follow the
    schemas; None is any object. Raises ValueError for a schema that JSON cannot say."""
    rules = r"""start: tagged* end
end: TEXT
TEXT: /(.|\n)*/
begun[lazy]: TEXT "<tool_call>"
tagged: begun "\n" call "\n</tool_call>"
"""
    return StructuredOutput.grammar(rules + _call(tools))


def _call(tools: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The rule `call`, in Lark's form. Each schema is one of its own, as its references are."""
    lines = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, (name, schema) in enumerate(tools.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        try:
            said = json.dumps(
                _SPACE | _ANY | dict(schema or {}), ensure_ascii=False, allow_nan=False
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the schema of {name!r} is no JSON: {error}") from error
        lines.append(f'call_{number}: {json.dumps(head, ensure_ascii=False)} %json {said} "}}"')
    return "\n".join(lines)


def read_promised(text: Text, offered: Offered) -> Reading[None]:
    """Read a reply that was held to be calls."""
    text.keep()
    if (yield from json_calls(text, offered)) is Outcome.NONE:
        yield Content(text.release())
    yield from rest(text, Content)
