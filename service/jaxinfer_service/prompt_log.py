"""Prompts in the log, and in spans, where the operator asks for that: `--log-prompts`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from jaxinfer.engine_link import Observer
from jaxinfer.stream import Stream
from jaxinfer.text import TextProcessor

logger = logging.getLogger(__name__)

TOKENS_A_CHARACTER = 4  # at most: one a byte


def beginnings(text: TextProcessor, most: int) -> Callable[[Sequence[int]], str]:
    """What gives the first `most` characters of a prompt, as the model sees it."""

    def beginning(prompt: Sequence[int]) -> str:
        kept = prompt[: TOKENS_A_CHARACTER * (most + 1)]
        said = text.decode(kept, skip_special_tokens=False)
        return said if len(said) <= most and len(kept) == len(prompt) else f"{said[:most]}…"

    return beginning


class PromptLog(Observer):
    """A line for every prompt that was queued; `shown` is what it says of it."""

    def __init__(self, shown: Callable[[Sequence[int]], str]):
        self._shown = shown

    def submitted(self, stream: Stream) -> None:
        tokens, said = len(stream.prompt), self._shown(stream.prompt)
        logger.info("prompt", extra={"request": stream.id, "prompt_tokens": tokens, "prompt": said})
