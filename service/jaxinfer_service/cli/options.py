"""Options that several commands share, and how their values are written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from jaxinfer_service.cli.foreign import ADVICE

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_SIZE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_count(value: str | int) -> int:
    """A number of tokens or requests: 8192, 8k (8000), 8K (8192), 1.5k."""
    return _parse(value, _COUNT_UNITS, "a number such as 8192, 8k (8000) or 8K (8192)")


def parse_size(value: str | int) -> int:
    """A number of bytes: 2GiB, 2GB, 512MiB, 1073741824."""
    return _parse(value, _SIZE_UNITS, "a size such as 2GiB (2^30 each) or 2GB (10^9 each)")


def _parse(value: str | int, units: dict[str, int], what: str) -> int:
    match = _NUMBER.fullmatch(str(value).strip())
    if match is None or match[2] not in units:
        raise typer.BadParameter(f"{value!r} is not {what}")
    return (
        round(float(match[1]) * units[match[2]])
        if "." in match[1]
        else (int(match[1]) * units[match[2]])
    )


class Command(TyperCommand):
    """A command whose unknown options are answered with what to use instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", "")
            close = getattr(error, "possibilities", None)
            if name in ADVICE:
                error.message, error.possibilities = f"{name}: {ADVICE[name]}", []  # type: ignore[attr-defined]
            elif name and close:
                hint = f"No such option: {name}. Did you mean {' or '.join(sorted(close))}?"
                error.message, error.possibilities = hint, []  # type: ignore[attr-defined]
            raise


_MEMORY, _ENGINE, _SAMPLING, _LOG = "Memory", "Engine", "Sampling", "Logging"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An Orbax folder, a Hugging Face folder, a .gguf file, or `demo` (SmolLM2-135M).",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Weights and activations: float32, bfloat16 or float16; auto: as stored.",
        show_default="auto",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="TOKENS",
        help="Prompt + output tokens of one sequence, e.g. 8k.",
        show_default="the model's",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(
        parser=parse_count,
        metavar="N",
        help="Sequences that run at once.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(
        parser=parse_count,
        metavar="TOKENS",
        help="Prompt tokens that one step may prefill.",
        rich_help_panel=_ENGINE,
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        help="Devices of one replica.",
        rich_help_panel=_ENGINE,
    ),
]
NoOverlap = Annotated[
    bool,
    typer.Option(
        "--no-overlap",
        help="Read each step before the next is dispatched.",
        rich_help_panel=_ENGINE,
    ),
]
KvCacheMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Bytes of each device's KV pool, e.g. 2GiB.",
        show_default="what is left; 2GiB on a CPU",
        rich_help_panel=_MEMORY,
    ),
]
KvCacheDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Of the KV pool: float32, bfloat16 or float16.",
        show_default="as --dtype",
        rich_help_panel=_MEMORY,
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        min=0.05,
        max=1.0,
        metavar="X",
        help="Fraction of the device's memory (of the machine's on a CPU) to plan with.",
        rich_help_panel=_MEMORY,
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        "--page-size",
        "--block-size",
        metavar="N",
        help="Tokens of a KV page.",
        rich_help_panel=_MEMORY,
    ),
]
LogLevel = Annotated[
    str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_LOG)
]
LogFormat = Annotated[
    str,
    typer.Option(metavar="FORMAT", help="text or json, one line a record.", rich_help_panel=_LOG),
]
Temperature = Annotated[
    float, typer.Option(metavar="X", help="0 is greedy.", rich_help_panel=_SAMPLING)
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


def engine_config(
    *,
    max_num_seqs: int,
    max_model_len: int | None,
    max_num_batched_tokens: int,
    kv_cache_memory: int | None,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    **others: Any,
) -> EngineConfig:
    """The engine's configuration; `others` are fields under their own names."""
    from jaxinfer.config import EngineConfig

    try:
        return EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_pool_bytes=kv_cache_memory,
            memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            **others,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def stored_dtype(dtype: str | None) -> str | None:
    """None for auto."""
    return None if dtype in (None, "auto") else dtype
