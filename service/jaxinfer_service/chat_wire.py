"""Chats between the wire's messages and the runtime's own: tools, calls and reasoning too.

`chat_prompt` makes them for clients.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import struct_pb2

from jaxinfer.conversation import Conversation
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.replies.tool_use import AUTO, NONE, REQUIRED, Tool, ToolUse
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
    use = tool_use_of(chat)
    options = {name: _plain(value) for name, value in chat.template_options.fields.items()}
    replies = None
    if form is not None and (chat.parse_reply if chat.HasField("parse_reply") else chat.tools):
        replies = use.replies(form)
    return Conversation(messages, use.for_template, options, replies)


def tool_use_of(chat: pb.Chat) -> ToolUse:
    """Which tools may or must be called. Raises RequestError."""
    parallel = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    tools = [_tool(index, tool) for index, tool in enumerate(chat.tools)]
    if chat.WhichOneof("choice") == "tool_choice_name":
        if not chat.tool_choice_name:
            raise RequestError([Violation("tool_choice", "names no tool; give one of tools")])
        return ToolUse(tools, named=chat.tool_choice_name, parallel=parallel)
    if chat.tool_choice not in _CHOICES:
        why = f"is {chat.tool_choice}, which is not known to this server"
        raise RequestError([Violation("tool_choice", why)])
    return ToolUse(tools, _CHOICES[chat.tool_choice], parallel=parallel)


_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: AUTO,
    pb.TOOL_CHOICE_AUTO: AUTO,
    pb.TOOL_CHOICE_NONE: NONE,
    pb.TOOL_CHOICE_REQUIRED: REQUIRED,
}


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


def _tool(index: int, tool: pb.Tool) -> Tool:
    """Raises RequestError where the parameters are no schema of an object."""
    field = f"tools[{index}].function.parameters"
    try:
        schema = json.loads(tool.parameters) if tool.parameters else None
    except (ValueError, RecursionError) as error:
        raise RequestError([Violation(field, f"is no JSON: {error}")]) from error
    if schema is not None and not isinstance(schema, dict):
        why = "is no JSON object; give a schema, or nothing where there are no parameters"
        raise RequestError([Violation(field, why)])
    return Tool(tool.name, tool.description, schema, tool.strict)


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
