"""The model behind the services: ready to serve, and served."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.config import EngineConfig
from jaxinfer.engine_link import EngineLink, OnEvents, OnStop
from jaxinfer.frontend import Frontend
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.request import EngineStoppedError
from jaxinfer.text import TextProcessor
from jaxinfer_service.metrics.histograms import Histograms


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model ready to serve: its text side, how to connect to its engine, and what to say of it.

    Attributes:
        names: what requests may call it; answers have the first.
        config: the engine's, with the `dtype` it really has.
        preset: the one that was chosen, or "".
        determinism: by which way it is deterministic, "invariant" or "fixed", or "".
        replies: the form of its replies to chats.
    """

    names: Sequence[str]
    text: TextProcessor
    connect: Callable[[OnEvents, OnStop], EngineLink]
    config: EngineConfig = field(default_factory=EngineConfig)
    preset: str = ""
    determinism: str = ""
    replies: ReplyFormat = field(default_factory=ReplyFormat)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the front that runs its requests."""

    opened: OpenedModel
    frontend: Frontend
    histograms: Histograms
    opened_at: int = field(default_factory=lambda: int(time.time()))  # seconds of the Unix epoch

    @property
    def names(self) -> Sequence[str]:
        return self.opened.names


def keep_loaded() -> None:
    """Take what is there now, a model say, for living as long as the process: looking through it
    again and again for garbage would stop the engine's thread for milliseconds."""
    gc.collect()
    gc.freeze()


def loaded(served: ServedModel | None) -> ServedModel:
    """The model, once there is one. Raises EngineStoppedError before."""
    if served is None:
        raise EngineStoppedError("the server is loading its model")
    return served
