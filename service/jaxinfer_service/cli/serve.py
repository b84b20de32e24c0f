"""`jaxinfer serve`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.config import EngineConfig
from jaxinfer_service.cli import console, engine_options, options, text_options
from jaxinfer_service.cli.config_file import ConfigFile

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.generation import TextOptions
    from jaxinfer_service.model import OpenedModel
    from jaxinfer_service.server import ServerConfig
    from jaxinfer_service.tls import Tls

logger = logging.getLogger(__name__)

_SERVER = "Server"

ENGINE_FAILED = 3  # the exit code of a server whose engine ended by itself


def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=_SERVER),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="N", help="0: a free one.", rich_help_panel=_SERVER),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="N",
            help="Of the OpenAI-compatible HTTP API; 0: a free one.",
            rich_help_panel=_SERVER,
        ),
    ] = 8000,
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="Serve HTTP too.", rich_help_panel=_SERVER)
    ] = True,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name that requests use; repeatable.",
            show_default="MODEL's",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Callers need one of its keys; see make-key. Read again on SIGHUP.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate, PEM. Read again on SIGHUP, as are the files with it.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, PEM.", rich_help_panel=_SERVER)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a certificate that it signed.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages of it may call over HTTP (CORS); repeatable, * for all.",
            show_default="none",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    metrics_prefix: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the names of /metrics begin; vllm for dashboards made for it.",
            rich_help_panel=_SERVER,
        ),
    ] = "jaxinfer",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            "--otlp-traces-endpoint",
            metavar="URL",
            help="Send spans of requests there (OpenTelemetry), e.g. http://localhost:4317.",
            show_default="the environment's, if any",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="For running requests after SIGTERM.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0,
    stall_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Without a step: count as a stall.",
            rich_help_panel=_SERVER,
        ),
    ] = 60.0,
    dtype: options.Dtype = None,
    quantization: engine_options.Quantization = None,
    chat_template: text_options.ChatTemplate = None,
    generation_config: text_options.GenerationConfig = "auto",
    override_generation_config: text_options.OverrideGenerationConfig = None,
    tool_call_parser: text_options.ToolCallParser = "auto",
    reasoning_parser: text_options.ReasoningParser = "auto",
    preset: engine_options.Preset = None,
    max_model_len: engine_options.MaxModelLen = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    tensor_parallel_size: engine_options.TensorParallelSize = None,
    overlap: engine_options.Overlap = None,
    deterministic: engine_options.Deterministic = None,
    kv_cache_memory: engine_options.KvCacheMemory = None,
    kv_cache_dtype: engine_options.KvCacheDtype = None,
    gpu_memory_utilization: engine_options.GpuMemoryUtilization = None,
    page_size: engine_options.PageSize = None,
    prefix_cache: engine_options.PrefixCache = None,
    kv_watermark: engine_options.KvWatermark = None,
    kv_offload_gib: engine_options.KvOffloadGib = None,
    max_queued_requests: engine_options.MaxQueuedRequests = None,
    max_queued_tokens: engine_options.MaxQueuedTokens = None,
    tpot_target_ms: engine_options.TpotTargetMs = None,
    priority_ageing: engine_options.PriorityAgeing = None,
    batch_priority: engine_options.BatchPriority = None,
    interactive_reserve: engine_options.InteractiveReserve = None,
    tenant_weight: engine_options.TenantWeight = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
    log_prompts: options.LogPrompts = False,
    max_log_len: options.MaxLogLen = None,
    config_file: ConfigFile = None,
) -> None:
    """Serve MODEL over gRPC and HTTP (OpenAI's API) until SIGTERM or Ctrl-C."""
    console.set_up_logging(log_level, log_format)
    from jaxinfer.generation import TextOptions
    from jaxinfer_service.access import Access
    from jaxinfer_service.http.origins import read_origins
    from jaxinfer_service.server import EngineFailedError, ServerConfig
    from jaxinfer_service.tracing.setup import open_tracing

    engine = engine_options.engine_config(
        preset,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=tensor_parallel_size,
        overlap=overlap,
        deterministic=deterministic,
        quantization=quantization,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        page_size=page_size,
        prefix_cache=prefix_cache,
        kv_watermark=kv_watermark,
        kv_offload_gib=kv_offload_gib,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        tpot_target_ms=tpot_target_ms,
        priority_ageing=priority_ageing,
        batch_priority=batch_priority,
        interactive_reserve=interactive_reserve,
        tenant_weight=tenant_weight,
    )
    names = served_model_name or [Path(model).name or model]
    try:
        text = TextOptions.read(chat_template, generation_config, override_generation_config)
        parsers = (tool_call_parser, reasoning_parser)
        stored = options.stored_dtype(dtype)
        source = Source(model, names, stored, engine, preset or "", text, parsers)
        server = ServerConfig(
            host=host,
            port=port,
            http_port=http_port if http else None,
            metrics_prefix=metrics_prefix,
            access=Access(api_keys),
            tls=_tls(tls_cert, tls_key, tls_client_ca),
            allowed_origins=read_origins(allowed_origins or ()),
            tracing=open_tracing(otlp_endpoint),
            log_prompts=options.logged_characters(log_prompts, max_log_len),
            drain_timeout=drain_timeout,
            stall_limit=stall_timeout,
        )
        loaded = asyncio.run(_serve(server, source))
    except EngineFailedError as error:
        console.fail(error, ENGINE_FAILED)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        console.fail(error)
    if not loaded:
        os._exit(0)  # loading cannot be interrupted, and nothing is lost


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
    from jaxinfer_service.tls import Tls

    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ValueError("TLS needs both --tls-cert and --tls-key")
    return Tls(cert, key, client_ca)


@dataclass(frozen=True, slots=True)
class Source:
    """What to serve and how; `dtype` None is as stored, `parsers` are of calls and of reasoning."""

    model: str
    names: list[str]
    dtype: str | None
    engine: EngineConfig
    preset: str
    text: TextOptions
    parsers: tuple[str, str] = ("auto", "auto")


async def _serve(config: ServerConfig, source: Source) -> bool:
    from jaxinfer_service.server import Server

    return await Server(config, lambda: open_model(source)).run()


def open_model(source: Source) -> OpenedModel:
    """Load and compile. Runs in a thread, once the port is bound."""
    from jaxinfer.engine_thread import EngineThread
    from jaxinfer.llm import open_engine
    from jaxinfer.replies.formats import reply_format
    from jaxinfer.text import TextProcessor
    from jaxinfer_service.model import OpenedModel

    with console.progress() as progress:
        loaded, engine = open_engine(
            source.model, source.engine, source.dtype, progress, source.text
        )
    # What is loaded lives as long as the process. Looking through it again and again for garbage
    # would stop the engine's thread for milliseconds.
    gc.collect()
    gc.freeze()
    replies = reply_format(loaded.tokenizer, *source.parsers)
    logger.info("chats: %s", replies.describe())
    generation = loaded.generation
    return OpenedModel(
        names=source.names,
        text=TextProcessor(
            loaded.tokenizer, generation.eos_ids, engine.limits, generation.sampling
        ),
        connect=lambda on_events, on_stop: EngineThread(engine, on_events, on_stop),
        config=replace(
            source.engine,
            dtype=loaded.dtype,
            quantization=loaded.quantization,
            max_num_batched_tokens=engine.scheduler.limits.chunk_tokens,
        ),
        preset=source.preset,
        determinism=_determinism(engine) if source.engine.deterministic else "",
        replies=replies,
    )


def _determinism(engine: Engine) -> str:
    """By which way the engine is deterministic; see `determinism.py`."""
    return "fixed" if engine.scheduler.policy.separate_phases else "invariant"
