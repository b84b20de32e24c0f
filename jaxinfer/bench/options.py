"""Options that benchmarks have in common, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxinfer.bench import report
from jaxinfer.bench.workload import DATASETS, Dataset
from jaxinfer.page_dtypes import PAGE_NAMES
from jaxinfer.quantization.kinds import KINDS

Model = Annotated[
    str, typer.Argument(help="An Orbax or Hugging Face folder, a .gguf file, or `demo`.")
]
ModelUnlessFake = Annotated[
    str | None, typer.Argument(help="As for throughput; leave out with --fake-model.")
]
FakeModel = Annotated[
    bool, typer.Option("--fake-model", help="A model that computes nothing: the host's cost alone.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Requests to run.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens of a request.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens of a request.")]
SyntheticInputLen = Annotated[
    int | None, typer.Option(help="Prompt tokens of a synthetic request; default: 128.")
]
SyntheticOutputLen = Annotated[
    int | None, typer.Option(help="Output tokens of a synthetic request; default: 64.")
]
DatasetName = Annotated[
    str, typer.Option(help=f"{' or '.join(DATASETS)}: fixed lengths, or lengths as in real chats.")
]
LengthScale = Annotated[
    float,
    typer.Option(help="Multiplies the lengths of real chats: a shorter run of the same shape."),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", "--max-num-seqs", min=1, help="Requests that run at once.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Rounds in which everything takes a turn; medians are shown.")
]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens a KV page holds.")]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Off, prompts that come again are computed again, and every run does the same work.",
    ),
]
Seed = Annotated[int, typer.Option(help="Prompts, lengths and arrivals follow from it.")]
JsonTo = Annotated[str | None, typer.Option("--json", help="Write JSON to a file; -: to stdout.")]


def one_model(model: str | None, fake_model: bool) -> None:
    """Raises typer.BadParameter unless there is a model or a fake one, and not both."""
    if (model is None) != fake_model:
        raise typer.BadParameter("name a MODEL, or give --fake-model instead of one")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What every benchmark that builds an engine can be told of it."""

    dtype: Annotated[
        str | None, typer.Option(help="Weights and activations; default: as stored.")
    ] = None
    quantization: Annotated[
        str | None,
        typer.Option(help=f"Of weights: {', '.join(KINDS)}; default: as stored."),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Prompt + output tokens of one sequence; default: the model's."),
    ] = None
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Prompt tokens one step may prefill.")
    ] = 512
    page_size: PageSize = 64
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="Bytes of the KV pool; default: as for serving.")
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help=f"Of the KV pool: {', '.join(PAGE_NAMES)}; default: as --dtype."),
    ] = None

    def start(self, model: str | None, fake_layers: int = 0, **config: Any) -> Any:
        """The `BenchEngine` of a model, or with None of the fake one; `config` are further fields.

        Errors of the command line end in one line.
        """
        from jaxinfer.bench import setup
        from jaxinfer.config import EngineConfig

        for option, value in (("--dtype", self.dtype), ("--quantization", self.quantization)):
            if value is not None and model is None:
                raise typer.BadParameter(f"{option} is for a MODEL: the fake one computes nothing")
        with report.progress_bar() as progress:
            try:
                fields = EngineConfig(
                    max_model_len=self.max_model_len,
                    max_num_batched_tokens=self.max_num_batched_tokens,
                    page_size=self.page_size,
                    kv_pool_bytes=self.kv_cache_memory,
                    kv_dtype=self.kv_cache_dtype,
                    quantization=self.quantization,
                    **config,
                )
                if model is None:
                    return setup.start_fake(fake_layers, fields, progress)
                return setup.start(model, fields, self.dtype, progress)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error


def lengths(dataset: str, input_len: int | None, output_len: int | None) -> tuple[int, int]:
    """The lengths of synthetic requests. Raises typer.BadParameter for others with lengths."""
    if dataset != "synthetic" and (input_len, output_len) != (None, None):
        raise typer.BadParameter(
            f"--input-len and --output-len are for --dataset synthetic; {dataset} draws its own"
        )
    return 128 if input_len is None else input_len, 64 if output_len is None else output_len


def dataset_name(name: str) -> Dataset:
    """The data set of that name. Raises typer.BadParameter naming the known ones."""
    for known in DATASETS:
        if name == known:
            return known
    raise typer.BadParameter(f"--dataset {name!r} is not one of {', '.join(DATASETS)}")


def with_context(result: dict[str, Any], bench: Any, **more: Any) -> dict[str, Any]:
    """The result with what it was measured on and how."""
    return {**report.environment(), **bench.describe(), **more, **result}
