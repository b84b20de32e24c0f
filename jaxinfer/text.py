"""The text side of a request, shared by the offline API and the server.

`TextProcessor` turns a prompt into token ids and a validated `Request`; `OutputBuilder` turns the
engine's events into what a reader gets: text that is certain, tokens, logprobs and the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from jaxinfer.conversation import Chat, Conversation
from jaxinfer.detokenizer import Detokenizer, DetokenizerFactory, StopMatcher
from jaxinfer.generation import SamplingDefaults
from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.replies.reader import CallDelta, Replies, ReplyReader
from jaxinfer.replies.thinking import TAIL
from jaxinfer.request import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    Scheduling,
    SequenceEvent,
    TokenLogprobs,
    Violation,
)
from jaxinfer.structure_check import StructureChecker, vocabulary_of
from jaxinfer.truncation import truncated
from jaxinfer.validation import EngineLimits, Violations, build_request, check_token_ids, samples

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Chat
"""A text, token ids, or chat messages with `role` and `content`."""

AnyPrompt = Prompt | Conversation
"""One of those, or a chat with all that may belong to it."""

Params = SamplingParams | Mapping[str, Any]
"""All sampling parameters, or those that are set: the model's defaults fill the rest."""

_STOPPED_BY_ID = (FinishReason.EOS, FinishReason.STOP_ID)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended, and by which stop string or token id; `error` says what failed."""

    reason: FinishReason
    stop: str | int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from arrival until a slot was found, until the first token, and until the end.

    None where it did not come to that.
    """

    queued: float | None
    first_token: float | None
    total: float


@dataclass(slots=True)
class Delta:
    """What is new in an output. `finish`, `timing` and `cached_tokens` come with the last one.

    The tokens may be ahead of the text, which is held back while it may become a stop string or
    ends within a character. `logprobs` has one entry a token if the request asked for them.
    `index` is that of the sample. `cached_tokens`: prompt tokens that the prefix cache had.
    `prompt_logprobs`: if asked for, of the prompt's next tokens after its first; the first sample
    has them, the last before its first token or with it.

    Of the reply to a `Conversation`, the text is what is for the user; `reasoning` and `calls` are
    beside it, and `reasoning_tokens` comes with the last delta.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    timing: Timing | None = None
    cached_tokens: int = 0
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def add_call(self, call: CallDelta) -> None:
        """Take in what is new of a call."""
        if self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls.append(call)

    def extend(self, later: Delta) -> None:
        """Take in the delta that follows this one."""
        self.text += later.text
        self.reasoning += later.reasoning
        for call in later.calls:
            self.add_call(call)
        self.reasoning_tokens = later.reasoning_tokens
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.timing = later.timing
        self.cached_tokens = later.cached_tokens
        if later.prompt_logprobs is not None:
            before, more = self.prompt_logprobs, later.prompt_logprobs
            self.prompt_logprobs = more if before is None else before.then(more)

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it for a reader."""
        return not (self.token_ids or self.finish or self.prompt_logprobs)


