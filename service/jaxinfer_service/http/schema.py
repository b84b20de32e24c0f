"""What clients of the OpenAI API send. A field is honoured or refused: unknown ones are refused.

Ranges are checked where all requests are (`jaxinfer/validation.py`); here are names and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, StrictInt, field_validator, model_validator

from jaxinfer.generation import SamplingDefaults
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.request import MAX_LOGIT_BIAS, RequestError, Violation
from jaxinfer.structured import StructuredOutput
from jaxinfer.validation import EngineLimits
from jaxinfer_service.http import chat_schema
from jaxinfer_service.http.chat_schema import Message, Templated
from jaxinfer_service.http.not_computed import ChatNotComputed, NotComputed, PromptAdded
from jaxinfer_service.http.rules import JsonSchema, ResponseFormat, Ruled
from jaxinfer_service.http.strict import Body, Listed, OneOrMore, Several, WrongFieldError

COMPLETION_TOKENS = 16  # of a completion where nobody says how many, as the API has it

# By our names, those that the OpenAI API and its common extensions use.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "include_stop": "include_stop_str_in_output",
}


class StreamOptions(Body):
    """Of a streamed answer. `include_usage`: a last chunk says how many tokens there were."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False


class Sampling(NotComputed, Ruled):
    """What completions and chats have in common. What is left out is the model's own default."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: OneOrMore | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect; as user.")
    prompt_cache_key: str | None = Field(
        None, description="Has no effect: prefixes are found without; cache_salt sets them apart."
    )
    # Extensions that other servers have too.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed[StrictInt] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    timeout: float | None = Field(
        None, gt=0, le=1e9, description="Seconds in which the answer must be complete."
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, biases: Any) -> Any:
        if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
            raise ValueError(f"has {len(biases)} entries; at most {MAX_LOGIT_BIAS} are taken")
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _names_are_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for name in biases or ():
            if not (name.isascii() and name.isdecimal() and len(name) < 20):
                raise ValueError(f"{name!r} is no token id; the names are token ids")
        return biases

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise WrongFieldError("stream_options", "is given, and stream is not true")
        if self.prompt_logprobs is not None and self.stream:
            raise WrongFieldError(
                "prompt_logprobs",
                "is given, and stream is true; leave one of them out (a completion with echo and"
                " logprobs streams those of its prompt)",
            )
        return self

    def called(self, field: str) -> str:
        return RENAMED.get(field) or super().called(field)

    def renamed(self, found: Violation, prompt: str) -> Violation:
        """What was found wrong, by the body's names; `prompt` is that of the prompt."""
        field, message = found.field, found.message
        if field == "prompt" or field.startswith("prompt["):
            return Violation(prompt + field.removeprefix("prompt"), message)
        if field == "sampling":
            message = "cannot be: " + message.replace("structured", self.called("structured"))
        message = message.replace("max_new_tokens", self.called("max_new_tokens"))
        return Violation(self.called(field), message)

    def params(self) -> dict[str, Any]:
        """The sampling parameters that are set, by the runtime's names."""
        given = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "n": self.n,
            "stop": None if self.stop is None else _several(self.stop),
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias and _biases(self.logit_bias),
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "include_stop": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "prompt_logprobs": self.prompt_logprobs,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }
        return {name: value for name, value in given.items() if value is not None} | self.rules()


