"""Makes the wire's chats of what programs have: messages and tools in the OpenAI API's form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb


def chat(
    messages: Iterable[Mapping[str, Any]],
    tools: Iterable[Mapping[str, Any]] = (),
    template_options: Mapping[str, Any] | None = None,
    parse_reply: bool | None = None,
    parallel_tool_calls: bool = True,
    tool_choice: str | Mapping[str, Any] = "auto",
) -> pb.Chat:
    """A chat as a prompt of `Client`; `tool_choice` is auto, none, required, or names a tool.

    Raises ValueError for a field that messages have not, or a choice that there is not.
    """
    found = pb.Chat(parallel_tool_calls=parallel_tool_calls)
    if parse_reply is not None:
        found.parse_reply = parse_reply
    for message in messages:
        given = {name: value for name, value in message.items() if value is not None}
        calls = [
            pb.ToolCall(id=call.get("id", ""), **call["function"])
            for call in given.pop("tool_calls", ())
        ]
        found.messages.add(tool_calls=calls, **given)
    for tool in tools:
        function = dict(tool["function"])
        if "parameters" in function:
            function["parameters"] = json.dumps(function["parameters"])
        found.tools.add(**function)
    if isinstance(tool_choice, str):
        number: Any = pb.ToolChoice.Value(f"TOOL_CHOICE_{tool_choice.upper()}")
        found.tool_choice = number
    else:
        found.tool_choice_name = tool_choice["function"]["name"]
    if template_options:
        found.template_options.update(template_options)
    return found
