"""Chats between the wire's messages and the runtime's own: tools, calls and reasoning too.

`chat_prompt` makes them for clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2

from jaxinfer.conversation import Conversation
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.replies.reader import replies_with
from jaxinfer.request import RequestError, Violation
from jaxinfer.text import Delta
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb


def conversation_of(chat: pb.Chat, form: ReplyFormat | None = None) -> Conversation:
    """What a chat asks; `form`: of the replies, which nobody reads without.

    Raises RequestError, whose fields are the runtime's own.
    """
    if not chat.messages:
        raise RequestError([Violation("prompt", "has no messages; give at least one")])
    messages = [_message(index, message) for index, message in enumerate(chat.messages)]
    schemas = _schemas(chat.tools)
    tools = [_tool(tool, schemas[tool.name]) for tool in chat.tools]
    options = {name: _plain(value) for name, value in chat.template_options.fields.items()}
    replies = None
    if form is not None and (chat.parse_reply if chat.HasField("parse_reply") else chat.tools):
        parallel = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
        replies = replies_with(form, schemas, parallel)
    return Conversation(messages, tools, options, replies)


def _message(index: int, message: pb.ChatMessage) -> dict[str, Any]:
    """A message as `Conversation` takes it, with what it has alone."""
    for field, role in (("tool_calls", "assistant"), ("reasoning", "assistant"), _RESULT):
        if getattr(message, field) and message.role != role:
            why = f"is set, and the role is {message.role!r}, not {role}"
            raise RequestError([Violation(f"prompt[{index}].{field}", why)])
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }
    return found | {name: value for name, value in more.items() if value}


_RESULT = ("tool_call_id", "tool")


def _tool(tool: pb.Tool, schema: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _schemas(tools: Sequence[pb.Tool]) -> dict[str, dict[str, Any]]:
    """The schemas of the tools' parameters by their names."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        if not tool.name or tool.name in found:
            why = "is empty" if not tool.name else f"is {tool.name!r}, as another tool's"
            raise RequestError([Violation(f"tools[{index}].name", f"{why}; names tell them apart")])
        try:
            schema = json.loads(tool.parameters or '{"type": "object", "properties": {}}')
        except (ValueError, RecursionError) as error:
            why = f"is no JSON: {error}"
            raise RequestError([Violation(f"tools[{index}].parameters", why)]) from error
        if not isinstance(schema, dict):
            why = "is no JSON object; give a schema, or nothing where there are no parameters"
            raise RequestError([Violation(f"tools[{index}].parameters", why)])
        found[tool.name] = schema
    return found


def _plain(value: struct_pb2.Value) -> Any:
    """A value as Python has it; a whole number is an int."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _plain(each) for name, each in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(each) for each in value.list_value.values]
    if kind == "number_value" and value.number_value.is_integer():
        return int(value.number_value)
    return getattr(value, kind) if kind not in (None, "null_value") else None


def fill_reply(message: pb.GenerateResponse | pb.GenerateChunk | pb.Sample, delta: Delta) -> None:
    """Put what was taken out of a delta's text into a message."""
    message.reasoning = delta.reasoning
    for call in delta.calls:
        made = message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        if isinstance(made, pb.ToolCallDelta):
            made.index = call.index
