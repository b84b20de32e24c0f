"""Calls of tools with a tag for each argument: Qwen3-Coder's and Seed-OSS's."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxinfer.replies.calls import Offered, Outcome, begin, several, tagged
from jaxinfer.replies.events import Arguments, Reading
from jaxinfer.replies.scan import Marks, Text, collected, match, name, skip_space, until

_NAME = re.compile(r"[^<>\s]+")
_END = Marks(["</parameter>"])


def qwen3_coder(text: Text, offered: Offered) -> Reading[None]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>"""
    yield from tagged(text, offered, ["<tool_call>"], ["</tool_call>"], _functions)


def seed_oss(text: Text, offered: Offered) -> Reading[None]:
    """The same between <seed:tool_call> and </seed:tool_call>."""
    yield from tagged(text, offered, ["<seed:tool_call>"], ["</seed:tool_call>"], _functions)


def _functions(text: Text, offered: Offered) -> Reading[Outcome]:
    return (yield from several(text, lambda: _function(text, offered)))


def _function(text: Text, offered: Offered) -> Reading[Outcome]:
    called = (yield from match(text, "<function=")) and (yield from name(text, _NAME))
    if not called or not (yield from match(text, ">")):
        return Outcome.NONE
    yield from begin(text, called)
    schemas = _properties(offered.parameters.get(called))
    before_next = "{"
    while True:
        yield from skip_space(text)
        if (yield from match(text, "</function>")):
            yield Arguments("{}" if before_next == "{" else "}")
            return Outcome.DONE
        if not (yield from match(text, "<parameter=")):
            return Outcome.BROKEN
        key = yield from name(text, _NAME)
        if not (yield from match(text, ">")):
            yield Arguments(f"<parameter={key}")
            return Outcome.BROKEN
        written, end = yield from collected(until(text, _END, str))
        written = written.removeprefix("\n").removesuffix("\n")
        said = json.dumps(key, ensure_ascii=False) + ": " + _as_json(written, schemas.get(key))
        yield Arguments(before_next + said)
        if not end:
            return Outcome.BROKEN
        before_next = ", "


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _as_json(written: str, schema: Any) -> str:
    """An argument by its schema: a text if that says so or says nothing, and if it is no JSON."""
    if isinstance(schema, dict) and schema.get("type") != "string" and schema:
        try:
            said = json.dumps(json.loads(written), ensure_ascii=False, allow_nan=False)
            said.encode()  # which half of a surrogate pair fails
            return said
        except (ValueError, RecursionError):
            pass
    return json.dumps(written, ensure_ascii=False)