class Completion(Sampling):
    """POST /v1/completions. A prompt is a text or token ids; there may be several."""

    prompt: str | Several[StrictInt] | Several[str] | Several[Several[StrictInt]]
    logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _names_are_of_logprobs(self) -> Completion:
        if self.return_tokens_as_token_ids and self.logprobs is None:
            raise WrongFieldError("return_tokens_as_token_ids", "is given, and logprobs is not")
        if self.add_special_tokens and not _is_text(self.prompt):
            raise WrongFieldError(
                "add_special_tokens", "is true for token ids, which are taken as they are"
            )
        return self

    def called(self, field: str) -> str:
        if field == "prompt_logprobs" and self.prompt_logprobs is None:
            return "logprobs"  # which an echo asks for
        return super().called(field)

    def params(self) -> dict[str, Any]:
        """With `echo` the prompt's logprobs are like the output's. A prompt that is repeated and
        nothing else is scored, whether or not that is shown."""
        given = super().params()
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            shown = (self.prompt_logprobs or 0, self.logprobs or 0)
            given["prompt_logprobs"] = max(shown)
        return given

    def usual_length(self, own: SamplingDefaults) -> int | None:
        """The API's length, where the model's `own` defaults say none."""
        return None if own.bounds_length else COMPLETION_TOKENS

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatCompletion(Sampling, ChatNotComputed, Templated):
    """POST /v1/chat/completions."""

    messages: Several[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: calls behind the first are left out."
    )
    form_field: ClassVar[str] = "tools"

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletion:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise WrongFieldError("max_completion_tokens", "is given beside max_tokens; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise WrongFieldError("top_logprobs", "is given, and logprobs is not true")
        if self.add_special_tokens:
            raise WrongFieldError(
                "add_special_tokens", "is true for a chat, whose template decides by itself"
            )
        return self

    def called(self, field: str) -> str:
        if field == "max_new_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if field == "logprobs" else super().called(field)

    def _forms(self) -> dict[str, StructuredOutput]:
        calls = self.tool_use(self.parallel_tool_calls is not False).promised()
        return super()._forms() | ({"tools": calls} if calls else {})

    def params_of(self, form: ReplyFormat) -> dict[str, Any]:
        """`params`, with what strict tools need of a model whose replies have this form.

        Raises RequestError where it cannot be promised.
        """
        use = self.tool_use()
        return self.params() if use.must_call else use.held(self.params(), form)

    def params(self) -> dict[str, Any]:
        given = super().params()
        if self.max_completion_tokens is not None:
            given["max_new_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given


class Tokenize(Templated, PromptAdded):
    """POST /tokenize: of a text or of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            given = "is missing, and so is" if self.prompt is None else "is given beside"
            raise WrongFieldError("prompt", f"{given} messages; give one of them")
        options = self.model_fields_set & Templated.model_fields.keys()
        if self.messages is None and options:
            raise WrongFieldError(min(options), "belongs to a chat, and there are no messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise WrongFieldError(
                "add_special_tokens", "is given for messages, whose template decides by itself"
            )
        return self

    def renamed(self, found: Violation) -> Violation:
        """What was found wrong, by the body's names."""
        name = "prompt" if self.messages is None else "messages"
        return Violation(found.field.replace("prompt", name, 1), found.message)


class Detokenize(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: Listed[StrictInt]

    def renamed(self, found: Violation) -> Violation:
        """What was found wrong, by the body's names."""
        return Violation(found.field.replace("token_ids", "tokens", 1), found.message)


FIELDS = frozenset(
    field.alias or name
    for kind in (
        Completion,
        ChatCompletion,
        Tokenize,
        Detokenize,
        StreamOptions,
        ResponseFormat,
        JsonSchema,
        *chat_schema.BODIES,
    )
    for name, field in kind.model_fields.items()
)  # by which places in a body are named


def check_prompts(prompts: Sequence[object], n: int, limits: EngineLimits) -> None:
    """Refuse more prompts than the queue could ever hold. Raises RequestError."""
    most = limits.max_queued_requests
    if len(prompts) > 1 and len(prompts) * n > most:
        why = (
            f"has {len(prompts)} entries, and n is {n}; the queue takes {most} requests in all, and"
            " each sample is one: send several calls"
        )
        raise RequestError([Violation("prompt", why)])


def check_tokens(prompts: Sequence[Sequence[int]], n: int, limits: EngineLimits) -> None:
    """Refuse prompts that the queue could never hold together. Raises RequestError."""
    tokens, most = n * sum(map(len, prompts)), limits.max_queued_tokens
    if len(prompts) > 1 and tokens > most:
        why = (
            f"has {len(prompts)} entries of {tokens} tokens in all"
            + (f", for {n} samples each" if n > 1 else "")
            + f"; the queue takes {most} (--max-queued-tokens): send several calls"
        )
        raise RequestError([Violation("prompt", why)])


def _is_text(prompt: Any) -> bool:
    """Whether a prompt is a text, or several."""
    return isinstance(prompt, str) or isinstance(prompt[0], str)


def _several(stop: OneOrMore) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """By token ids, which JSON cannot have as names."""
    return tuple((int(name), value) for name, value in biases.items())
