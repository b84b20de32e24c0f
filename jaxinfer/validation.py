"""The edge: what a request may ask, checked in full before anything starts.

`build_request` is the only way from a caller's prompt and `SamplingParams` to a `Request`. It
reports every violation at once, each with the field, the value, the limit and what to do, so the
engine behind it never meets an id, a length or a number that it cannot run.

Rules worth knowing:
- `max_new_tokens` absent means up to the limit: min(max_model_len, KV capacity) - prompt tokens.
  Given, it must fit as it stands; it is never clamped.
- A prompt needs at least one token and leaves room for one more, so `max_model_len - 1` tokens is
  the longest and answers one token. With `prompt_logprobs`, `max_new_tokens` may be 0: nothing is
  generated, and no room is needed.
- `temperature` 0 is greedy, whatever top_k, top_p and min_p say (they never remove the most likely
  token). Between 0 and MIN_TEMPERATURE is refused: logits divided by it overflow float32.
- `top_k` 0, -1 or at least the vocabulary keeps all tokens; the request carries 0 then.
- The end ids of a request are its `stop_token_ids` and, unless `ignore_eos`, the model's own.
- With `n` above 1, `samples` makes the request of each sample from the one of the ask. The queue
  must be able to hold them all.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxinfer.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_NAME,
    MAX_PRIORITY,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_IDS,
    Request,
    SamplingParams,
    Scheduling,
)
from jaxinfer.rule_checks import check_rules, check_rules_agree, token_rules
from jaxinfer.violations import Violations, check_token_ids, first_wrong, id_range

__all__ = ["EngineLimits", "Violations", "build_request", "check_token_ids", "samples"]

MAX_STOP_STRINGS = 64  # stop strings of one request
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_BIAS = 100.0  # magnitude of a logit_bias value
MIN_TEMPERATURE = 1e-12  # smallest temperature that is not 0
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine can take.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: prompt + output tokens of one sequence.
        max_num_seqs: sequences that run at once.
        kv_tokens: tokens of KV pool that one sequence may use when it is alone.
        max_queued_requests / max_queued_tokens: bounds of the waiting queue.
        batch_priority: priorities from it on are the batch class, for which
            `interactive_reserve` of the queue is none.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    batch_priority: int = MAX_PRIORITY + 1
    interactive_reserve: float = 0.0

    @property
    def max_queued_batch(self) -> int:
        """Requests of the batch class that may wait."""
        return max(1, int(self.max_queued_requests * (1 - self.interactive_reserve)))

    @property
    def max_tokens(self) -> int:
        """Prompt + output tokens that one sequence can really have."""
        return min(self.max_model_len, self.kv_tokens)


def build_request(
    prompt: Sequence[int],
    params: SamplingParams,
    limits: EngineLimits,
    eos_ids: Iterable[int],
    request_id: str,
    now: float,
    timeout: float | None = None,
    scheduling: Scheduling | None = None,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> Request:
    """The complete, validated `Request`; `now` is engine time and `timeout` seconds from it.

    `bad_words` are those of `params` as token ids. Raises RequestError with every violation.
    """
    eos, scheduling = tuple(eos_ids), scheduling or Scheduling()
    found = Violations()
    check_prompt(found, prompt, limits, outputs=0 if params.max_new_tokens == 0 else 1)
    check_sampling(found, params, limits, eos)
    own_eos = () if params.ignore_eos else eos
    end_ids = tuple(dict.fromkeys((*own_eos, *params.stop_token_ids)))
    check_scheduling(found, scheduling)
    if not found:
        check_samples(found, len(prompt), params.n, limits)
        if params.max_new_tokens is not None:
            check_output_length(found, len(prompt), params.max_new_tokens, limits)
    found.raise_if_any()
    max_new_tokens = params.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = limits.max_tokens - len(prompt)
    rules = token_rules(params, end_ids, bad_words)
    check_rules_agree(found, rules, max_new_tokens, limits.vocab_size)
    found.raise_if_any()
    return Request(
        id=request_id,
        prompt=tuple(map(int, prompt)),
        params=_normalised(params, limits),
        max_new_tokens=max_new_tokens,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop_ids=end_ids,
        arrival=now,
        deadline=None if timeout is None else now + timeout,
        scheduling=scheduling,
        rules=rules,
    )


def samples(request: Request) -> list[Request]:
    """The requests of an ask's samples, each with an id and a seed of its own and one group.

    A single sample is the request itself, in no group. What is said of the prompt, the first one
    says.
    """
    if request.params.n == 1:
        return [request]
    silent = dataclasses.replace(request.params, prompt_logprobs=None)
    return [
        dataclasses.replace(
            request,
            id=f"{request.id}.{i}" if i else request.id,
            seed=(request.seed + i) % (MAX_SEED + 1),
            group=request.id,
            params=silent if i else request.params,
        )
        for i in range(request.params.n)
    ]


def _normalised(params: SamplingParams, limits: EngineLimits) -> SamplingParams:
    """top_k = 0 wherever all tokens are kept."""
    keeps_all = params.top_k <= 0 or params.top_k >= limits.vocab_size
    return dataclasses.replace(params, top_k=0) if keeps_all else params


def check_prompt(
    found: Violations, prompt: Sequence[int], limits: EngineLimits, outputs: int = 1
) -> None:
    """Require token ids that leave room for so many outputs."""
    count = len(prompt)
    if not count:
        found.add("prompt", "is empty; give at least one token")
    elif count + outputs > limits.max_model_len:
        found.add(
            "prompt",
            f"has {count} tokens; at most {limits.max_model_len - outputs} leave room for an answer"
            f" (max_model_len is {limits.max_model_len}); shorten it",
        )
    elif count + outputs > limits.kv_tokens:
        found.add(
            "prompt",
            f"has {count} tokens; the KV pool holds {limits.kv_tokens} tokens of one sequence;"
            " shorten it or serve with a larger --kv-cache-memory",
        )
    elif count > limits.max_queued_tokens:
        found.add(
            "prompt",
            f"has {count} tokens; the queue takes {limits.max_queued_tokens} tokens in all;"
            " shorten it or serve with a larger --max-queued-tokens",
        )
    else:  # of a prompt that is too long, the ids are not worth the time
        check_token_ids(found, "prompt", prompt, limits.vocab_size)


def check_output_length(
    found: Violations, prompt_tokens: int, max_new_tokens: int, limits: EngineLimits
) -> None:
    """Require prompt + output to fit the model's length and the KV pool."""
    total = prompt_tokens + max_new_tokens
    if total <= limits.max_tokens:
        return
    room = limits.max_tokens - prompt_tokens
    if limits.max_model_len <= limits.kv_tokens:
        limit = f"max_model_len is {limits.max_model_len}"
    else:
        limit = (
            f"the KV pool holds {limits.kv_tokens} tokens of one sequence"
            " (serve with a larger --kv-cache-memory)"
        )
    found.add(
        "max_new_tokens",
        f"is {max_new_tokens}; with {prompt_tokens} prompt tokens that makes {total}, and {limit}:"
        f" ask for at most {room}, or leave it out for as many as fit",
    )


