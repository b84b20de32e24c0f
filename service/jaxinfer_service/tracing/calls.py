"""A span for every call of the inference API, over gRPC and over HTTP.

It continues the trace of the caller's `traceparent`, and is the parent of the spans of what the
call asked (`requests.py`). Texts of errors are left out: they may repeat what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer_service import servicer
from jaxinfer_service.handlers import wrapped
from jaxinfer_service.tracing import names

PATHS = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
CANCELLED = "cancelled"

_SERVERS_FAULT = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


@contextlib.contextmanager
def _span(tracer: Tracer, name: str, parent: Context, said: dict[str, Any]) -> Iterator[Span]:
    with tracer.start_as_current_span(
        name,
        parent,
        SpanKind.SERVER,
        said,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield span


class GrpcSpans(grpc.aio.ServerInterceptor):
    """In front of all that a call goes through."""

    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Any = await continuation(details)
        name = details.method.lstrip("/")
        if handler is None or name.split("/")[0] != servicer.SERVICE_NAME:
            return handler
        parent = propagate.extract(dict(details.invocation_metadata))
        said = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name}

        def around(method: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[..., Any]:
            async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
                with _span(self._tracer, name, parent, said) as span:
                    code = grpc.StatusCode.OK
                    try:
                        return await method(data, context)
                    except grpc.aio.AbortError:
                        code = context.code()
                        raise
                    except asyncio.CancelledError:
                        code = _unless_late(context, grpc.StatusCode.CANCELLED)
                        raise
                    except Exception:  # a call that has ended already cannot be aborted, for one
                        code = _unless_late(context, grpc.StatusCode.UNKNOWN)
                        raise
                    finally:
                        _end_grpc(span, code)

            return call

        return wrapped(handler, around)


def _unless_late(context: grpc.aio.ServicerContext, code: grpc.StatusCode) -> grpc.StatusCode:
    """`code`, or that the call's deadline has passed."""
    left: float | None = context.time_remaining()
    late = left is not None and left <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else code


def _end_grpc(span: Span, code: grpc.StatusCode) -> None:
    span.set_attribute(names.RPC_STATUS, code.name)
    if code is not grpc.StatusCode.OK:
        span.set_attribute(names.ERROR, code.name)
    if code in _SERVERS_FAULT:
        span.set_status(Status(StatusCode.ERROR, code.name))


class HttpSpans:
    """ASGI middleware, in front of all others."""

    def __init__(self, app: ASGIApp, tracer: Tracer):
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        said = {
            names.HTTP_METHOD: method,
            names.HTTP_ROUTE: path,
            names.URL_PATH: path,
            names.URL_SCHEME: scope["scheme"],
        }
        status, complete = 0, False

        async def answer(message: Message) -> None:
            nonlocal status, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                complete = not message.get("more_body", False)

        parent = propagate.extract(Headers(scope=scope))
        with _span(self._tracer, f"{method} {path}", parent, said) as span:
            try:
                await self._app(scope, receive, answer)
            finally:
                _end_http(span, status, complete)


def _end_http(span: Span, status: int, complete: bool) -> None:
    """An answer that was begun and not ended is one whose client left."""
    if status:
        span.set_attribute(names.HTTP_STATUS, status)
    if not complete:
        span.set_attribute(names.ERROR, CANCELLED)
    elif status >= 400:
        span.set_attribute(names.ERROR, str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
