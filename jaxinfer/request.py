"""What a client asks (`Request`) and what the engine answers (`SequenceEvent`): picklable data.

The engine speaks token ids only. Text, stop strings and chat messages live in front of it
(`frontend.py`), so the front can run in another process without a change.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jaxinfer.structured import StructuredOutput

if TYPE_CHECKING:
    from jaxinfer.prompt_logprobs import PromptLogprobs
    from jaxinfer.token_rules import TokenRules


MAX_STOP_IDS = 64  # stop ids a slot can hold on the device, the model's own EOS ids included
MAX_LOGIT_BIAS = 512  # logit_bias entries a slot can hold on the device
MAX_LOGPROBS = 20  # top-N logprobs a request may ask for, of its output or its prompt
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 64  # samples of one prompt that a request may ask for
MAX_PRIORITY = 1000  # priorities are from -MAX_PRIORITY to MAX_PRIORITY
MAX_BAD_WORDS = 128  # texts that a request may forbid
MAX_BAD_WORD = 256  # characters of one
MAX_SOURCE = 128 << 10  # bytes of a schema, regular expression, grammar or list of choices
MAX_NAME = 256  # characters of a tenant's name or a cache salt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Every field is honoured or refused.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens (0 or -1: all). Ties at the threshold stay.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        repetition_penalty: divides (positive) or multiplies (negative) logits of tokens seen in
            prompt or output (Keskar et al. 2019, arXiv:1909.05858); 1 is off.
        presence_penalty / frequency_penalty: subtracted once / per occurrence in the output.
        logit_bias: (token id, value) pairs added to the logits.
        seed: draws are keyed by (seed, position); None takes a fresh one for each request.
        max_new_tokens: output limit; None is up to the model's limit.
        stop: strings that end the output, held back exactly; include_stop keeps the match.
        stop_token_ids: ids that end the output besides the model's EOS ids.
        ignore_eos: the model's EOS ids do not end the output.
        logprobs: None: off; 0: of the chosen token; N: also of the N most likely. They are
            log-softmax of the model's own logits, before any option here changes them.
        skip_special_tokens: leave special tokens out of the text.
        n: samples of the prompt; each is a sequence of its own, and they share the prompt's pages.
            Sample i draws with seed + i.
        prompt_logprobs: as `logprobs`, of the prompt's tokens but for the first. With them
            `max_new_tokens` may be 0: the prompt is scored and nothing is generated.
        truncate_prompt_tokens: keep the last so many tokens of the prompt; -1: as many as fit with
            the output that is asked for.
        min_tokens: among the first so many output tokens none ends the output: its end ids are
            forbidden there, and a stop string that is complete within them ends nothing.
        allowed_token_ids: forbids all other tokens; to end by an end id it must be among them.
        bad_words: texts whose own tokens never follow each other, with a space before or without:
            the last token of each way to encode one is forbidden after those before it.
        structured: what form the output must have; it ends where that is complete.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    n: int = 1
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured: StructuredOutput | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn at random rather than taken greedily."""
        return self.temperature > 0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens seen before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Whose request it is and how urgent.

    Attributes:
        priority: lower runs first.
        tenant: who is charged; tenants of one priority share the engine fairly. Cached prefixes
            are shared within a tenant only.
        cache_salt: cached prefixes are shared only with requests of the same salt.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of a client's ask, complete and validated: lengths feasible, seed chosen.

    `stop_ids` are the ids that end this request (EOS ids unless ignored, plus its own).
    `arrival` and `deadline` are seconds on the engine's clock (`time.monotonic`). Samples of one
    prompt have the same `group`, which is "" for a sample that is alone. `rules` say which tokens
    may come; None is all of them.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    arrival: float = 0.0
    deadline: float | None = None
    scheduling: Scheduling = Scheduling()
    group: str = ""
    rules: TokenRules | None = None


class FinishReason(enum.Enum):
    """Why a request ended."""

    EOS = "eos"  # the model's own end token
    STOP_ID = "stop_id"  # one of the request's stop_token_ids
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    LATE = "late"  # refused on arrival: its first token is not expected before its deadline
    ERROR = "error"
    RULES = "rules"  # its rules about tokens leave none to follow


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of a token and, if asked, of the most likely ones, best first.

    `rank` of the token: 1 and as many as the model thought more likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class SequenceEvent(NamedTuple):
    """What one step brought for one request: new tokens, and the end if it came.

    A stop id that ends the request is the last of `tokens`. `time` is the engine clock when the
    step was read; `first_scheduled` is set on the first event (queueing ends there), and so is
    `cached_tokens`: how many of the prompt's tokens the prefix cache had. `prompt_logprobs`: of the
    prompt's next tokens, if it asked for them. `preemptions`: how often it lost its slot so far.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    time: float = 0.0
    first_scheduled: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """Command: run this request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: end this request now, for this reason. Unknown ids are ignored."""

    request_id: str
    reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Hold:
    """Command: set this request aside, or go on with it. Unknown ids are ignored."""

    request_id: str
    held: bool


@dataclass(frozen=True, slots=True)
class FlushPrefixes:
    """Command: let nobody find what was computed before; those that run keep their pages."""


Command = Submit | Abort | Hold | FlushPrefixes


@dataclass(slots=True)
class Violation:
    """One bad field: its name, what is wrong (value and limit) and what to do."""

    field: str
    message: str


class RequestError(ValueError):
    """A request that cannot be honoured as asked; nothing was started."""

    def __init__(self, violations: list[Violation]):
        self.violations = violations
        super().__init__("; ".join(f"{v.field}: {v.message}" for v in violations))


class QueueFullError(RuntimeError):
    """The bounded queue is full; `retry_after` seconds is when to try again."""

    def __init__(self, message: str, retry_after: float):
        self.retry_after = retry_after
        super().__init__(message)


class LateError(RuntimeError):
    """A request's first token is not to be expected before its deadline."""


class EngineStoppedError(RuntimeError):
    """The engine takes no requests: it is draining, stalled or dead. The message says which."""


# Why requests are not taken: bad input, no room in the queue, a server that takes none, and a
# deadline that could not be met.
REFUSALS = ("invalid", "queue_full", "unavailable", "late")


@dataclass(slots=True)
class Counters:
    """Since start. received = finished + aborted + refused + running + waiting."""

    received: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    thrashes: int = 0  # preemptions of sequences that had hardly gone on since the one before
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # those found
    by_reason: dict[str, int] = field(default_factory=dict)
    refused_by: dict[str, int] = field(default_factory=dict)  # all of `refused`, see REFUSALS
