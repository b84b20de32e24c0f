"""Takes the ids of calls from their headers, over gRPC and over HTTP, and gives them back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer_service import control, servicer
from jaxinfer_service.call_ids import ID_HEADER, TRACE_HEADER, read, within
from jaxinfer_service.end_log import LEFT, log_left
from jaxinfer_service.handlers import wrapped
from jaxinfer_service.tracing import names
from jaxinfer_service.tracing.current import note

_SERVICES = (servicer.SERVICE_NAME, control.SERVICE_NAME)


class GrpcIds(grpc.aio.ServerInterceptor):
    """In front of our services' handlers: the id goes back with the answer or the error."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Any = await continuation(details)
        if handler is None or details.method.split("/")[1] not in _SERVICES:
            return handler
        given = dict(details.invocation_metadata)
        ids = read(given.get(ID_HEADER), given.get(TRACE_HEADER))

        def around(method: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[..., Any]:
            async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
                with within(ids):
                    note(names.REQUEST_ID, ids.request_id)
                    named = _Named(context, ids.request_id)
                    answer = await method(data, named)
                    await named.begin()
                    return answer

            return call

        return wrapped(handler, around)


class _Named:
    """A call's context that sends the id along with what the handler says first.

    Not sooner: once a client has the first metadata, the answer has begun, and what becomes of the
    call is not tried again (gRFC A6).
    """

    def __init__(self, context: grpc.aio.ServicerContext, request_id: str):
        self._context, self._id = context, ((ID_HEADER, request_id),)
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def begin(self) -> None:
        """Send the first metadata, unless that was done."""
        if not self._begun:
            self._begun = True
            await self._context.send_initial_metadata(self._id)

    async def write(self, message: Any) -> None:
        await self.begin()
        await self._context.write(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        own = () if self._begun else self._id
        await self._context.abort(code, details, (*trailing_metadata, *own))


class HttpIds:
    """ASGI middleware: the id goes back as a header of the answer. Logs the calls that get none."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ids = read(headers.get(ID_HEADER), headers.get(TRACE_HEADER))
        status, whole = 0, False

        async def answer(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = ids.request_id
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        with within(ids):
            note(names.REQUEST_ID, ids.request_id)
            try:
                await self._app(scope, receive, answer)
            finally:
                if status == LEFT or not whole:
                    log_left()
