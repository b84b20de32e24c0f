"""What the OpenAI API answers, from the deltas of the front's streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.replies.reader import CallDelta
from jaxinfer.request import FinishReason
from jaxinfer.text import Delta, Finish, TextProcessor
from jaxinfer_service.model import ServedModel

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """What all objects of one answer have in common."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: list[Choice], **more: Any) -> dict[str, Any]:
        """An object of this kind, "chat.completion" or another."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more


class Shape(Protocol):
    """How one call's choices look, whole or as they come."""

    id_prefix: str
    kind: str  # of the whole answer
    chunk_kind: str
    with_prompt: bool  # whether `whole` and `head` need the prompts

    def whole(self, sample: Delta, prompt: str) -> Choice:
        """A choice of a whole answer."""

    def head(self, index: int, prompt: str) -> Choice | None:
        """What comes before a choice's first text, in a stream."""

    def parts(self, delta: Delta) -> Iterable[Choice]:
        """What is new of a choice, nothing or more."""


class Completions:
    """`logprobs`: how many of the most likely tokens to show, None for no logprobs at all."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: TextProcessor, logprobs: int | None, echo: bool):
        self._text, self._logprobs, self.with_prompt = text, logprobs, echo
        self._offsets: dict[int, int] = {}  # of the next token, by choice

    def whole(self, sample: Delta, prompt: str) -> Choice:
        return self._choice(sample, prompt + sample.text)

    def head(self, index: int, prompt: str) -> Choice | None:
        return self._choice(Delta(index), prompt) if self.with_prompt else None

    def parts(self, delta: Delta) -> Iterable[Choice]:
        return [self._choice(delta, delta.text)] if _shows(delta) else []

    def _choice(self, delta: Delta, text: str) -> Choice:
        logprobs = self._shown(delta) if self._logprobs is not None else None
        return {"index": delta.index, "text": text, "logprobs": logprobs} | _end(delta.finish)

    def _shown(self, delta: Delta) -> dict[str, Any]:
        tokens = [shown(self._text.token_bytes(token)) for token in delta.token_ids]
        offsets, offset = [], self._offsets.get(delta.index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[delta.index] = offset
        top = [
            {token: found.logprob}
            | {shown(self._text.token_bytes(i)): value for i, value in reversed(found.top)}
            for token, found in zip(tokens, delta.logprobs)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [found.logprob for found in delta.logprobs],
            "top_logprobs": top if self._logprobs else None,
            "text_offset": offsets,
        }


class Chats:
    """Answers of the assistant."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    with_prompt = False

    def __init__(self, text: TextProcessor):
        self._text = text
        self._calling: set[int] = set()  # choices that have calls

    def whole(self, sample: Delta, prompt: str) -> Choice:
        apart = sample.calls or sample.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": sample.text or None if apart else sample.text,
            "refusal": None,
        }
        if sample.reasoning:
            message |= _reasoning(sample.reasoning)
        if sample.calls:
            message["tool_calls"] = [_call(call) for call in sample.calls]
        return self._choice(sample, "message", message)

    def head(self, index: int, prompt: str) -> Choice | None:
        return self._choice(Delta(index), "delta", {"role": "assistant", "content": ""})

    def parts(self, delta: Delta) -> Iterable[Choice]:
        """Reasoning, content and calls one after the other: many clients look for one of them."""
        found: list[dict[str, Any]] = []
        if delta.reasoning:
            found.append(_reasoning(delta.reasoning))
        if delta.text:
            found.append({"content": delta.text})
        if delta.calls:
            calls = [{"index": call.index} | _call(call) for call in delta.calls]
            found.append({"tool_calls": calls})
        *before, last = found or [{}]
        for content in before:
            yield self._choice(Delta(delta.index), "delta", content)
        if found or _shows(delta):
            yield self._choice(delta, "delta", last)

    def _choice(self, delta: Delta, name: str, content: dict[str, Any]) -> Choice:
        logprobs = {"content": [*self._shown(delta)]} if delta.logprobs else None
        choice = {"index": delta.index, name: content, "logprobs": logprobs}
        if delta.calls:
            self._calling.add(delta.index)
        end = _end(delta.finish)
        if end["finish_reason"] == "stop" and delta.index in self._calling:
            end["finish_reason"] = "tool_calls"
        return choice | end

    def _shown(self, delta: Delta) -> Iterator[dict[str, Any]]:
        for token, found in zip(delta.token_ids, delta.logprobs):
            top = [self._entry(i, value) for i, value in found.top]
            yield self._entry(token, found.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._text.token_bytes(token)
        return {"token": shown(data), "logprob": logprob, "bytes": [*data]}


def shown(data: bytes) -> str:
    """A token's bytes as text; those that are none by themselves become replacement characters."""
    return data.decode(errors="replace")


def _reasoning(text: str) -> dict[str, Any]:
    """By both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or what is new of it: its id and name come once."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(
    prompt_tokens: int, generated_tokens: int, cached_tokens: int, reasoning_tokens: int | None
) -> dict[str, Any]:
    """How many tokens there were; a prompt counts once, whatever the number of choices."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def model_card(model: ServedModel, name: str) -> dict[str, Any]:
    """What /v1/models says of a model, by one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": model.opened_at,
        "owned_by": "jaxinfer",
        "root": model.names[0],
        "max_model_len": model.opened.text.limits.max_model_len,
    }


def _shows(delta: Delta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish)


def _end(finish: Finish | None) -> dict[str, Any]:
    """`stop_reason`: the stop string or id of the request's own that ended the choice."""
    if finish is None:
        return {"finish_reason": None}
    own = finish.stop if finish.reason is not FinishReason.EOS else None
    return {"finish_reason": _REASONS[finish.reason], "stop_reason": own}