class TextProcessor:
    """Tokenizer and limits of one model: prompts in, output builders out."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        limits: EngineLimits,
        sampling: SamplingDefaults | None = None,
    ):
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling = sampling or SamplingDefaults()
        self.eos_ids = tuple(eos_ids)
        self._detokenizers = DetokenizerFactory(tokenizer.raw)
        self.structures = StructureChecker(partial(vocabulary_of, tokenizer, limits.vocab_size))

    def encode(self, prompt: AnyPrompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, as the model is to see them; ids come back as they are.

        Raises RequestError for a text that is not Unicode, that is too long for any tokens, or a
        chat that the template refuses.
        """
        try:
            if isinstance(prompt, Conversation):
                self._check_messages(len(prompt.messages))
                self._check_size(prompt.size)
                return prompt.encode(self.tokenizer)
            if isinstance(prompt, str):
                self._check_size(len(prompt.encode()))  # which a lone surrogate fails: no text
                return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if is_chat(prompt):
                self._check_messages(len(prompt))
                messages = [_message(i, m) for i, m in enumerate(prompt)]
                self._check_size(sum(len(text.encode()) for m in messages for text in m.values()))
                return self.tokenizer.apply_chat_template(messages)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError([Violation("prompt", str(error))]) from error
        return list(prompt)  # type: ignore[arg-type]

    def _check_messages(self, count: int) -> None:
        if count > self.limits.max_model_len:  # a role takes a token at least
            raise ValueError(
                f"has {count} messages; at most {self.limits.max_model_len} are taken"
                " (max_model_len); leave old ones out"
            )

    def _check_size(self, size: int) -> None:
        """Refuse a prompt of so many bytes before time goes into encoding it.

        No token stands for more bytes than the longest one, so a longer text cannot fit. It is
        refused even where the tokenizer or the template would have dropped most of it.
        """
        limit = self.limits.max_model_len * self.tokenizer.longest_token
        if size > limit:
            raise ValueError(
                f"has {size} bytes of text; at most {limit} are taken (max_model_len"
                f" {self.limits.max_model_len} tokens, the longest token has"
                f" {self.tokenizer.longest_token} bytes); shorten it"
            )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises RequestError for an id outside of the vocabulary."""
        found = Violations()
        check_token_ids(found, "token_ids", ids, self.limits.vocab_size)
        found.raise_if_any()
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for in a text."""
        return self._detokenizers.token_bytes(token)

    def requests(
        self,
        prompt: Sequence[int],
        params: Params,
        request_id: str,
        now: float,
        timeout: float | None = None,
        scheduling: Scheduling | None = None,
    ) -> list[Request]:
        """The validated requests for prompt ids, one a sample. Raises RequestError."""
        prompt = truncated(prompt, params, self.limits)
        if not isinstance(params, SamplingParams):
            params = self.sampling.complete(params, len(prompt), self.limits)
        given = (self.limits, self.eos_ids, request_id, now, timeout, scheduling)
        request = build_request(prompt, params, *given)
        if params.bad_words:  # which are texts of bounded length, by now
            request = build_request(prompt, params, *given, bad_words=self._spelled(params))
        return samples(request)

    def _spelled(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The bad words as tokens: as they are, and after a space where that is another token.

        Raises RequestError for one that the vocabulary cannot spell.
        """
        spelled = []
        for position, word in enumerate(params.bad_words):
            bare, spaced = (
                tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            )
            if not bare:
                why = f"is {word!r}, of which this model's tokenizer makes no token"
                raise RequestError([Violation(f"bad_words[{position}]", why)])
            spelled.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                spelled.append(spaced)
        return spelled

    def output(
        self, request: Request, index: int = 0, replies: Replies | None = None
    ) -> OutputBuilder:
        """Collects the output of `request`, the sample of this index; `replies`: how it is read."""
        skip = request.params.skip_special_tokens
        if replies is None:
            return OutputBuilder(request, self._detokenizers.start(request.prompt, skip), index)
        start = self._detokenizers.start(request.prompt, skip, replies.kept)
        tail = self.decode(request.prompt[-TAIL:], skip_special_tokens=False)
        return OutputBuilder(request, start, index, ReplyReader(replies, tail))


def is_chat(prompt: Prompt) -> TypeGuard[Chat]:
    """Whether a prompt is messages of a chat, to go through the model's template."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _message(position: int, message: object) -> dict[str, str]:
    """A chat message as templates take it. Raises RequestError for anything else."""
    field = f"prompt[{position}]"
    if (
        not isinstance(message, Mapping)
        or set(message) != {"role", "content"}
        or not all(isinstance(value, str) for value in message.values())
    ):
        why = f"a chat message has a role and a content, both strings, not {message!r}"
        raise RequestError([Violation(field, why)])
    if not message["role"]:
        raise RequestError([Violation(f"{field}.role", "is empty; give one, such as user")])
    return dict(message)


class OutputBuilder:
    """Engine events of one request → deltas. A stop string ends it before the engine does.

    The text of the token that ended the output is left out unless `include_stop`. Once `finished`,
    events are no longer for this request.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        index: int = 0,
        reader: ReplyReader | None = None,
    ):
        self.request = request
        self.index = index
        self._reader = reader
        self.finished = False
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.params.stop, request.params.include_stop)
        self._num_tokens = 0
        self.queued: float | None = None  # seconds until a slot was found
        self.first_token: float | None = None  # seconds until it came
        self.cached_tokens = 0  # prompt tokens that the prefix cache had
        self.preemptions = 0  # as its last event said

    @property
    def started(self) -> bool:
        """Whether the request is known to have had a slot."""
        return self.queued is not None

    def push(self, event: SequenceEvent) -> Delta:
        """What an event adds. Tokens after the one that completed a stop string are dropped."""
        self._note_start(event)
        self.preemptions = event.preemptions
        delta = Delta(self.index, prompt_logprobs=event.prompt_logprobs)
        last = len(event.tokens) - 1 if event.finish in _STOPPED_BY_ID else None
        for position, token in enumerate(event.tokens):
            delta.token_ids.append(token)
            self._num_tokens += 1
            shown = position != last or self.request.params.include_stop
            piece = self._detokenizer.push(token) if shown else ""
            if self._reader is not None:
                self._reader.token(len(piece))
            self._add_text(delta, piece)
            if delta.finish is not None:
                break
        delta.logprobs = list(event.logprobs[: len(delta.token_ids)])
        if delta.finish is None and event.finish is not None:
            self._end(delta, event)
        if self._reader is not None:
            self._reader.read(delta)
        if delta.finish is not None:
            self.finished = True
            delta.cached_tokens = self.cached_tokens
            delta.timing = Timing(self.queued, self.first_token, event.time - self.request.arrival)
        return delta

    def _note_start(self, event: SequenceEvent) -> None:
        if event.first_scheduled is not None:
            self.queued = event.first_scheduled - self.request.arrival
            self.cached_tokens = event.cached_tokens
        if event.tokens and self.first_token is None:
            self.first_token = event.time - self.request.arrival

    def _add_text(self, delta: Delta, piece: str) -> None:
        certain, matched = self._stops.push(
            piece, ends=self._num_tokens > self.request.params.min_tokens
        )
        delta.text += certain
        if matched is not None:
            delta.finish = Finish(FinishReason.STOP_STRING, matched)

    def _end(self, delta: Delta, event: SequenceEvent) -> None:
        """The engine ended it: nothing is held back any more."""
        assert event.finish is not None
        self._add_text(delta, self._detokenizer.flush())
        if delta.finish is None:
            delta.text += self._stops.flush()
            stop = event.tokens[-1] if event.finish in _STOPPED_BY_ID else None
            delta.finish = Finish(event.finish, stop, event.error)
