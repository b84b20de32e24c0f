"""Lets calls through that have a key for them, over gRPC and over HTTP."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer_service import control, servicer, status
from jaxinfer_service.access import (
    Access,
    ForbiddenError,
    Role,
    TooManyError,
    UnauthenticatedError,
    bearer,
)
from jaxinfer_service.handlers import wrapped
from jaxinfer_service.http import errors

# Health, reflection, metrics and what a page needs to load are open: probes have no keys.
_ROLES: dict[str, Role] = {servicer.SERVICE_NAME: "inference", control.SERVICE_NAME: "admin"}
_PATHS: dict[str, Role] = {
    "/v1/": "inference",
    "/tokenize": "inference",
    "/detokenize": "inference",
    "/live": "admin",
}
_REFUSALS = (UnauthenticatedError, ForbiddenError, TooManyError)


class GrpcGuard(grpc.aio.ServerInterceptor):
    """In front of the services' handlers."""

    def __init__(self, access: Access):
        self._access = access

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Any = await continuation(details)
        role = _ROLES.get(details.method.split("/")[1])
        if role is None or handler is None:
            return handler
        token = bearer(dict(details.invocation_metadata).get("authorization"))

        def guarded(method: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[..., Any]:
            async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
                try:
                    with self._access.granted(token, role):
                        return await method(data, context)
                except _REFUSALS as error:
                    await status.abort(context, error)

            return call

        return wrapped(handler, guarded)


class HttpGuard:
    """ASGI middleware. A key's call lasts until its answer is written, streams too."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        role = _role(scope["path"]) if scope["type"] == "http" else None
        if role is None:
            await self._app(scope, receive, send)
            return
        token = bearer(Headers(scope=scope).get("authorization"))
        try:
            with self._access.granted(token, role):
                await self._app(scope, receive, send)
        except _REFUSALS as error:
            code, body = errors.body_of(error)
            headers = {"WWW-Authenticate": "Bearer"} if code == 401 else {}
            if isinstance(error, TooManyError):
                headers["Retry-After"] = str(math.ceil(error.retry_after))
            await JSONResponse(body, code, headers)(scope, receive, send)


def _role(path: str) -> Role | None:
    """Which role a path needs; None for any caller."""
    return next((role for begin, role in _PATHS.items() if path.startswith(begin)), None)
