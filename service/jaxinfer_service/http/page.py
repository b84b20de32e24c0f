"""The page at /, and the live view that it shows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from functools import cache
from importlib import resources

from fastapi.responses import HTMLResponse, Response, StreamingResponse
from google.protobuf.json_format import MessageToDict

from jaxinfer.request import EngineStoppedError, Violation
from jaxinfer_service.http import errors
from jaxinfer_service.http.strict import renamed
from jaxinfer_service.live import LiveView
from jaxinfer_service.model import ServedModel
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

# The page carries all it needs, asks its own server alone, and is nobody's frame.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


@cache
def _page() -> str:
    return resources.files(__package__).joinpath("page.html").read_text("utf-8")


def page() -> Response:
    """Chat with the model, and see the engine at work."""
    return HTMLResponse(_page(), headers={"Content-Security-Policy": _POLICY})


async def live(view: LiveView, model: ServedModel, interval: float, cells: int) -> Response:
    """WatchLoadResponse of jaxinfer.v1 as JSON, again and again, as server-sent events.

    Raises RequestError and QueueFullError.
    """
    updates = view.updates(model, interval, cells)
    with renamed(lambda wrong: Violation(wrong.field.removeprefix("map_"), wrong.message)):
        first = await anext(updates)  # errors are answered before the stream begins

    async def body() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(updates):
            yield _event(first)
            try:
                async for message in updates:
                    yield _event(message)
            except EngineStoppedError as error:
                yield _data(errors.body_of(error)[1])

    return StreamingResponse(
        body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


def _event(message: pb.WatchLoadResponse) -> bytes:
    return _data(
        MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
