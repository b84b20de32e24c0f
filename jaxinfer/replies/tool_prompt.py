"""Tools for models whose chat template knows none, in the form that SmolLM2 and Hermes write.

The system message tells of the tools, calls become text of the assistant's messages, and results
messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
You can use these functions, given with the JSON schema of their parameters:
<tools>
{tools}
</tools>
Where one helps, reply with nothing but a list of calls, each with a name and arguments:
<tool_call>
[{{"name": "a function's name", "arguments": {{"a parameter": "its value"}}}}]
</tool_call>
Results are given between <tool_response> and </tool_response>. Where none helps, reply as usual."""

_TAGGED = "<tool_call>\n[{}]\n</tool_call>"


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages without calls and results but as text, and the tools in the system message."""
    told: list[dict[str, Any]] = []
    result_before = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and result_before:  # one turn of the user, as templates may want
            told[-1]["content"] += "\n" + _response(message)
        elif is_result:
            told.append({"role": "user", "content": _response(message)})
        else:
            told.append(calls_told(message))
        result_before = is_result
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=listed)
        if told[0]["role"] == "system":
            introduction = f"{told.pop(0)['content']}\n\n{introduction}"
        told.insert(0, {"role": "system", "content": introduction})
    return told


def _response(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def calls_told(message: Mapping[str, Any], as_granite: bool = False) -> dict[str, Any]:
    """A message whose calls are text, for templates that know of none."""
    content = message.get("content") or ""
    if calls := message.get("tool_calls"):
        written = ", ".join(_call(**call["function"]) for call in calls)
        text = f"<|tool_call|>[{written}]" if as_granite else _TAGGED.format(written)
        content = f"{content}\n{text}".lstrip("\n")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": content}


def _call(name: str, arguments: str) -> str:
    said = json.dumps(name, ensure_ascii=False)
    return f'{{"name": {said}, "arguments": {arguments or "{}"}}}'
