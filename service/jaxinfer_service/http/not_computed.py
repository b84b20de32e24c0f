"""Fields of other servers that we do not compute: taken where they ask for nothing, else refused.

Clients send them at their defaults, and a field that asks for nothing is honoured by doing nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

# Of no meaning when they are empty; some clients always send them.
EMPTY_IS_ABSENT = ("tools", "functions", "suffix", "metadata", "vllm_xargs", "documents")


def _only(value: Any, why: str, *others: Any) -> AfterValidator:
    """Nothing but this value, or one of the `others`: `why` says what to do instead."""
    taken = " or ".join(map(repr, (value, *others)))

    def check(given: Any) -> Any:
        if given not in (value, *others):
            raise ValueError(f"is {given!r:.100}, and only {taken} is taken: {why}")
        return given

    return AfterValidator(check)


_BEAMS = "beam search is not computed here"


class NotComputed(BaseModel):
    """What completions and chats of vLLM and OpenAI have besides, at the values that are none."""

    best_of: Annotated[int, _only(1, "ask for n samples and choose among them")] = 1
    use_beam_search: Annotated[bool, _only(False, _BEAMS)] = False
    length_penalty: Annotated[float, _only(1.0, _BEAMS)] = 1.0
    early_stopping: Annotated[bool, _only(False, _BEAMS)] = False
    spaces_between_special_tokens: Annotated[
        bool, _only(True, "special tokens are decoded as the tokenizer has them")
    ] = True
    detokenize: Annotated[bool, _only(True, "answers always have a text")] = True
    truncation_side: Annotated[
        str, _only("left", "truncate_prompt_tokens keeps a prompt's last tokens")
    ] = "left"
    watermarking: Annotated[bool, _only(False, "outputs are not marked")] = False
    stream_interval: Annotated[int, _only(1, "tokens are sent as they come")] = 1
    routed_experts_prompt_start: Annotated[int, _only(0, "experts are not returned")] = 0
    return_token_offsets: Annotated[
        bool, _only(False, "ask for logprobs, which have text_offset")
    ] = False
    store: Annotated[bool, _only(False, "nothing is kept here")] = False
    service_tier: Annotated[str, _only("auto", "use priority", "default")] = "auto"
    request_id: Annotated[str, _only("", "send it as the header x-request-id")] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_empty_ones(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if not (name in EMPTY_IS_ABSENT and value in ([], {}, ""))
        }


_LAST = "answers are messages of their own; ask /v1/completions to continue a text"


class PromptAdded(BaseModel):
    """Of all that a chat template is given."""

    add_generation_prompt: Annotated[bool, _only(True, _LAST)] = True
    continue_final_message: Annotated[bool, _only(False, _LAST)] = False


class ChatNotComputed(PromptAdded):
    """What chats of vLLM and OpenAI have besides, at the values that are none."""

    echo: Annotated[bool, _only(False, "the prompt is known; completions have echo")] = False
    include_reasoning: Annotated[bool, _only(True, "leave message.reasoning unread")] = True
    return_token_ids: Annotated[bool, _only(False, "completions have return_token_ids")] = False
    modalities: Annotated[list[str], Field(fail_fast=True), _only(["text"], "answers are text")] = [
        "text"
    ]
    verbosity: Annotated[str, _only("medium", "say in the prompt how long to answer")] = "medium"
