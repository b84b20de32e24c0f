"""The whole output for a prompt, as the offline API gives it, and how it is collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.replies.reader import CallDelta
from jaxinfer.request import FinishReason, Request, TokenLogprobs
from jaxinfer.text import Delta, OutputBuilder, Timing


@dataclass(frozen=True, slots=True)
class Completion:
    """The output for one prompt: of its only sample, or of the first and `more` with it.

    Attributes:
        text: the output as text, as what follows the prompt.
        token_ids: all output tokens, the one that ended the output included.
        finish_reason: why it ended; `stop` is the stop string or token id that did it.
        logprobs: one entry an output token, if asked for.
        timing: seconds from submission to the engine.
        prompt_token_ids: the prompt as the model saw it.
        cached_tokens: how many of those the prefix cache had.
        prompt_logprobs: of the prompt's tokens but for the first, if asked for.
        error: what failed when the finish reason is ERROR.
        reasoning, tool_calls: what was taken out of the text, where tools were offered; a call has
            an `id`, a `name` and `arguments`, JSON text as the model wrote it.
        more: the further samples where `SamplingParams.n` is above 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[TokenLogprobs]
    timing: Timing
    prompt_token_ids: list[int]
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    error: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    more: tuple[Completion, ...] = ()

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All samples of the prompt, this one first."""
        return (self, *self.more)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way and what came of it since it was last taken."""

    request: Request
    output: OutputBuilder
    delta: Delta

    def take(self) -> Delta:
        delta, self.delta = self.delta, Delta(self.delta.index)
        return delta

    def completion(self) -> Completion:
        whole = self.delta
        assert whole.finish is not None and whole.timing is not None
        return Completion(
            whole.text,
            whole.token_ids,
            whole.finish.reason,
            whole.finish.stop,
            whole.logprobs,
            whole.timing,
            list(self.request.prompt),
            whole.cached_tokens,
            whole.prompt_logprobs,
            whole.finish.error,
            whole.reasoning,
            tuple(whole.calls),
        )


def completion_of(jobs: Sequence[Job]) -> Completion:
    """What the samples of one prompt brought."""
    first, *more = [job.completion() for job in jobs]
    return dataclasses.replace(first, more=tuple(more)) if more else first
