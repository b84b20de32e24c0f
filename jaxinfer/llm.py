"""The offline API: a model in this process, without a server.

    from jaxinfer import LLM, SamplingParams

    llm = LLM("demo")
    for completion in llm.generate(["Once upon a time", "2 + 2 ="], SamplingParams(temperature=0)):
        print(completion.text)

The engine's steps run in the caller's thread, so an `LLM` is for one thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.completion import Completion, Job, completion_of
from jaxinfer.config import EngineConfig
from jaxinfer.generation import GenerationDefaults, SamplingDefaults, TextOptions
from jaxinfer.grammar_process import GrammarError
from jaxinfer.llm_arguments import check_options, checked_chat, one_each, several_prompts
from jaxinfer.presets import preset_values
from jaxinfer.replies.formats import reply_format
from jaxinfer.replies.reader import Replies
from jaxinfer.replies.tool_use import AUTO, tool_use
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
    Violation,
)
from jaxinfer.structure_check import refusal
from jaxinfer.structured import StructuredOutput
from jaxinfer.text import AnyPrompt, Chat, Delta, Params, Prompt, TextProcessor
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


logger = logging.getLogger(__name__)
_UNSET: Params = {}  # the model's generation defaults decide everything


def open_engine(
    model: str,
    config: EngineConfig,
    dtype: str | None = None,
    progress: Progress | None = None,
    text: TextOptions | None = None,
) -> tuple[LoadedModel, Engine]:
    """Load the checkpoint at path `model`, or `demo`, and compile its engine.

    `dtype` None is as stored; it takes the place of `config.dtype`. `text` takes the place of the
    checkpoint's own chat template and generation defaults. Raises CheckpointError for the
    checkpoint, ValueError for a configuration that does not fit it.
    """
    from jaxinfer.checkpoints import load_model
    from jaxinfer.cpu_kernels.choose import prepare_weights
    from jaxinfer.demo import DEMO, demo_checkpoint
    from jaxinfer.startup import build_engine, has_room, param_placement

    path = demo_checkpoint(progress) if model == DEMO else model
    placement = param_placement(config)
    loaded = load_model(
        path,
        dtype=dtype,
        sharding_of=placement,
        progress=progress,
        text=text,
        quantization=config.quantization,
        fits=functools.partial(has_room, config),
    )
    _log_defaults(loaded.generation)
    served = dataclasses.replace(config, dtype=loaded.dtype, quantization=loaded.quantization)
    prepare_weights(loaded, served)
    return loaded, build_engine(loaded, served, progress)


def _log_defaults(generation: GenerationDefaults) -> None:
    sampling = generation.sampling
    eos = ", ".join(map(str, generation.eos_ids)) or "none"
    logger.info("generation defaults: %s; EOS ids: %s", sampling.describe(), eos)
    if not generation.eos_ids:
        logger.warning(
            "the model has no end token that its tokenizer knows: outputs end at their limit or by"
            " a request's own stops; name one with --override-generation-config"
        )
    if sampling.not_honoured:
        logger.warning("generation defaults not honoured: %s", ", ".join(sampling.not_honoured))


class LLM:
    """One model, loaded and compiled.

    `model` is an Orbax folder, a Hugging Face folder, a .gguf file or "demo"; `dtype` None is as
    stored; `preset` is "online", "batch" or "mixed", see `presets.py`. `chat_template` is a file
    with one in place of the checkpoint's; `generation_config` is "auto" (the checkpoint's own
    generation_config.json), "none" or a folder with another, and `override_generation_config` a
    dict of fields that win over it.

    Further keywords are fields of `EngineConfig` and win over the preset. They are named as the
    flags of the command line, but for `kv_pool_bytes` (--kv-cache-memory), `kv_dtype`
    (--kv-cache-dtype), `kv_offload_bytes` (--kv-offload-gib), `memory_utilization`
    (--gpu-memory-utilization), `overlap` (--no-overlap) and `tenant_weights` (--tenant-weight).

    Raises TypeError for a keyword that is none of these, and what `open_engine` raises.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        preset: str | None = None,
        progress: Progress | None = None,
        chat_template: str | Path | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **config: Any,
    ):
        check_options(config)
        text = TextOptions.read(chat_template, generation_config, override_generation_config)
        if preset is not None:
            config = {**preset_values(preset), **config}
        loaded, engine = open_engine(str(model), EngineConfig(**config), dtype, progress, text)
        generation = loaded.generation
        self._attach(engine, loaded.tokenizer, generation.eos_ids, generation.sampling)

    @classmethod
    def over(
        cls,
        engine: Steppable,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        sampling: SamplingDefaults | None = None,
    ) -> LLM:
        """An LLM over an engine that is ready."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer, eos_ids, sampling)
        return llm

    def _attach(
        self,
        engine: Steppable,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        sampling: SamplingDefaults | None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._text = TextProcessor(tokenizer, eos_ids, engine.limits, sampling)
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        add_special_tokens: bool = True,
    ) -> list[Completion]:
        """One completion for each prompt, in their order; the further samples are in its `more`.

        A prompt is a text, token ids, or chat messages; `params` and `scheduling` are for all of
        them or one each. A `SamplingParams` says everything; a dict of some of its fields, or
        nothing, leaves the others to the model's generation defaults. `add_special_tokens`: whether
        texts get what the model expects around them. Raises RequestError, before anything runs, if
        one of them cannot be honoured.
        """
        several = several_prompts(prompts)
        asks = self._requests(
            several,
            one_each(several, params, _UNSET, "params", (SamplingParams, Mapping)),
            one_each(several, scheduling, Scheduling(), "scheduling", Scheduling),
            add_special_tokens,
        )
        return self._completions(asks)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: Params | Sequence[Params] | None = None,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = AUTO,
        parallel_tool_calls: bool = True,
    ) -> list[Completion]:
        """As `generate`, for one conversation or several.

        `tools`, `tool_choice` ("auto", "none", "required", or one named as {"function": {"name":
        …}}) and messages with calls and results have the form of the OpenAI API. With tools, calls
        and reasoning are taken out of the text, into `tool_calls` and `reasoning` of a completion.
        """
        several = several_prompts(cast("Prompt | Sequence[Prompt]", messages))
        use = tool_use(tools or (), tool_choice, parallel_tool_calls)
        if not tools:
            return self.generate(several, params, scheduling)
        form = reply_format(self.tokenizer)
        replies = use.replies(form)
        kinds = (SamplingParams, Mapping)
        asks = self._requests(
            [checked_chat(chat, use, replies) for chat in several],
            [use.held(each, form) for each in one_each(several, params, _UNSET, "params", kinds)],
            one_each(several, scheduling, Scheduling(), "scheduling", Scheduling),
            True,
        )
        return self._completions(asks, replies)

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        scheduling: Scheduling | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[Delta]:
        """The completion of one prompt as it is made. Leaving it early ends the request.

        Deltas of several samples come mixed, each with its sample's `index`; the last one of each
        sample has `finish`.
        """
        chosen = _UNSET if params is None else params
        whose = [scheduling or Scheduling()]
        (ask,) = self._requests([prompt], [chosen], whose, add_special_tokens)
        return self._stream(ask)

    @property
    def default_sampling(self) -> SamplingDefaults:
        """What requests get that leave fields unset."""
        return self._text.sampling

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation defaults, and our own for the rest: what to change a field of.

        Their `max_new_tokens` must fit as it stands, like any that is asked for.
        """
        return self._text.sampling.params()

    # -- how -------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Sequence[AnyPrompt],
        params: Sequence[Params],
        scheduling: Sequence[Scheduling],
        special: bool,
    ) -> list[list[Request]]:
        """Validated requests, those of its samples for each prompt.

        Raises RequestError naming the prompt by its position.
        """
        asks: list[list[Request]] = []
        for position, (prompt, chosen, whose) in enumerate(zip(prompts, params, scheduling)):
            try:
                ids, request_id = self._text.encode(prompt, special), f"r{next(self._ids)}"
                asks.append(self._text.requests(ids, chosen, request_id, 0.0, scheduling=whose))
                self._check_structure(asks[-1][0].params.structured)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                named = [
                    Violation(f"prompts[{position}]: {v.field}", v.message)
                    for v in error.violations
                ]
                raise RequestError(named) from error
        return asks

    def _check_structure(self, structure: StructuredOutput | None) -> None:
        """Wait until it was read. Raises RequestError."""
        reading = None if structure is None else self._text.structures.check(structure)
        if structure is None or reading is None:
            return
        try:
            reading.result()
        except GrammarError as error:
            raise refusal(structure, error) from error
        self._text.structures.note(structure)

    def _completions(
        self, asks: list[list[Request]], replies: Replies | None = None
    ) -> list[Completion]:
        jobs = iter(self._run([request for ask in asks for request in ask], replies))
        return [completion_of([job for _, job in zip(ask, jobs)]) for ask in asks]

    def _run(self, requests: list[Request], replies: Replies | None = None) -> list[Job]:
        """Run requests to their ends, a bounded number of them in the engine at a time."""
        waiting, jobs = iter(requests), []
        window = 2 * self.engine.limits.max_num_seqs
        try:
            while True:
                for request in itertools.islice(waiting, max(0, window - len(self._jobs))):
                    jobs.append(self._submit(request, replies=replies))
                if len(jobs) == len(requests) and all(job.output.finished for job in jobs):
                    return jobs
                self._step()
        finally:
            self._abandon(jobs)

    def _stream(self, ask: list[Request]) -> Iterator[Delta]:
        jobs: list[Job] = []
        try:
            for index, request in enumerate(ask):
                jobs.append(self._submit(request, index))
            while left := [job for job in jobs if not job.output.finished]:
                self._step()
                for job in left:
                    if not job.delta.empty:
                        yield job.take()
        finally:
            self._abandon(jobs)

    def _submit(self, request: Request, index: int = 0, replies: Replies | None = None) -> Job:
        now = time.monotonic()
        request = dataclasses.replace(request, arrival=now)
        job = Job(request, self._text.output(request, index, replies), Delta(index))
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

    def _abandon(self, jobs: list[Job]) -> None:
        """End those that have not ended, and let the engine put everything back."""
        for job in jobs:
            if self._jobs.pop(job.request.id, None) is not None:
                self._abort(job, FinishReason.CANCELLED)
        while self.engine.has_work and not self._jobs:
            self._step()

    def _abort(self, job: Job, reason: FinishReason) -> None:
        self.engine.execute(Abort(job.request.id, reason), time.monotonic())
