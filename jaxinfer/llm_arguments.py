"""What the methods of `LLM` take: options by name, one prompt or several, one thing for each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxinfer.config import EngineConfig
from jaxinfer.conversation import Conversation
from jaxinfer.replies.reader import Replies
from jaxinfer.replies.tool_use import ToolUse
from jaxinfer.request import RequestError, Violation
from jaxinfer.text import Prompt

FLAGS = {  # what the command line calls differently
    "kv_cache_memory": "kv_pool_bytes",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_offload_gib": "kv_offload_bytes",
    "no_overlap": "overlap",
    "tenant_weight": "tenant_weights",
}


def check_options(given: Mapping[str, Any]) -> None:
    """Require names of `EngineConfig`'s fields. Raises TypeError naming what was meant."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in given:
        if name in known:
            continue
        close = [FLAGS[name]] if name in FLAGS else difflib.get_close_matches(name, known, 2)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise TypeError(f"LLM has no option {name!r}{meant}; it has: {', '.join(sorted(known))}")


def several_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also when one was given bare: a text, token ids, or a conversation."""
    if isinstance(prompts, str):
        return [prompts]
    single = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)
    if single or (len(prompts) > 0 and isinstance(prompts[0], Mapping)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def checked_chat(chat: Prompt, use: ToolUse, replies: Replies | None) -> Conversation:
    """A chat with its tools. Raises RequestError for messages that are none."""
    if isinstance(chat, str) or not chat:
        raise RequestError([Violation("prompt", "has no messages; give at least one")])
    messages = [_message(index, message) for index, message in enumerate(chat)]
    return Conversation(messages, use.for_template, {}, replies)


_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _message(index: int, message: Any) -> dict[str, Any]:
    field = f"prompt[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError([Violation(field, f"is {message!r}; a message has a role, a string")])
    if unknown := sorted(message.keys() - set(_OF_MESSAGES)):
        why = f"is not known; messages have {', '.join(_OF_MESSAGES)}"
        raise RequestError([Violation(f"{field}.{unknown[0]}", why)])
    given = {name: value for name, value in message.items() if value is not None}
    if not isinstance(given.setdefault("content", None), str | None):
        raise RequestError([Violation(f"{field}.content", "is no string")])
    if given["content"] is None and not given.get("tool_calls"):
        raise RequestError([Violation(f"{field}.content", "is missing, and there are no calls")])
    if calls := given.get("tool_calls"):
        given["tool_calls"] = [_call(f"{field}.tool_calls[{n}]", c) for n, c in enumerate(calls)]
    return given


def _call(field: str, call: Any) -> dict[str, Any]:
    """A call of a message of the assistant."""
    function = call.get("function") if isinstance(call, Mapping) else None
    names = ("name", "arguments")
    if not isinstance(function, Mapping) or not all(
        isinstance(function.get(name), str) for name in names
    ):
        why = f"is {call!r}; a call has a function with its name, and arguments as JSON text"
        raise RequestError([Violation(field, why)])
    called = {name: function[name] for name in names}
    return {"id": str(call.get("id", "")), "type": "function", "function": called}


def one_each[T](
    prompts: Sequence[Prompt],
    given: T | Sequence[T] | None,
    default: T,
    name: str,
    kind: type | tuple[type, ...],
) -> Sequence[T]:
    """One for each prompt. Raises ValueError for a list of another length."""
    if given is None or isinstance(given, kind):
        return [default if given is None else cast("T", given)] * len(prompts)
    several = cast("Sequence[T]", given)
    if len(several) != len(prompts):
        raise ValueError(f"{len(several)} {name} for {len(prompts)} prompts; give one, or one each")
    return several
