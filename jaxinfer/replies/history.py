"""Messages of a conversation in the order and form that some families' templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same conversation with each call in a message of its own, before its result.

    Results belong to the calls that they name, and to calls in their order where they name none.
    """
    found: list[Mapping[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for index, call in enumerate(calls):
            before = message if index == 0 else {"role": message["role"], "content": None}
            found.append({**before, "tool_calls": [call]})
            found += _taken(results, call, last=index == len(calls) - 1)
    return found


def _taken(
    results: list[Mapping[str, Any]], call: Mapping[str, Any], last: bool
) -> list[Mapping[str, Any]]:
    """Take out the results of a call; of the last one, all that are left."""
    named = [each for each in results if each.get("tool_call_id") == call["id"]]
    if not named and results and "tool_call_id" not in results[0]:
        named = results[:1]
    taken = [each for each in results if last or each in named]
    results[:] = [each for each in results if each not in taken]
    return taken


def for_channels(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """gpt-oss's template takes what was thought or what was said before a call, not both."""
    said, thought = message.get("content"), message.get("reasoning_content")
    if "tool_calls" in message and said and thought:
        return {**message, "content": None, "reasoning_content": f"{thought}\n{said}"}
    return message
