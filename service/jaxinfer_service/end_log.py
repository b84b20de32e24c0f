"""What is logged of calls that end, whichever door they came by."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxinfer.stream import Stream
from jaxinfer.text import Delta

logger = logging.getLogger(__name__)

LEFT = 499  # the HTTP status of a call whose client went, which nobody reads


def log_end(stream: Stream, ends: Sequence[Delta], generated: int) -> None:
    """That a call's samples have ended, and how."""
    logger.debug(
        "finished",
        extra={
            "request": stream.id,
            "reason": ",".join(end.finish.reason.value for end in ends if end.finish),
            "prompt_tokens": len(stream.prompt),
            "generated_tokens": generated,
            "seconds": round(max(end.timing.total for end in ends if end.timing), 4),
        },
    )


def log_error(code: str, reason: str) -> None:
    """That a call got an error. Its message is left out, which may repeat what was sent."""
    logger.debug("ended with an error", extra={"code": code, "reason": reason})


def log_left() -> None:
    """That a call's client went before its end."""
    logger.debug("left by its caller")
