"""Pages of other origins that may call: CORS, as browsers ask for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxinfer_service.call_ids import ID_HEADER

ANY = "*"
_SECONDS = 600  # for which a browser remembers what it was told


def across_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The app, for pages of these origins too. A preflight needs no key: browsers send none."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "HEAD"],
        allow_headers=["*"],
        expose_headers=[ID_HEADER, "retry-after"],
        max_age=_SECONDS,
    )


def read_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Origins as options give them: one each, or a JSON list of several.

    Raises ValueError for what is no origin.
    """
    origins: list[str] = []
    for text in given:
        try:
            several = json.loads(text) if text.startswith("[") else [text]
        except json.JSONDecodeError as error:
            raise ValueError(f"--allowed-origins {text!r} is no JSON list: {error}") from error
        origins += several
    for origin in origins:
        if not isinstance(origin, str) or not (origin == ANY or _is_origin(origin)):
            raise ValueError(
                f"--allowed-origins {origin!r} is no origin; give one as https://example.com, or *"
            )
    return tuple(dict.fromkeys(origins))


def _is_origin(text: str) -> bool:
    """A scheme, a host and perhaps a port, and nothing after it, as browsers send it."""
    try:
        parts = urlsplit(text)
        whole = f"{parts.scheme}://{parts.netloc}"
        return bool(parts.hostname) and text == whole and "@" not in text
    except ValueError:
        return False
