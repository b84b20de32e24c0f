"""A chat with all that may belong to it: tools, calls of them and their results, reasoning.

Templates differ in what they expect of a message: arguments of calls as an object or as JSON text,
no content or an empty one. The first of these that a template renders is taken.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxinfer.replies.history import for_channels, one_call_each
from jaxinfer.replies.reader import Replies
from jaxinfer.replies.tool_prompt import calls_told, with_tools_told
from jaxinfer.request import RequestError, Violation

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

Chat = Sequence[Mapping[str, str]]

_GIVEN = ("messages", "tools", "add_generation_prompt")
_SWITCHES = ("enable_thinking", "thinking")  # by which templates turn reasoning off


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked of a chat model.

    Attributes:
        messages: in the form of the OpenAI API: `role`, `content` (text, or None beside calls), and
            `tool_calls`, whose `arguments` are JSON text, `tool_call_id`, `name`, and
            `reasoning_content` where there are some.
        tools: each {"type": "function", "function": {"name", "description", "parameters"}}.
        options: further variables of the template.
        replies: how the replies are read; None takes them as they are.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    replies: Replies | None = None

    @property
    def size(self) -> int:
        """Bytes of text that a template may put into a prompt. Raises ValueError for no text."""
        size = 0
        todo: list[Any] = [[*message.values()] for message in self.messages]
        todo += [self.tools, self.options]
        while todo:
            part = todo.pop()
            if isinstance(part, str):
                size += len(part.encode())
            elif isinstance(part, Mapping):
                todo += [*part.keys(), *part.values()]
            elif isinstance(part, Sequence):
                todo += part
        return size

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids by the model's chat template.

        Raises ChatTemplateError with the template's objection, and RequestError for an option that
        it does not read.
        """
        from jaxinfer.chat_template import ChatTemplateError  # Jinja is not for everybody

        self._check_roles()
        options = self._options(tokenizer.template_variables(bool(self.tools)))
        if not tokenizer.takes_tools:
            return _rendered_told(tokenizer, self.messages, self.tools, options)
        options["tools"] = [dict(tool) for tool in self.tools] or None
        messages = _as_known(self.messages, tokenizer.chat_template_source)
        apart = one_call_each(messages)
        try:
            return _rendered(tokenizer, messages, **options)
        except ChatTemplateError:
            if len(apart) == len(messages):
                raise
            return _rendered(tokenizer, apart, **options)  # Llama's takes one call a message

    def _check_roles(self) -> None:
        for index, message in enumerate(self.messages):
            if not message["role"]:
                why = "is empty; give one, such as user"
                raise RequestError([Violation(f"prompt[{index}].role", why)])

    def _options(self, read: frozenset[str]) -> dict[str, Any]:
        """Those of the template, which reads these names. Raises RequestError for others."""
        options = dict(self.options)
        effort = options.get("reasoning_effort")
        switch = next((name for name in _SWITCHES if name in read), "")
        if effort == "none" and switch and "reasoning_effort" not in read:
            del options["reasoning_effort"]
            options[switch] = False
        for name in options:
            if name in _GIVEN or name not in read:
                why = f"has {name}, which the model's chat template does not read; leave it out"
                raise RequestError([Violation("chat_template_kwargs", why)])
        return options


def _as_known(messages: Sequence[Mapping[str, Any]], source: str) -> list[Mapping[str, Any]]:
    """Messages with what a template of this text would leave out in a place that it looks at."""
    if "<|channel|>" in source:
        return [for_channels(message) for message in one_call_each(messages)]
    if "tool_calls" not in source:
        return [calls_told(message, "<|tool_call|>" in source) for message in messages]
    return [*messages]


def _rendered_told(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> list[int]:
    """Token ids where the template takes no tools; nor, maybe, a message of the system."""
    from jaxinfer.chat_template import ChatTemplateError

    told = with_tools_told(messages, tools)
    try:
        return _rendered(tokenizer, told, **options)
    except ChatTemplateError:
        if not tools or len(told) < 2:
            raise
        system, first, *rest = told
        joined = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        return _rendered(tokenizer, [joined, *rest], **options)


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of the first form that the template renders. Raises ChatTemplateError."""
    from jaxinfer.chat_template import ChatTemplateFailure

    called = any("tool_calls" in message for message in messages)
    objects = (True, False) if called else (True,)
    empties = (False, True) if any(m.get("content") is None for m in messages) else (False,)
    failures = []
    for form in itertools.product(objects, empties):
        formed = [_formed(message, *form) for message in messages]
        try:
            return tokenizer.apply_chat_template(formed, **options)
        except ChatTemplateFailure as error:
            failures.append(error)
    raise failures[0]


def _formed(message: Mapping[str, Any], objects: bool, empty: bool) -> dict[str, Any]:
    """A message as some templates expect it: with arguments as `objects`, no content as `empty`."""
    formed = dict(message)
    if empty and formed.get("content") is None:
        formed["content"] = ""
    if objects and "tool_calls" in formed:
        formed["tool_calls"] = [_with_object(call) for call in formed["tool_calls"]]
    if reasoning := formed.get("reasoning_content"):
        formed |= {"reasoning": reasoning, "thinking": reasoning}  # families name it differently
    return formed


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        parsed = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # a model wrote it so; it may see that
        parsed = function["arguments"]
    return {**call, "function": {**function, "arguments": parsed}}