def check_samples(found: Violations, prompt_tokens: int, n: int, limits: EngineLimits) -> None:
    """Require the queue to be able to hold all samples, or it could never take them."""
    if n > limits.max_queued_requests:
        found.add(
            "n",
            f"is {n}; the queue takes {limits.max_queued_requests} requests in all, and each sample"
            " is one: ask for fewer or serve with a larger --max-queued-requests",
        )
    elif n * prompt_tokens > limits.max_queued_tokens:
        found.add(
            "n",
            f"is {n}; with {prompt_tokens} prompt tokens each that makes {n * prompt_tokens}, and"
            f" the queue takes {limits.max_queued_tokens} tokens in all: ask for at most"
            f" {limits.max_queued_tokens // prompt_tokens} or serve with a larger"
            " --max-queued-tokens",
        )


def check_scheduling(found: Violations, scheduling: Scheduling) -> None:
    """Require a priority in its range, and names that are text of bounded length."""
    found.integer("priority", scheduling.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for field in ("tenant", "cache_salt"):
        name = getattr(scheduling, field)
        if not isinstance(name, str):
            found.add(field, f"is {name!r}; it must be a string")
        elif len(name) > MAX_NAME:
            found.add(field, f"has {len(name)} characters; at most {MAX_NAME} are taken")
        elif any("\ud800" <= char <= "\udfff" for char in name):
            found.add(field, f"is {name!r}, which is no text: it has half of a surrogate pair")


def check_sampling(
    found: Violations, params: SamplingParams, limits: EngineLimits, eos_ids: Sequence[int]
) -> None:
    """Require every field of `params` to be one the engine honours as it stands."""
    if found.number("temperature", params.temperature, 0, MAX_TEMPERATURE) and (
        0 < params.temperature < MIN_TEMPERATURE
    ):
        found.add(
            "temperature",
            f"is {params.temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}",
        )
    found.integer("top_k", params.top_k, -1, None, " (0 and -1 keep all tokens)")
    found.number("top_p", params.top_p, 0, 1, open_low=True)
    found.number("min_p", params.min_p, 0, 1)
    found.number("repetition_penalty", params.repetition_penalty, 0.01, 100)
    found.number("presence_penalty", params.presence_penalty, -2, 2)
    found.number("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        found.integer("seed", params.seed, 0, MAX_SEED)
    if params.max_new_tokens is not None:
        scored = params.prompt_logprobs is not None
        why = "" if scored else " (0 needs prompt_logprobs)"
        found.integer("max_new_tokens", params.max_new_tokens, 0 if scored else 1, None, why)
    for field in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, field)) is not None:
            found.integer(field, count, 0, min(MAX_LOGPROBS, limits.vocab_size))
    found.integer("n", params.n, 1, MAX_SAMPLES)
    _check_logit_bias(found, params, limits)
    _check_stops(found, params, limits, eos_ids)
    check_rules(found, params, limits.vocab_size)


