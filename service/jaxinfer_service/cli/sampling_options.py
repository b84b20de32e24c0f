"""Options that say how tokens are chosen, of the commands that generate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxinfer.request import MAX_PRIORITY, MAX_SAMPLES
from jaxinfer_service.cli import options

_SAMPLING, _SCHEDULING = "Sampling", "Scheduling"

Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="0 is greedy.",
        show_default="the model's; where it has none 0, in a chat 0.7",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="X", help="Mass of the tokens to keep.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="N", help="How many tokens to keep.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Keep tokens this many times as likely as the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Above 1: against tokens seen before.", rich_help_panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Above 0: against tokens in the output.", rich_help_panel=_SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="As presence, per occurrence.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="The same seed gives the same draws.", rich_help_panel=_SAMPLING
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "--max-tokens",
        metavar="N",
        help="Output limit.",
        show_default="as many as fit",
        rich_help_panel=_SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A string that ends the output; repeatable.", rich_help_panel=_SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_SAMPLING
    ),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        metavar="ID",
        help="A token that ends the output; repeatable.",
        rich_help_panel=_SAMPLING,
    ),
]
IncludeStop = Annotated[
    bool | None,
    typer.Option(
        "--include-stop", help="Keep in the text what ended it.", rich_help_panel=_SAMPLING
    ),
]
SkipSpecialTokens = Annotated[
    bool | None,
    typer.Option(
        "--skip-special-tokens/--keep-special-tokens",
        help="In the text of the output.",
        show_default="skip",
        rich_help_panel=_SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: of chosen tokens and this many others.",
        rich_help_panel=_SAMPLING,
    ),
]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: of the prompt's tokens; --max-new-tokens 0 asks for nothing else.",
        rich_help_panel=_SAMPLING,
    ),
]
TruncatePromptTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Keep the prompt's last N tokens; -1: as many as fit.",
        rich_help_panel=_SAMPLING,
    ),
]
AddSpecialTokens = Annotated[
    bool,
    typer.Option(
        help="Begin a prompt with what the model expects there.", rich_help_panel=_SAMPLING
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "-n",
        "--n",
        min=1,
        max=MAX_SAMPLES,
        metavar="N",
        help="Samples of each prompt; they differ with --temperature above 0.",
        rich_help_panel=_SAMPLING,
    ),
]
Priority = Annotated[
    int,
    typer.Option(
        min=-MAX_PRIORITY,
        max=MAX_PRIORITY,
        metavar="N",
        help="Lower runs first.",
        rich_help_panel=_SCHEDULING,
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Who asks: tenants share the server and do not see each other's cached prefixes.",
        show_default="none",
        rich_help_panel=_SCHEDULING,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    max_new_tokens: MaxNewTokens = None
    stop: Stop = None

    def params(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return options.given(
            **{n: (tuple(v) or None) if isinstance(v, list) else v for n, v in values.items()}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSamplingOptions(SamplingOptions):
    """The same, and what `generate` returns of it."""

    ignore_eos: IgnoreEos = False
    stop_token_id: StopTokenIds = None
    include_stop: IncludeStop = None
    skip_special_tokens: SkipSpecialTokens = None
    logprobs: Logprobs = None
    prompt_logprobs: PromptLogprobs = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    n: Samples = 1

    def params(self) -> dict[str, Any]:
        values = SamplingOptions.params(self)
        if "stop_token_id" in values:
            values["stop_token_ids"] = values.pop("stop_token_id")
        return values
