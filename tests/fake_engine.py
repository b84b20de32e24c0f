"""An engine with hand-computable answers, for what stands in front of it.

Its model answers a prompt by a script: a function from the request to the token ids it would say.
Its tokenizer is one token a byte, so "text" and ids can be written by hand.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.expert_load import ExpertLoad
from jaxinfer.load import Load, Percentiles, SlotRow, StepRecord
from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.request import (
    Abort,
    Counters,
    FinishReason,
    FlushPrefixes,
    Hold,
    Request,
    SequenceEvent,
    Submit,
    TokenLogprobs,
)
from jaxinfer.step_times import StepTimes
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.validation import EngineLimits

EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b; token 256 is the special <eos>."""
    alphabet = {}
    for byte, char in enumerate(_byte_alphabet()):
        alphabet[char] = byte
    raw = tokenizers.Tokenizer(models.BPE(alphabet, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw.to_str(), {"chat_template": TEMPLATE}, [EOS])


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def says(text: str):
    """The script of a model that always says this text and ends."""
    return lambda request: [*text.encode(), EOS]


def echo(request: Request) -> list[int]:
    """The script of a model that repeats its prompt and ends."""
    return [*request.prompt, EOS]


def forever(request: Request) -> list[int]:
    """The script of a model that counts up through printable bytes and never ends."""
    return [33 + i % 90 for i in range(1 << 16)]


HALF = -1  # the position of a sequence of whose prompt a half was scored
PAGE_SIZE, PAGES = 16, 9  # page 0 is the null page

LIMITS = EngineLimits(
    vocab_size=257,
    max_model_len=64,
    max_num_seqs=2,
    kv_tokens=64,
    max_queued_requests=4,
    max_queued_tokens=1000,
)


class ScriptedEngine:
    """Stands in for `Engine`: a step gives every running sequence its script's next token.

    `gate`: cleared, steps block, as a device that hangs does. `step_seconds` is how long one takes.
    `late`: if set, requests with a deadline are refused on arrival with this text. `deferred`: how
    many of those that wait do so for their grammars. `cached`: prompt tokens that the prefix cache
    has of a request. Every running sequence uses one page, and the
    last page but one is cached.
    """

    def __init__(self, script=echo, limits: EngineLimits = LIMITS, step_seconds: float = 0.0):
        self.limits = limits
        self.counters = Counters()
        self.script = script
        self.step_seconds = step_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.fail_with: Exception | None = None
        self.waiting: deque[Request] = deque()
        self.running: dict[str, tuple[Request, list[int], int]] = {}
        self.aborted: list[Abort] = []
        self.holds: list[Hold] = []
        self.held: set[str] = set()
        self.ended: dict[str, FinishReason] = {}
        self.late, self.deferred = "", 0
        self.cached = lambda request: 0
        self.records: deque[StepRecord] = deque()
        self.ttft, self.tpot = Percentiles(), Percentiles()
        self.experts: ExpertLoad | None = None
        self.times, self.compiles_after_ready = StepTimes(), 0
        self._refusals: list[SequenceEvent] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running.keys() - self.held or self._refusals)

    def load(self) -> Load:
        waiting = [*self.waiting]
        return Load(
            slots=self.limits.max_num_seqs,
            running=len(self.running),
            waiting=len(waiting),
            waiting_tokens=sum(len(request.prompt) for request in waiting),
            pages=self._pages(),
            page_size=PAGE_SIZE,
            deferred=min(self.deferred, len(waiting)),
            counters=dataclasses.replace(self.counters),
            ttft=self.ttft,
            tpot=self.tpot,
        )

    def page_states(self) -> list[bytes]:
        used = min(len(self.running), PAGES - 2)
        return [bytes([1] * used + [0] * (PAGES - 2 - used) + [2])]

    def slot_rows(self) -> list[SlotRow]:
        rows = [*self.running.values()]
        return [
            SlotRow(slot, r.id, len(r.prompt), self.cached(r), len(r.prompt) + done, done,
                    len(r.prompt) + r.max_new_tokens)
            for slot, (r, _, done) in enumerate(rows)
        ]  # fmt: skip

    def _pages(self) -> tuple[int, int, int]:
        (states,) = self.page_states()
        return states.count(0), states.count(2), states.count(1)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.running or any(r.id == request_id for r in self.waiting)

    def execute(self, command, now: float) -> None:
        if isinstance(command, Submit):
            self.counters.received += 1
            if self.late and command.request.deadline is not None:
                self.counters.refused += 1
                self.ended[command.request.id] = FinishReason.LATE
                end = SequenceEvent(command.request.id, (), (), FinishReason.LATE, self.late, now)
                self._refusals.append(end)
                return
            self.counters.prompt_tokens += len(command.request.prompt)
            self.waiting.append(command.request)
            return
        if isinstance(command, FlushPrefixes):
            self.cached = lambda request: 0
            return
        if isinstance(command, Hold):
            self.holds.append(command)
            (self.held.add if command.held else self.held.discard)(command.request_id)
            return
        self.aborted.append(command)
        known = [r for r in self.waiting if r.id == command.request_id]
        for request in known:
            self.waiting.remove(request)
            self._refusals.append(SequenceEvent(request.id, finish=command.reason, time=now))
        if known or self.running.pop(command.request_id, None):
            self._count_end(command.request_id, command.reason)

    def end_all(self, now: float) -> None:
        for request_id in [*self.running, *(request.id for request in self.waiting)]:
            self._count_end(request_id, FinishReason.CANCELLED)
        self.running.clear()
        self.waiting.clear()

    def step(self, now: float) -> list[SequenceEvent]:
        self.gate.wait()
        if self.fail_with is not None:
            raise self.fail_with
        time.sleep(self.step_seconds)
        fresh, (refused, self._refusals) = set(), (self._refusals, [])
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting.popleft()
            self.running[request.id] = (request, self.script(request), 0)
            fresh.add(request.id)
            self.counters.prefix_queries += len(request.prompt)
            self.counters.prefix_hits += self.cached(request)
        self._record(fresh, now)
        return refused + [
            self._advance(request_id, request_id in fresh, now)
            for request_id in [*self.running]
            if request_id not in self.held
        ]

    def _record(self, fresh: set[str], now: float) -> None:
        running, (free, cached, used) = len(self.running), self._pages()
        if not running:
            return
        prompts = sum(len(self.running[request_id][0].prompt) for request_id in fresh)
        decodes = running - len(fresh)
        step = self.records[-1].step + 1 if self.records else 0
        self.records.append(
            StepRecord(
                step, now, running, len(self.waiting), decodes, prompts, len(fresh), 0,
                free, cached, used,
            )
        )  # fmt: skip

    def _advance(self, request_id: str, fresh: bool, now: float) -> SequenceEvent:
        request, script, position = self.running[request_id]
        scored = None
        if request.params.prompt_logprobs is not None and position <= 0 and len(request.prompt) > 1:
            scored = self._scored(request, second=position < 0)
            if position == 0 and len(scored) < len(request.prompt) - 1:
                self.running[request_id] = (request, script, HALF)
                return self._first(request, fresh, now)._replace(prompt_logprobs=scored)
        position = max(position, 0)
        if not request.max_new_tokens:
            del self.running[request_id]
            self._count_end(request_id, FinishReason.LENGTH)
            end = self._first(request, fresh, now)
            return end._replace(finish=FinishReason.LENGTH, prompt_logprobs=scored)
        token = script[min(position, len(script) - 1)]  # its last on and on, if that is no end
        self.counters.generated_tokens += 1
        position += 1
        finish = None
        if token in request.stop_ids:
            own = token in request.params.stop_token_ids
            finish = FinishReason.STOP_ID if own else FinishReason.EOS
        elif position == request.max_new_tokens:
            finish = FinishReason.LENGTH
        self.running[request_id] = (request, script, position)
        if finish is not None:
            del self.running[request_id]
            self._count_end(request_id, finish)
        return self._first(request, fresh, now)._replace(
            tokens=(token,),
            logprobs=self._logprobs(request, token),
            finish=finish,
            prompt_logprobs=scored,
        )

    def _first(self, request: Request, fresh: bool, now: float) -> SequenceEvent:
        """An event without anything but what only the first one has."""
        first, cached = (now, self.cached(request)) if fresh else (None, 0)
        return SequenceEvent(request.id, time=now, first_scheduled=first, cached_tokens=cached)

    def _scored(self, request: Request, second: bool) -> PromptLogprobs:
        """The first half of a prompt's tokens, if it has more than two, or the rest: logprob -t/2
        and rank t + 1 of token t, and the first ids as the most likely ones."""
        top, following = request.params.prompt_logprobs, request.prompt[1:]
        half = len(following) // 2 or len(following)
        following = following[half:] if second else following[:half]
        columns = np.zeros((len(following), 2 + 2 * top), np.int32)
        columns[:, 0] = (-np.asarray(following, np.float32) / 2).view(np.int32)
        columns[:, 1] = np.asarray(following) + 1
        columns[:, 2 : 2 + top] = np.arange(top)
        columns[:, 2 + top :] = (-np.arange(top, dtype=np.float32) / 2).view(np.int32)
        return PromptLogprobs(columns)

    def _logprobs(self, request: Request, token: int) -> tuple[TokenLogprobs, ...]:
        top = request.params.logprobs
        if top is None:
            return ()
        return (TokenLogprobs(-float(token), tuple((i, -float(i)) for i in range(top)), token + 1),)

    def _count_end(self, request_id: str, reason: FinishReason) -> None:
        self.ended[request_id] = reason
        if reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR):
            self.counters.aborted += 1
        else:
            self.counters.finished += 1


def balanced(counters: Counters, engine: ScriptedEngine) -> bool:
    """Whether every request received is accounted for."""
    return counters.received == (
        counters.finished
        + counters.aborted
        + counters.refused
        + len(engine.running)
        + len(engine.waiting)
    )


def limits(**changes: int) -> EngineLimits:
    return dataclasses.replace(LIMITS, **changes)


LONG = limits(max_model_len=1 << 15, kv_tokens=1 << 15)  # `forever` does not end before the test
