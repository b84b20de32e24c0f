"""`jaxinfer generate`: offline, without a server."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.option_groups import takes_groups
from jaxinfer_service.cli import (
    console,
    engine_options,
    options,
    rule_options,
    sampling_options,
    text_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxinfer import LLM, Completion
    from jaxinfer.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine(engine_options.EngineOptions):
    """An engine for few prompts."""

    max_num_seqs: engine_options.MaxNumSeqsOffline = 8


@takes_groups
def generate(
    model: options.Model,
    prompt: Annotated[
        list[str],
        typer.Option("--prompt", "-p", help="What to continue; repeatable; -: standard input."),
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a question to the model's chat form.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object a prompt: ids, text, finish reason, timing, ..."
        ),
    ] = False,
    add_special_tokens: sampling_options.AddSpecialTokens = True,
    *,
    sampling: sampling_options.OfflineSamplingOptions,
    rules: rule_options.RuleOptions,
    engine: _Engine,
    text: text_options.ModelTextOptions,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Continue prompts in this process, without a server; the text streams to stdout."""
    console.set_up_logging(log_level, log_format)
    _check_printed(as_json, sampling.logprobs, sampling.prompt_logprobs)
    params = sampling.params() | rules.params()
    config = engine.config()
    prompts = [_prompt(asked, chat) for asked in prompt]
    try:
        with console.progress(announce=True) as progress:
            llm = _open(
                model,
                config,
                dtype=engine.stored_dtype,
                progress=progress,
                **dataclasses.asdict(text),
            )
        if "temperature" not in llm.default_sampling.fields:
            params.setdefault("temperature", 0.0)  # greedy, where the model does not say
        _answer(llm, model, prompts, params, add_special_tokens, as_json)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        console.fail(error)


def _check_printed(as_json: bool, logprobs: int | None, prompt_logprobs: int | None) -> None:
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        option = "--logprobs" if prompt_logprobs is None else "--prompt-logprobs"
        raise typer.BadParameter(f"{option} is for --json; add it")


def _prompt(text: str, chat: bool) -> Any:
    text = console.decoded(sys.stdin.buffer.read()) if text == "-" else text
    return [{"role": "user", "content": text}] if chat else text


def _open(model: str, config: Any, **how: Any) -> LLM:
    from jaxinfer import LLM

    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    del fields["dtype"]
    return LLM(model, **how, **fields)


def _answer(
    llm: LLM,
    model: str,
    prompts: list[Any],
    params: dict[str, Any],
    special: bool,
    as_json: bool,
) -> None:
    if as_json:
        completions = llm.generate(prompts, params, add_special_tokens=special)
        for completion in completions:
            typer.echo(json.dumps({"model": model, **_fields(completion)}, ensure_ascii=False))
        errors = [s.error for completion in completions for s in completion.samples if s.error]
        if errors:
            raise RuntimeError(errors[0])
        return
    for number, prompt in enumerate(prompts, 1):
        if len(prompts) > 1:
            typer.echo(_header(number, len(prompts), prompt))
        (_print_samples if params["n"] > 1 else _print_stream)(llm, prompt, params, special)


def _print_stream(llm: LLM, prompt: Any, params: dict[str, Any], special: bool) -> None:
    for delta in llm.stream(prompt, params, add_special_tokens=special):
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
        if delta.finish is not None and delta.finish.error:
            raise RuntimeError(delta.finish.error)
    typer.echo()


def _print_samples(llm: LLM, prompt: Any, params: dict[str, Any], special: bool) -> None:
    """Each under its number, once all are complete: several cannot stream to one place."""
    (completion,) = llm.generate([prompt], params, add_special_tokens=special)
    for number, sample in enumerate(completion.samples, 1):
        gap = "" if number == 1 else "\n"
        typer.echo(f"{gap}--- sample {number} of {params['n']}\n{sample.text}")
        if sample.error:
            raise RuntimeError(sample.error)


def _header(number: int, count: int, prompt: Any) -> str:
    """The line above one of several answers."""
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    begin = textwrap.shorten(text, 60, placeholder=" ...")
    gap = "" if number == 1 else "\n"
    return f"{gap}--- {number} of {count}: {begin}"


def _fields(completion: Completion) -> dict[str, Any]:
    """A completion as JSON; its further samples without the prompt."""
    fields = dataclasses.asdict(dataclasses.replace(completion, more=(), prompt_logprobs=None))
    fields["finish_reason"] = completion.finish_reason.value
    fields["logprobs"] = _entries(completion.logprobs)
    del fields["prompt_logprobs"]
    if completion.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _entries(completion.prompt_logprobs)
    fields["more"] = more = [_fields(sample) for sample in completion.more]
    for sample in more:
        del sample["prompt_token_ids"], sample["more"]
    return fields


def _entries(logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "logprob": entry.logprob,
            "rank": entry.rank,
            "top": [{"token_id": i, "logprob": v} for i, v in entry.top],
        }
        for entry in logprobs
    ]
