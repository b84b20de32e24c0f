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
from jaxinfer.option_groups import takes_groups
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


@takes_groups
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
    *,
    engine: engine_options.ServingOptions,
    text: text_options.ReplyOptions,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
    log_prompts: options.LogPrompts = False,
    max_log_len: options.MaxLogLen = None,
    config_file: ConfigFile = None,
) -> None:
    """Serve MODEL over gRPC and HTTP (OpenAI's API) until SIGTERM or Ctrl-C."""
    console.set_up_logging(log_level, log_format)
    from jaxinfer_service.access import Access
    from jaxinfer_service.http.origins import read_origins
    from jaxinfer_service.server import EngineFailedError, ServerConfig
    from jaxinfer_service.tracing.setup import open_tracing

    try:
        source = Source.of(model, served_model_name, engine, text)
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

    @classmethod
    def of(
        cls,
        model: str,
        names: list[str] | None,
        engine: engine_options.PresetEngineOptions,
        text: text_options.ReplyOptions,
    ) -> Source:
        """From a command's options. Raises ValueError naming what is wrong."""
        return cls(
            model,
            names or [Path(model).name or model],
            engine.stored_dtype,
            engine.config(),
            engine.preset or "",
            text.read(),
            (text.tool_call_parser, text.reasoning_parser),
        )


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
