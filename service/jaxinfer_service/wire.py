"""Between the wire's messages and the runtime's own types. Nothing here knows of a server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.request import (
    FinishReason,
    RequestError,
    Scheduling,
    TokenLogprobs,
    Violation,
)
from jaxinfer.structured import StructuredOutput
from jaxinfer.text import AnyPrompt, Delta, Finish
from jaxinfer_service.access import tenant_of
from jaxinfer_service.chat_wire import conversation_of, fill_reply, tool_use_of
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb

MOST_SCORED = 1024  # tokens of a prompt that a chunk says something of

_SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_new_tokens", "include_stop", "ignore_eos", "logprobs",
    "skip_special_tokens", "n", "prompt_logprobs", "truncate_prompt_tokens", "min_tokens",
)  # fmt: skip

_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_ID: pb.FINISH_REASON_STOP_ID,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def parse[M: Message](kind: type[M], data: bytes) -> M:
    """A message from its bytes. Raises RequestError for bytes or fields that are not its own."""
    name = kind.DESCRIPTOR.name
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise RequestError([Violation(name, f"cannot be decoded: {error}")]) from error
    unknown = list(itertools.islice(_unknown_fields(message), 8))
    if unknown:
        why = "is not known to this server, which would ignore it; leave it out"
        raise RequestError([Violation(field, why) for field in unknown])
    return message


def _unknown_fields(message: Message) -> Iterator[str]:
    """Names like Sampling.field_99 of what the sender set and this version does not know."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{message.DESCRIPTOR.name}.field_{unknown[index].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            yield from _unknown_fields(part)


def prompt_of(
    request: pb.GenerateRequest | pb.TokenizeRequest, form: ReplyFormat | None = None
) -> AnyPrompt:
    """The prompt of a request; `form`: of replies to chats. Raises RequestError for none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
        return list(request.token_ids.ids)
    if kind == "chat":
        return conversation_of(request.chat, form)
    raise RequestError([Violation("prompt", "is missing; set one")])


@contextlib.contextmanager
def named(request: pb.GenerateRequest | pb.TokenizeRequest) -> Iterator[None]:
    """Violations found within name the fields of `request` instead of the runtime's own."""
    try:
        yield
    except RequestError as error:
        kind = request.WhichOneof("prompt") or "prompt"
        named = [Violation(_path(v.field, request, kind), v.message) for v in error.violations]
        raise RequestError(named) from error


_OF_CHATS = {
    "tools": "chat.tools",
    "tool_choice": "chat.tool_choice",
    "chat_template_kwargs": "chat.template_options",
}
_LISTS = {"token_ids": "token_ids.ids", "chat": "chat.messages"}


def _path(field: str, request: pb.GenerateRequest | pb.TokenizeRequest, kind: str) -> str:
    """A field's path within the request's message: prompt[0] of a chat is chat.messages[0]."""
    name, bracket, rest = field.partition("[")
    if name in _OF_CHATS:
        return _OF_CHATS[name] + bracket + rest.replace(".function.", ".")
    own = isinstance(request, pb.GenerateRequest) and request.sampling.HasField("structured")
    if name.partition(".")[0] == "structured" and not own:
        return "chat.tools"  # which ask for a form themselves
    if name == "prompt":
        return (_LISTS[kind] if bracket else kind) + bracket + rest
    sampling = name.partition(".")[0] in pb.Sampling.DESCRIPTOR.fields_by_name
    return f"sampling.{field}" if sampling else field


def params_of(sampling: pb.Sampling) -> dict[str, Any]:
    """The sampling parameters that are set; an empty list or map counts as not set."""
    given = {name: getattr(sampling, name) for name in _SCALARS if sampling.HasField(name)}
    several = {
        "logit_bias": tuple(sampling.logit_bias.items()),
        "stop": tuple(sampling.stop),
        "stop_token_ids": tuple(sampling.stop_token_ids),
        "allowed_token_ids": tuple(sampling.allowed_token_ids),
        "bad_words": tuple(sampling.bad_words),
    }
    if sampling.HasField("structured"):
        given["structured"] = _structure(sampling.structured)
    return given | {name: values for name, values in several.items() if values}


