"""`jaxinfer serve`."""

from __future__ import annotations

import asyncio
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
from jaxinfer_service.cli.server_options import SERVER, ServerOptions

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.generation import TextOptions
    from jaxinfer_service.model import OpenedModel
    from jaxinfer_service.server import ServerConfig

logger = logging.getLogger(__name__)

ENGINE_FAILED = 3  # the exit code of a server whose engine ended by itself


@takes_groups
def serve(
    model: options.Model,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name that requests use; repeatable.",
            show_default="MODEL's",
            rich_help_panel=SERVER,
        ),
    ] = None,
    *,
    server: ServerOptions,
    engine: engine_options.ServingOptions,
    text: text_options.ReplyOptions,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
    config_file: ConfigFile = None,
) -> None:
    """Serve MODEL over gRPC and HTTP (OpenAI's API) until SIGTERM or Ctrl-C."""
    console.set_up_logging(log_level, log_format)
    from jaxinfer_service.server import EngineFailedError

    try:
        source = Source.of(model, served_model_name, engine, text)
        loaded = asyncio.run(_serve(server.config(), source))
    except EngineFailedError as error:
        console.fail(error, ENGINE_FAILED)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        console.fail(error)
    if not loaded:
        os._exit(0)  # loading cannot be interrupted, and nothing is lost


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
        for name in names or ():
            if not name or (names or ()).count(name) > 1:
                raise ValueError(f"--served-model-name {name!r}: give names, each of them once")
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
    from jaxinfer_service.model import OpenedModel, keep_loaded

    with console.progress() as progress:
        loaded, engine = open_engine(
            source.model, source.engine, source.dtype, progress, source.text
        )
    keep_loaded()
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
