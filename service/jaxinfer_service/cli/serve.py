"""`jaxinfer serve`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer_service.cli import console, options
from jaxinfer_service.cli.config_file import ConfigFile
from jaxinfer_service.cli.options import parse_count

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig
    from jaxinfer_service.server import OpenedModel

_SERVER, _QUEUE = "Server", "Queue"


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
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name that requests use; repeatable.",
            show_default="MODEL's",
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
    max_queued_requests: Annotated[
        int,
        typer.Option(
            parser=parse_count,
            metavar="N",
            help="Requests that may wait.",
            rich_help_panel=_QUEUE,
        ),
    ] = 1024,
    max_queued_tokens: Annotated[
        int,
        typer.Option(
            parser=parse_count,
            metavar="TOKENS",
            help="Prompt tokens that may wait.",
            rich_help_panel=_QUEUE,
        ),
    ] = 1 << 22,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    tensor_parallel_size: options.TensorParallelSize = 1,
    no_overlap: options.NoOverlap = False,
    kv_cache_memory: options.KvCacheMemory = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    page_size: options.PageSize = 64,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
    config_file: ConfigFile = None,
) -> None:
    """Serve MODEL over gRPC (jaxinfer.v1, health, reflection) until SIGTERM or Ctrl-C."""
    console.set_up_logging(log_level, log_format)
    from jaxinfer_service.server import ServerConfig

    engine = options.engine_config(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel_size=tensor_parallel_size,
        kv_dtype=options.stored_dtype(kv_cache_dtype),
        overlap=not no_overlap,
        page_size=page_size,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
    )
    names = served_model_name or [Path(model).name or model]
    config = ServerConfig(host, port, drain_timeout, stall_timeout)
    try:
        loaded = asyncio.run(_serve(config, model, names, options.stored_dtype(dtype), engine))
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        console.fail(error)
    if not loaded:
        os._exit(0)  # loading cannot be interrupted, and nothing is lost


async def _serve(
    config: object, model: str, names: list[str], dtype: str | None, engine: EngineConfig
) -> bool:
    from jaxinfer_service.server import Server, ServerConfig

    assert isinstance(config, ServerConfig)
    return await Server(config, lambda: _open(model, names, dtype, engine)).run()


def _open(model: str, names: list[str], dtype: str | None, config: EngineConfig) -> OpenedModel:
    """Load and compile. Runs in a thread, once the port is bound."""
    from jaxinfer.engine_thread import EngineThread
    from jaxinfer.llm import open_engine
    from jaxinfer.text import TextProcessor
    from jaxinfer_service.server import OpenedModel

    with console.progress() as progress:
        loaded, engine = open_engine(model, config, dtype, progress)
    text = TextProcessor(loaded.tokenizer, loaded.generation.eos_ids, engine.limits)
    return OpenedModel(
        names, text, lambda on_events, on_stop: EngineThread(engine, on_events, on_stop)
    )