def _structure(message: pb.StructuredOutput) -> StructuredOutput:
    """Raises RequestError for a message that asks for nothing."""
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not message.json_object):
        why = "asks for no form; set one of json_schema, json_object, regex, choice and grammar"
        raise RequestError([Violation("sampling.structured", why)])
    if kind == "json_object":
        return StructuredOutput.json_object()
    if kind == "choice":
        return StructuredOutput.choice(message.choice.texts)
    return StructuredOutput(kind, getattr(message, kind))


def held_params(request: pb.GenerateRequest, form: ReplyFormat) -> dict[str, Any]:
    """The sampling parameters of a request, with what the tools of its chat ask of the reply, whose
    calls have this form. Raises RequestError."""
    params = params_of(request.sampling)
    if request.WhichOneof("prompt") != "chat":
        return params
    return tool_use_of(request.chat).held(params, form)


def scheduling_of(request: pb.GenerateRequest) -> Scheduling:
    """Raises ForbiddenError for a tenant that the caller's key is not of."""
    return Scheduling(request.priority, tenant_of(request.tenant), request.cache_salt)


def fill(message: pb.GenerateResponse | pb.GenerateChunk | pb.Sample, delta: Delta) -> None:
    """Put a delta's text, tokens, logprobs and end into a message."""
    message.text = delta.text
    message.token_ids.extend(delta.token_ids)
    message.logprobs.extend(
        _logprobs(token, entry) for token, entry in zip(delta.token_ids, delta.logprobs)
    )
    fill_reply(message, delta)
    if delta.finish is not None:
        message.finish.CopyFrom(_finish(delta.finish))


def fill_prompt(
    message: pb.GenerateResponse | pb.GenerateChunk,
    prompt: Sequence[int],
    said: int,
    lines: PromptLogprobs,
) -> None:
    """Put what is said of a prompt's next tokens into a message; of so many it was said before."""
    following = prompt[1 + said : 1 + said + len(lines)]
    message.prompt_logprobs.extend(map(_logprobs, following, lines))


def prompt_parts(delta: Delta) -> Iterator[PromptLogprobs]:
    """What a delta says of the prompt, in parts that are no large messages."""
    if delta.prompt_logprobs is not None:
        yield from delta.prompt_logprobs.parts(MOST_SCORED)


def fill_end(
    message: pb.GenerateResponse | pb.GenerateChunk,
    ends: Sequence[Delta],
    prompt_tokens: int,
    generated_tokens: int,
) -> None:
    """Put the end of a call into a message: how much, how long. `ends` has each sample's."""
    timings = [end.timing for end in ends if end.timing is not None]
    usage, timing = message.usage, message.timing
    usage.prompt_tokens = prompt_tokens
    usage.generated_tokens = generated_tokens
    usage.cached_tokens = min(end.cached_tokens for end in ends)  # a later sample finds its peers'
    reasoning = [end.reasoning_tokens for end in ends if end.reasoning_tokens is not None]
    if reasoning:
        usage.reasoning_tokens = sum(reasoning)
    timing.queued = min(t.queued or 0.0 for t in timings)
    timing.first_token = min(t.first_token or 0.0 for t in timings)
    timing.total = max(t.total for t in timings)


def _finish(finish: Finish) -> pb.Finish:
    message = pb.Finish(reason=_REASONS[finish.reason])
    if isinstance(finish.stop, str):
        message.stop_string = finish.stop
    elif finish.stop is not None:
        message.stop_token_id = finish.stop
    return message


def _logprobs(token: int, entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=token, logprob=entry.logprob),
        top=[pb.TokenLogprob(token_id=i, logprob=value) for i, value in entry.top],
        rank=entry.rank,
    )


def special_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    """Whether a text gets what the model expects around it. Raises RequestError where that is said
    of another kind of prompt, for which it would mean nothing."""
    kind = request.WhichOneof("prompt")
    if not request.HasField("add_special_tokens"):
        return True
    if kind in ("chat", "token_ids"):
        why = {
            "chat": "is set for a chat, whose template decides by itself; leave it out",
            "token_ids": "is set for token ids, which are taken as they are; leave it out",
        }
        raise RequestError([Violation("add_special_tokens", why[kind])])
    return request.add_special_tokens
