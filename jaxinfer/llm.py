"""The offline API: a model in this process, without a server.

    from jaxinfer import LLM, SamplingParams

    llm = LLM("demo")
    for completion in llm.generate(["Once upon a time", "2 + 2 ="], SamplingParams(temperature=0)):
        print(completion.text)

The engine's steps run in the caller's thread, so an `LLM` is for one thread.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.config import EngineConfig
from jaxinfer.presets import preset_values
from jaxinfer.request import (
    Abort,
    Counters,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    Scheduling,
    SequenceEvent,
    Submit,
    TokenLogprobs,
    Violation,
)
from jaxinfer.text import Chat, Delta, OutputBuilder, Prompt, TextProcessor, Timing
from jaxinfer.validation import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from jaxinfer.checkpoints import LoadedModel
    from jaxinfer.engine import Engine
    from jaxinfer.request import Command
    from jaxinfer.tokenizer import Tokenizer

    Progress = Callable[[str, int, int], None]  # (what, done, total)

    class Steppable(Protocol):
        """What an LLM drives: an `Engine`."""

        @property
        def limits(self) -> EngineLimits: ...
        @property
        def counters(self) -> Counters: ...
        @property
        def has_work(self) -> bool: ...
        def execute(self, command: Command, now: float) -> None: ...
        def step(self, now: float) -> list[SequenceEvent]: ...


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
        error: what failed when the finish reason is ERROR.
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
    error: str = ""
    more: tuple[Completion, ...] = ()

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All samples of the prompt, this one first."""
        return (self, *self.more)


def open_engine(
    model: str, config: EngineConfig, dtype: str | None = None, progress: Progress | None = None
) -> tuple[LoadedModel, Engine]:
    """Load the checkpoint at path `model`, or `demo`, and compile its engine.

    `dtype` None is as stored; it takes the place of `config.dtype`. Raises CheckpointError for the
    checkpoint, ValueError for a configuration that does not fit it.
    """
    from jaxinfer.checkpoints import load_model
    from jaxinfer.demo import DEMO, demo_checkpoint
    from jaxinfer.startup import build_engine, param_placement

    path = demo_checkpoint(progress) if model == DEMO else model
    placement = param_placement(config)
    loaded = load_model(path, dtype=dtype, sharding_of=placement, progress=progress)
    return loaded, build_engine(loaded, dataclasses.replace(config, dtype=loaded.dtype), progress)


