"""Options that say how a model is served, and the configuration that they make."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxinfer.config import EngineConfig
from jaxinfer.presets import PRESETS, preset_values
from jaxinfer.quantization.kinds import AUTO, KINDS, NONE
from jaxinfer_service.cli.options import Dtype, given, parse_count, parse_size, stored_dtype

_MEMORY, _ENGINE, _SCHEDULING = "Memory", "Engine", "Scheduling"
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def engine_default(name: str) -> str:
    """The default of an `EngineConfig` field, as help shows it."""
    value = _DEFAULTS[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def describe_preset(values: dict[str, Any]) -> str:
    """What a preset sets, as options: `max-num-seqs 64, no tpot-target-ms`."""
    names = {name.replace("_", "-"): value for name, value in values.items()}
    return ", ".join(f"no {n}" if v is None else f"{n} {v:g}" for n, v in names.items())


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
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="N",
        help="Sequences that run at once.",
        show_default=engine_default("max_num_seqs"),
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqsOffline = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="N",
        help="Sequences that run at once.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="TOKENS",
        help="Prompt tokens that one step may prefill.",
        show_default=engine_default("max_num_batched_tokens"),
        rich_help_panel=_ENGINE,
    ),
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        help="Devices of one replica.",
        show_default=engine_default("tensor_parallel_size"),
        rich_help_panel=_ENGINE,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Dispatch each step before the one before it was read.",
        show_default=engine_default("overlap"),
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
        help="Of the KV pool: auto (as --dtype), float32, bfloat16, float16, or with a scale for "
        "every token and head int8 or fp8 (fp8_e4m3).",
        show_default="auto",
        rich_help_panel=_MEMORY,
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        min=0.05,
        max=1.0,
        metavar="X",
        help="Fraction of the device's memory (of the machine's on a CPU) to plan with.",
        show_default=engine_default("memory_utilization"),
        rich_help_panel=_MEMORY,
    ),
]
PageSize = Annotated[
    int | None,
    typer.Option(
        "--page-size",
        "--block-size",
        metavar="N",
        help="Tokens of a KV page.",
        show_default=engine_default("page_size"),
        rich_help_panel=_MEMORY,
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the pages of prompts and outputs for requests that begin alike.",
        show_default=engine_default("prefix_cache"),
        rich_help_panel=_MEMORY,
    ),
]
KvWatermark = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="X",
        help="Fraction of the KV pool that admission leaves free for running sequences.",
        show_default=engine_default("kv_watermark"),
        rich_help_panel=_MEMORY,
    ),
]
KvOffloadGib = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1 << 20,
        metavar="N",
        help="Host memory, in GiB, for pages of preempted sequences; 0: recompute them.",
        show_default=engine_default("kv_offload_bytes"),
        rich_help_panel=_MEMORY,
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="The same request has the same logprobs, bit for bit, whatever runs beside it.",
        show_default=engine_default("deterministic"),
        rich_help_panel=_ENGINE,
    ),
]
CpuKernels = Annotated[
    bool | None,
    typer.Option(
        "--cpu-kernels/--no-cpu-kernels",
        help="On a CPU, multiply and attend by kernels made for it, where they can, not by XLA.",
        show_default=engine_default("cpu_kernels"),
        rich_help_panel=_ENGINE,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Weights rounded as they are loaded: "
        + "; ".join(f"{name}: {kind.what}" for name, kind in KINDS.items())
        + f"; {AUTO}: what is best on the device; {NONE}. On CPUs numbers are made, at load, of "
        "stored weights of which every step would make some, unless their kind is named.",
        show_default="as stored",
        rich_help_panel=_ENGINE,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(PRESETS),
        help="Values for what is not given itself. "
        + "; ".join(f"{name}: {describe_preset(values)}" for name, values in PRESETS.items())
        + ".",
        show_default="none",
        rich_help_panel=_SCHEDULING,
    ),
]
TpotTargetMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="MS",
        help="Largest mean time between a running stream's tokens: prompts are computed in chunks"
        " that keep it. 0: none.",
        show_default=engine_default("tpot_target_ms"),
        rich_help_panel=_SCHEDULING,
    ),
]
PriorityAgeing = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="A waiting request rises to the next more urgent priority in the queue after it.",
        show_default=engine_default("priority_ageing"),
        rich_help_panel=_SCHEDULING,
    ),
]
BatchPriority = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Priorities from this on are the batch class.",
        show_default=engine_default("batch_priority"),
        rich_help_panel=_SCHEDULING,
    ),
]
InteractiveReserve = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="X",
        help="Fraction of slots and pages that the batch class may not take.",
        show_default=engine_default("interactive_reserve"),
        rich_help_panel=_SCHEDULING,
    ),
]
TenantWeight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=W",
        help="Share of a tenant among those of one priority, 0.001 to 1000; repeatable.",
        show_default="1 each",
        rich_help_panel=_SCHEDULING,
    ),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="N",
        help="Requests that may wait.",
        show_default=engine_default("max_queued_requests"),
        rich_help_panel=_SCHEDULING,
    ),
]
MaxQueuedTokens = Annotated[
    int | None,
    typer.Option(
        parser=parse_count,
        metavar="TOKENS",
        help="Prompt tokens that may wait.",
        show_default=engine_default("max_queued_tokens"),
        rich_help_panel=_SCHEDULING,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine that a command builds, with or without a server in front."""

    dtype: Dtype = None
    quantization: Quantization = None
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    tensor_parallel_size: TensorParallelSize = None
    deterministic: Deterministic = None
    cpu_kernels: CpuKernels = None
    kv_cache_memory: KvCacheMemory = None
    kv_cache_dtype: KvCacheDtype = None
    gpu_memory_utilization: GpuMemoryUtilization = None
    prefix_cache: PrefixCache = None

    @property
    def stored_dtype(self) -> str | None:
        """What weights are converted to; None: they stay as stored."""
        return stored_dtype(self.dtype)

    def config(self) -> EngineConfig:
        """What was given, a preset's values, the defaults. Raises typer.BadParameter."""
        try:
            return EngineConfig(**self._preset_values() | self._values())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _preset_values(self) -> dict[str, Any]:
        return {}

    def _values(self) -> dict[str, Any]:
        """Fields of `EngineConfig` that were given: those of other names, and the rest."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own = {name: value for name, value in options.items() if name in _DEFAULTS}
        del own["dtype"]
        return given(
            kv_pool_bytes=self.kv_cache_memory,
            kv_dtype=self.kv_cache_dtype,
            memory_utilization=self.gpu_memory_utilization,
            **own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetEngineOptions(EngineOptions):
    """An engine whose values a preset may set."""

    preset: Preset = None

    def _preset_values(self) -> dict[str, Any]:
        return preset_values(self.preset) if self.preset else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions(PresetEngineOptions):
    """An engine that many callers share."""

    overlap: Overlap = None
    page_size: PageSize = None
    kv_watermark: KvWatermark = None
    kv_offload_gib: KvOffloadGib = None
    max_queued_requests: MaxQueuedRequests = None
    max_queued_tokens: MaxQueuedTokens = None
    tpot_target_ms: TpotTargetMs = None
    priority_ageing: PriorityAgeing = None
    batch_priority: BatchPriority = None
    interactive_reserve: InteractiveReserve = None
    tenant_weight: TenantWeight = None

    def _values(self) -> dict[str, Any]:
        values = PresetEngineOptions._values(self)
        if self.tpot_target_ms == 0:
            values["tpot_target_ms"] = None
        if self.kv_offload_gib is not None:
            values["kv_offload_bytes"] = int(self.kv_offload_gib * 2**30)
        if self.tenant_weight:
            values["tenant_weights"] = _tenant_weights(self.tenant_weight)
        return values


def _tenant_weights(pairs: list[str]) -> tuple[tuple[str, float], ...]:
    """NAME=W of each. Raises ValueError."""
    weights: dict[str, float] = {}
    for pair in pairs:
        name, equals, weight = pair.rpartition("=")
        if not equals or not _is_float(weight):
            raise ValueError(f"--tenant-weight {pair!r} is not NAME=W, such as team-a=2")
        if name in weights:
            raise ValueError(f"--tenant-weight names {name!r} twice")
        weights[name] = float(weight)
    return tuple(weights.items())


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