def _check_logit_bias(found: Violations, params: SamplingParams, limits: EngineLimits) -> None:
    """Entries are named by their token ids, as a mapping's are."""
    entries = params.logit_bias
    if len(entries) > MAX_LOGIT_BIAS:
        found.add("logit_bias", f"has {len(entries)} entries; at most {MAX_LOGIT_BIAS} are taken")
        return
    ids = [token for token, _ in entries]
    if (wrong := first_wrong(ids, limits.vocab_size)) is not None:
        found.add(f"logit_bias[{ids[wrong]}]", id_range(ids[wrong], limits.vocab_size))
    if len(set(ids)) < len(ids):
        found.add("logit_bias", "names a token id twice; give each id one value")
    for token, value in entries:
        found.number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS)


def _check_stops(
    found: Violations, params: SamplingParams, limits: EngineLimits, eos_ids: Sequence[int]
) -> None:
    check_token_ids(found, "stop_token_ids", params.stop_token_ids, limits.vocab_size)
    own = set() if params.ignore_eos else set(eos_ids)
    count = len(own.union(params.stop_token_ids))
    if count > MAX_STOP_IDS:
        found.add(
            "stop_token_ids",
            f"makes {count} end ids with the model's own {len(own)}; at most {MAX_STOP_IDS} fit",
        )
    if isinstance(params.stop, str):
        found.add("stop", f"is {params.stop!r}; give a tuple of strings")
        return
    if len(params.stop) > MAX_STOP_STRINGS:
        found.add("stop", f"has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    for position, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            found.add(
                f"stop[{position}]",
                f"has {len(stop)} characters; it must have 1 to {MAX_STOP_LENGTH}",
            )