class LLM:
    """One model, loaded and compiled.

    `model` is an Orbax folder, a Hugging Face folder, a .gguf file or "demo"; `dtype` None is as
    stored; `preset` is "online", "batch" or "mixed", see `presets.py`; further keywords are fields
    of `EngineConfig` and win over the preset. They are named as the flags of the command line, but
    for `kv_pool_bytes` (--kv-cache-memory), `kv_dtype` (--kv-cache-dtype), `kv_offload_bytes`
    (--kv-offload-gib), `memory_utilization` (--gpu-memory-utilization), `overlap` (--no-overlap)
    and `tenant_weights` (--tenant-weight).

    Raises TypeError for a keyword that is none of these, and what `open_engine` raises.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        preset: str | None = None,
        progress: Progress | None = None,
        **config: Any,
    ):
        _check_options(config)
        if preset is not None:
            config = {**preset_values(preset), **config}
        loaded, engine = open_engine(str(model), EngineConfig(**config), dtype, progress)
        self._attach(engine, loaded.tokenizer, loaded.generation.eos_ids)

    @classmethod
    def over(cls, engine: Steppable, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> LLM:
        """An LLM over an engine that is ready."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer, eos_ids)
        return llm

    def _attach(self, engine: Steppable, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._text = TextProcessor(tokenizer, eos_ids, engine.limits)
        self._jobs: dict[str, _Job] = {}
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
    ) -> list[Completion]:
        """One completion for each prompt, in their order; the further samples are in its `more`.

        A prompt is a text, token ids, or chat messages; `params` and `scheduling` are for all of
        them or one each. Raises RequestError, before anything runs, if one of them cannot be
        honoured.
        """
        several = _several(prompts)
        asks = self._requests(
            several,
            _each(several, params, SamplingParams(), "params"),
            _each(several, scheduling, Scheduling(), "scheduling"),
        )
        jobs = iter(self._run([request for ask in asks for request in ask]))
        return [_completion([job for _, job in zip(ask, jobs)]) for ask in asks]

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
    ) -> list[Completion]:
        """As `generate`, for one conversation or several."""
        return self.generate(cast("Prompt | Sequence[Prompt]", messages), params, scheduling)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
    ) -> Iterator[Delta]:
        """The completion of one prompt as it is made. Leaving it early ends the request.

        Deltas of several samples come mixed, each with its sample's `index`; the last one of each
        sample has `finish`.
        """
        (ask,) = self._requests(
            [prompt], [params or SamplingParams()], [scheduling or Scheduling()]
        )
        return self._stream(ask)

    # -- how -------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        scheduling: Sequence[Scheduling],
    ) -> list[list[Request]]:
        """Validated requests, those of its samples for each prompt.

        Raises RequestError naming the prompt by its position.
        """
        asks: list[list[Request]] = []
        for position, (prompt, chosen, whose) in enumerate(zip(prompts, params, scheduling)):
            try:
                ids, request_id = self._text.encode(prompt), f"r{next(self._ids)}"
                asks.append(self._text.requests(ids, chosen, request_id, 0.0, scheduling=whose))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                named = [
                    Violation(f"prompts[{position}]: {v.field}", v.message)
                    for v in error.violations
                ]
                raise RequestError(named) from error
        return asks

    def _run(self, requests: list[Request]) -> list[_Job]:
        """Run requests to their ends, a bounded number of them in the engine at a time."""
        waiting, jobs = iter(requests), []
        window = 2 * self.engine.limits.max_num_seqs
        try:
            while True:
                for request in itertools.islice(waiting, max(0, window - len(self._jobs))):
                    jobs.append(self._submit(request))
                if len(jobs) == len(requests) and all(job.output.finished for job in jobs):
                    return jobs
                self._step()
        finally:
            self._abandon(jobs)

    def _stream(self, ask: list[Request]) -> Iterator[Delta]:
        jobs: list[_Job] = []
        try:
            for index, request in enumerate(ask):
                jobs.append(self._submit(request, index))
            while left := [job for job in jobs if not job.output.finished]:
                self._step()
                for job in left:
                    if job.delta.token_ids or job.output.finished:
                        yield job.take()
        finally:
            self._abandon(jobs)

    def _submit(self, request: Request, index: int = 0) -> _Job:
        now = time.monotonic()
        request = dataclasses.replace(request, arrival=now)
        job = _Job(request, self._text.output(request, index), Delta(index))
        self.engine.execute(Submit(request), now)
        self._jobs[request.id] = job
        return job

    def _step(self) -> None:
        """One step of the engine; its events go to their jobs."""
        for event in self.engine.step(time.monotonic()):
            job = self._jobs.get(event.request_id)
            if job is None:
                continue  # it was left
            job.delta.extend(job.output.push(event))
            if job.output.finished:
                del self._jobs[event.request_id]
                if event.finish is None:  # a stop string, which the engine knows nothing of
                    self._abort(job, FinishReason.STOP_STRING)

    def _abandon(self, jobs: list[_Job]) -> None:
        """End those that have not ended, and let the engine put everything back."""
        for job in jobs:
            if self._jobs.pop(job.request.id, None) is not None:
                self._abort(job, FinishReason.CANCELLED)
        while self.engine.has_work and not self._jobs:
            self._step()

    def _abort(self, job: _Job, reason: FinishReason) -> None:
        self.engine.execute(Abort(job.request.id, reason), time.monotonic())


@dataclass(slots=True, eq=False)
class _Job:
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
            whole.finish.error,
        )


def _completion(jobs: Sequence[_Job]) -> Completion:
    """What the samples of one prompt brought."""
    first, *more = [job.completion() for job in jobs]
    return dataclasses.replace(first, more=tuple(more)) if more else first


_FLAGS = {  # what the command line calls differently
    "kv_cache_memory": "kv_pool_bytes",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_offload_gib": "kv_offload_bytes",
    "no_overlap": "overlap",
    "tenant_weight": "tenant_weights",
}


def _check_options(given: Mapping[str, Any]) -> None:
    """Require names of `EngineConfig`'s fields. Raises TypeError naming what was meant."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in given:
        if name in known:
            continue
        close = [_FLAGS[name]] if name in _FLAGS else difflib.get_close_matches(name, known, 2)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise TypeError(f"LLM has no option {name!r}{meant}; it has: {', '.join(sorted(known))}")


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also when one was given bare: a text, token ids, or a conversation."""
    if isinstance(prompts, str):
        return [prompts]
    single = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)
    if single or (len(prompts) > 0 and isinstance(prompts[0], Mapping)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _each[T](
    prompts: Sequence[Prompt], given: T | Sequence[T] | None, default: T, name: str
) -> Sequence[T]:
    """One for each prompt. Raises ValueError for a list of another length."""
    if given is None or isinstance(given, type(default)):
        return [default if given is None else given] * len(prompts)
    several = cast("Sequence[T]", given)
    if len(several) != len(prompts):
        raise ValueError(f"{len(several)} {name} for {len(prompts)} prompts; give one, or one each")
    return several
