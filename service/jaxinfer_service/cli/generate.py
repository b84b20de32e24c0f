"""`jaxinfer generate`: offline, without a server."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    temperature: sampling_options.Temperature = None,
    top_p: sampling_options.TopP = None,
    top_k: sampling_options.TopK = None,
    min_p: sampling_options.MinP = None,
    repetition_penalty: sampling_options.RepetitionPenalty = None,
    presence_penalty: sampling_options.PresencePenalty = None,
    frequency_penalty: sampling_options.FrequencyPenalty = None,
    seed: sampling_options.Seed = None,
    max_new_tokens: sampling_options.MaxNewTokens = None,
    stop: sampling_options.Stop = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on after the model's end token.", rich_help_panel="Sampling"
        ),
    ] = False,
    stop_token_id: sampling_options.StopTokenIds = None,
    include_stop: sampling_options.IncludeStop = None,
    skip_special_tokens: sampling_options.SkipSpecialTokens = None,
    logprobs: sampling_options.Logprobs = None,
    prompt_logprobs: sampling_options.PromptLogprobs = None,
    truncate_prompt_tokens: sampling_options.TruncatePromptTokens = None,
    add_special_tokens: sampling_options.AddSpecialTokens = True,
    n: sampling_options.Samples = 1,
    min_tokens: rule_options.MinTokens = None,
    allowed_token_ids: rule_options.AllowedTokenIds = None,
    bad_word: rule_options.BadWord = None,
    json_schema: rule_options.JsonSchema = None,
    json_object: rule_options.JsonObject = False,
    regex: rule_options.Regex = None,
    choice: rule_options.Choice = None,
    grammar: rule_options.Grammar = None,
    dtype: options.Dtype = None,
    quantization: engine_options.Quantization = None,
    chat_template: text_options.ChatTemplate = None,
    generation_config: text_options.GenerationConfig = "auto",
    override_generation_config: text_options.OverrideGenerationConfig = None,
    max_model_len: engine_options.MaxModelLen = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            parser=options.parse_count,
            metavar="N",
            help="Sequences that run at once.",
            rich_help_panel="Engine",
        ),
    ] = 8,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    tensor_parallel_size: engine_options.TensorParallelSize = None,
    deterministic: engine_options.Deterministic = None,
    kv_cache_memory: engine_options.KvCacheMemory = None,
    gpu_memory_utilization: engine_options.GpuMemoryUtilization = None,
    prefix_cache: engine_options.PrefixCache = None,
    log_level: options.LogLevel = "warning",
    log_format: options.LogFormat = "text",
) -> None:
    """Continue prompts in this process, without a server; the text streams to stdout."""
    console.set_up_logging(log_level, log_format)
    _check_printed(as_json, logprobs, prompt_logprobs)
    params = options.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop) if stop else None,
        ignore_eos=ignore_eos,
        stop_token_ids=tuple(stop_token_id) if stop_token_id else None,
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        truncate_prompt_tokens=truncate_prompt_tokens,
        n=n,
    ) | rule_options.rules(
        min_tokens,
        allowed_token_ids,
        bad_word,
        json_schema=json_schema,
        json_object=json_object,
        regex=regex,
        choice=choice,
        grammar=grammar,
    )
    config = engine_options.engine_config(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel_size=tensor_parallel_size,
        deterministic=deterministic,
        quantization=quantization,
        prefix_cache=prefix_cache,
    )
    prompts = [_prompt(text, chat) for text in prompt]
    try:
        with console.progress(announce=True) as progress:
            llm = _open(
                model,
                config,
                dtype=options.stored_dtype(dtype),
                progress=progress,
                chat_template=chat_template,
                generation_config=generation_config,
                override_generation_config=override_generation_config,
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
