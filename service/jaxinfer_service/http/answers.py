"""What the OpenAI API answers, from the deltas of the front's streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.quantization.kinds import NONE
from jaxinfer.replies.reader import CallDelta
from jaxinfer.request import FinishReason, TokenLogprobs
from jaxinfer.text import Delta, Finish, TextProcessor
from jaxinfer_service.http.schema import Completion
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


@dataclass(slots=True)
class Echoed:
    """A prompt as an answer may repeat it; `text` is "" where none does."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: PromptLogprobs | None = None


class Shape(Protocol):
    """How one call's choices look, whole or as they come."""

    id_prefix: str
    kind: str  # of the whole answer
    chunk_kind: str
    with_prompt: bool  # whether `whole` and `head` need the prompts' texts
    scored: bool  # whether heads need the prompts' logprobs

    def whole(self, sample: Delta, prompt: Echoed) -> Choice:
        """A choice of a whole answer."""

    def head(self, index: int, prompt: Echoed) -> Choice | None:
        """What comes before a choice's first text, in a stream."""

    def parts(self, delta: Delta) -> Iterable[Choice]:
        """What is new of a choice, nothing or more."""

    def besides(self, prompt: Echoed) -> dict[str, Any]:
        """What a whole answer has beside its choices, about the only prompt."""


class Completions:
    """Answers to prompts, which they may repeat."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: TextProcessor, asked: Completion):
        self._text, self._asked, self.with_prompt = text, asked, asked.echo
        self.scored = asked.echo and asked.logprobs is not None
        self._offsets: dict[int, int] = {}  # of the next token, by choice

    def whole(self, sample: Delta, prompt: Echoed) -> Choice:
        choice = self._choice(sample, prompt.text + sample.text, prompt)
        if self._asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_entries(
                self._text, prompt, self._asked.prompt_logprobs
            )
        return choice

    def head(self, index: int, prompt: Echoed) -> Choice | None:
        asked = self._asked
        if not asked.echo and not asked.return_token_ids:
            return None
        return self._choice(Delta(index), prompt.text, prompt)

    def parts(self, delta: Delta) -> Iterable[Choice]:
        shows = _shows(delta) or (self._asked.return_token_ids and delta.token_ids)
        return [self._choice(delta, delta.text)] if shows else []

    def besides(self, prompt: Echoed) -> dict[str, Any]:
        return {}

    def _choice(self, delta: Delta, text: str, prompt: Echoed | None = None) -> Choice:
        logprobs = None
        if self._asked.logprobs is not None:
            logprobs = self._shown(delta, prompt if self._asked.echo else None)
        choice: Choice = {"index": delta.index, "text": text, "logprobs": logprobs}
        if self._asked.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if prompt is not None:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice | _end(delta.finish)

    def _shown(self, delta: Delta, prompt: Echoed | None) -> dict[str, Any]:
        """Of the delta's tokens, and before them of the prompt's: of its first one nothing is
        known."""
        ids, found = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs)
        if prompt is not None:
            ids, found = [*prompt.token_ids, *ids], [None, *(prompt.logprobs or ()), *found]
        tokens = [self._name(token) for token in ids]
        offsets, offset = [], self._offsets.get(delta.index, 0)
        for token in ids:
            offsets.append(offset)
            offset += len(shown(self._text.token_bytes(token)))
        self._offsets[delta.index] = offset
        top = [self._top(token, entry) for token, entry in zip(tokens, found)]
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in found],
            "top_logprobs": top if self._asked.logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, token: str, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """The token and the most likely ones, of which the best wins a name that two have."""
        if entry is None:
            return None
        best = reversed(entry.top[: self._asked.logprobs])
        return {token: entry.logprob} | {self._name(i): value for i, value in best}

    def _name(self, token: int) -> str:
        if self._asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return shown(self._text.token_bytes(token))


class Chats:
    """Answers of the assistant."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    with_prompt = scored = False

    def __init__(self, text: TextProcessor, prompt_logprobs: int | None = None):
        self._text, self._prompt_logprobs = text, prompt_logprobs
        self._calling: set[int] = set()  # choices that have calls

    def whole(self, sample: Delta, prompt: Echoed) -> Choice:
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

    def head(self, index: int, prompt: Echoed) -> Choice | None:
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

    def besides(self, prompt: Echoed) -> dict[str, Any]:
        if self._prompt_logprobs is None:
            return {}
        entries = prompt_entries(self._text, prompt, self._prompt_logprobs)
        return {"prompt_logprobs": entries}

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


def prompt_entries(text: TextProcessor, prompt: Echoed, top: int) -> list[dict[str, Any] | None]:
    """What is said of each token of a prompt, by ids, as vLLM has it; nothing of the first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        name = shown(text.token_bytes(token))
        return {"logprob": logprob, "rank": rank, "decoded_token": name}

    entries: list[dict[str, Any] | None] = [None]
    for token, found in zip(prompt.token_ids[1:], prompt.logprobs or (), strict=True):
        ranked = enumerate(found.top[:top], 1)
        likely = {str(i): entry(i, value, rank) for rank, (i, value) in ranked}
        entries.append({str(token): entry(token, found.logprob, found.rank)} | likely)
    return entries


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
    config = model.opened.config
    return {
        "id": name,
        "object": "model",
        "created": model.opened_at,
        "owned_by": "jaxinfer",
        "root": model.names[0],
        "max_model_len": model.opened.text.limits.max_model_len,
        "dtype": config.dtype,
        "quantization": config.quantization or NONE,
        "kv_cache_dtype": config.pages,
    }


def _shows(delta: Delta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish)


def _end(finish: Finish | None) -> dict[str, Any]:
    """`stop_reason`: the stop string or id of the request's own that ended the choice."""
    if finish is None:
        return {"finish_reason": None}
    own = finish.stop if finish.reason is not FinishReason.EOS else None
    return {"finish_reason": _REASONS[finish.reason], "stop_reason": own}
