"""Errors of the runtime as the OpenAI API has them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jaxinfer.request import EngineStoppedError, QueueFullError, RequestError
from jaxinfer_service import status
from jaxinfer_service.access import ForbiddenError, TooManyError, UnauthenticatedError
from jaxinfer_service.end_log import log_error
from jaxinfer_service.http.schema import FIELDS
from jaxinfer_service.http.strict import WrongFieldError

logger = logging.getLogger(__name__)

STOPPED_RETRY = 5  # seconds after which another try may find the server ready
MOST_MESSAGES = 8  # of one refusal
MOST_CHARACTERS = 2000  # of them together; they repeat what was sent
NAME_CHARACTERS = 100  # of a field's name


class Kind(NamedTuple):
    """How an error is answered."""

    http: int
    type: str
    code: str | None = None


class ErrorDetail(BaseModel):
    """What was wrong: `param` is the field, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


# For the OpenAPI document; it has no 422 then, by which FastAPI itself would refuse bodies.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be honoured."},
    "5XX": {"model": ErrorAnswer, "description": "The server cannot answer, or not now."},
}

_KINDS: dict[type[Exception], Kind] = {
    RequestError: Kind(400, "invalid_request_error"),
    status.ModelNotFoundError: Kind(404, "invalid_request_error", "model_not_found"),
    status.CallNotFoundError: Kind(404, "invalid_request_error"),
    QueueFullError: Kind(429, "rate_limit_error", "queue_full"),
    UnauthenticatedError: Kind(401, "authentication_error", "invalid_api_key"),
    ForbiddenError: Kind(403, "permission_error"),
    TooManyError: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    EngineStoppedError: Kind(503, "service_unavailable_error"),
    status.DeadlineError: Kind(504, "timeout_error", "deadline_exceeded"),
    status.RequestAbortedError: Kind(409, "aborted_error"),
    status.RequestFailedError: Kind(500, "server_error"),
}


def install(app: FastAPI) -> None:
    """Answer every error of the app's handlers in the API's form."""
    for kind in _KINDS:
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _refused_by_router)
    app.add_exception_handler(Exception, _answer)


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error and what its answer says."""
    kind = _KINDS.get(type(error))
    if kind is None:
        logger.error("a call failed unexpectedly", exc_info=error)
        return 500, _body("an error of the server; see its log", Kind(500, "server_error"))
    if isinstance(error, RequestError):
        said = [*dict.fromkeys(f"{v.field} {v.message}" for v in error.violations)]
        return kind.http, _body("; ".join(said[:MOST_MESSAGES]), kind, error.violations[0].field)
    return kind.http, _body(str(error), kind)


def _body(message: str, kind: Kind, param: str | None = None) -> dict[str, Any]:
    log_error(str(kind.http), kind.code or kind.type)
    error = {
        "message": _clipped(message, MOST_CHARACTERS),
        "type": kind.type,
        "param": param and _clipped(param, NAME_CHARACTERS),
        "code": kind.code,
    }
    return {"error": error}


def _clipped(text: str, most: int) -> str:
    """Of bounded length, and text: what was sent may have halves of surrogate pairs."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return short.encode(errors="backslashreplace").decode()


async def _answer(request: Request, error: Exception) -> JSONResponse:
    code, body = body_of(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if isinstance(error, EngineStoppedError):
        headers["Retry-After"] = str(STOPPED_RETRY)
    return JSONResponse(body, code, headers)


async def _bad_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [*dict.fromkeys(map(_told, error.errors()))]
    said = "; ".join(text for _, text in found[:MOST_MESSAGES])
    return JSONResponse(_body(said, _KINDS[RequestError], found[0][0] or None), 400)


async def _refused_by_router(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    cause = error.__cause__
    if isinstance(cause, ValueError | RecursionError):  # what the parser takes is JSON for us
        said = f"the body is no JSON: {cause}"
    elif isinstance(cause, Exception) and not isinstance(cause, ClientDisconnect | TimeoutError):
        return await _answer(request, cause)  # FastAPI makes 400 of anything there
    elif error.detail != status.phrase:
        said = str(error.detail)
    else:
        said = f"{request.method} {request.url.path}: {status.phrase.lower()}"
    headers = dict(error.headers or {})
    kind = Kind(error.status_code, "invalid_request_error")
    return JSONResponse(_body(said, kind), error.status_code, headers)


def _told(error: Mapping[str, Any]) -> tuple[str, str]:
    """(the field that is wrong, or "", what is said of it)."""
    path, cause = _path(error), error.get("ctx", {}).get("error")
    if isinstance(cause, WrongFieldError):
        path += f".{cause.field}" if path else cause.field
        return path, f"{path} {cause.why}"
    text = _said(error)
    return path, f"{path}: {text}" if path else text


def _path(error: Mapping[str, Any]) -> str:
    """A field's path in the body: messages[0].role."""
    source, *rest = error["loc"]
    place: Sequence[Any] = rest
    if source == "query":
        return ".".join(place)
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""  # of broken JSON it is where it breaks
        elif part in FIELDS or (error["type"] == "extra_forbidden" and part is place[-1]):
            name = _clipped(part, NAME_CHARACTERS)
            path += f".{name}" if path else name
    return path  # without the alternatives of unions and the names within maps


def _said(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "is not known to this server, which would ignore it; leave it out"
    if isinstance(error["input"], bytes):
        return "the body is not said to be JSON; send the header content-type: application/json"
    if error["type"] == "json_invalid":
        return f"the body is no JSON: {error['ctx']['error']}"
    return str(error["msg"]).removeprefix("Value error, ")
