"""Bounds what a body may cost before anybody has looked at it: its bytes, and the time it takes."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 16 << 20  # of a body or a gRPC message; a prompt of a million token ids has 3 MB
SECONDS = 60.0  # for all of a body to come


class BoundedBody:
    """ASGI middleware. Who reads too much gets HTTPException, and the connection is closed;
    so does who sends a body that is coded, which would not be understood."""

    def __init__(self, app: ASGIApp, most: int = MOST_BYTES, seconds: float = SECONDS):
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        said, coding = headers.get("content-length", ""), headers.get("content-encoding", "")
        loop = asyncio.get_running_loop()
        taken = int(said) if said.isdecimal() and int(said) > self._most else 0
        complete, end = False, loop.time() + self._seconds

        async def bounded() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()
            if coding not in ("", "identity"):
                what = f"the body has the content-encoding {coding:.100}; send it as it is"
                raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, what)
            if taken > self._most:  # before the client is told to go on
                raise self._refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"has {taken} bytes")
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError as error:
                raise self._refusal(HTTPStatus.REQUEST_TIMEOUT, "did not come in time") from error
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise self._refusal(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"has {taken} bytes or more"
                )
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, bounded, send)

    def _refusal(self, status: HTTPStatus, what: str) -> HTTPException:
        said = f"the body {what}; at most {self._most} bytes are taken, within {self._seconds:g} s"
        return HTTPException(status, said, {"Connection": "close"})
