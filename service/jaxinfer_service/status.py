"""Errors of the runtime as gRPC statuses, with the details that clients can act on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from jaxinfer.request import (
    EngineStoppedError,
    FinishReason,
    QueueFullError,
    RequestError,
    Violation,
)
from jaxinfer.text import Finish
from jaxinfer_service.access import ForbiddenError, TooManyError, UnauthenticatedError
from jaxinfer_service.end_log import log_error

logger = logging.getLogger(__name__)

# Status messages and details travel in HTTP/2 trailers, of which clients take 8 KiB by default.
MESSAGE_BYTES = 600  # percent-encoding may triple them
DETAILS_BYTES = 3500  # base64 adds a third
INFO_BYTES = 200  # of what says the kind of error


class ModelNotFoundError(LookupError):
    """The request names a model that is not served here."""


def check_model(served: Sequence[str], name: str) -> None:
    """Raise ModelNotFoundError for a name that is not among those served; "" is any."""
    if name and name not in served:
        raise ModelNotFoundError(f"model {name!r} is not served here; {', '.join(served)} is")


class CallNotFoundError(LookupError):
    """No call of this id runs or waits."""


class DeadlineError(RuntimeError):
    """The call's deadline passed, or would before the first token."""


class RequestAbortedError(RuntimeError):
    """The request was ended from elsewhere."""


class RequestFailedError(RuntimeError):
    """The engine failed on this request; others go on."""


_CODES: dict[type[Exception], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineStoppedError: grpc.StatusCode.UNAVAILABLE,
    ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    CallNotFoundError: grpc.StatusCode.NOT_FOUND,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestAbortedError: grpc.StatusCode.ABORTED,
    RequestFailedError: grpc.StatusCode.INTERNAL,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    TooManyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


# google.rpc.ErrorInfo: what a program may tell errors of one code apart by.
DOMAIN = "jaxinfer.v1"
_REASONS: dict[type[Exception], str] = {
    RequestError: "INVALID_REQUEST",
    QueueFullError: "QUEUE_FULL",
    EngineStoppedError: "NOT_SERVING",
    ModelNotFoundError: "MODEL_NOT_FOUND",
    CallNotFoundError: "CALL_NOT_FOUND",
    DeadlineError: "DEADLINE_EXCEEDED",
    RequestAbortedError: "ABORTED_BY_OPERATOR",
    RequestFailedError: "REQUEST_FAILED",
    UnauthenticatedError: "KEY_NOT_KNOWN",
    ForbiddenError: "KEY_MAY_NOT",
    TooManyError: "KEY_OVER_ITS_LIMIT",
}


def check_finish(finish: Finish | None) -> None:
    """Raise for an end that is no answer."""
    if finish is None:
        return
    if finish.reason is FinishReason.DEADLINE:
        raise DeadlineError("the deadline passed before the output was complete")
    if finish.reason is FinishReason.LATE:
        raise DeadlineError(finish.error)
    if finish.reason is FinishReason.CANCELLED:
        raise RequestAbortedError("the request was aborted on the server")
    if finish.reason is FinishReason.RULES:
        raise RequestError([Violation("sampling", finish.error)])
    if finish.reason is FinishReason.ERROR:
        raise RequestFailedError(finish.error)


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """End a call with the status of an error. An error nobody foresaw is logged and INTERNAL."""
    code = _CODES.get(type(error))
    message = str(error)
    if code is None:
        logger.error("a call failed unexpectedly", exc_info=error)
        code, message = grpc.StatusCode.INTERNAL, "an error of the server; see its log"
    log_error(code.name, _reason(error))
    trailers: list[tuple[str, str | bytes]] = []
    message = _clip(message, MESSAGE_BYTES)
    status = status_pb2.Status(code=_number(code), message=message)
    for details in _details(error):
        status.details.add().Pack(details)
    trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    if isinstance(error, QueueFullError | TooManyError):
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after * 1000))))
    await context.abort(code, message, tuple(trailers))


def _details(error: Exception) -> Iterator[Message]:
    """What can be done about it, and what kind of error it is, for programs."""
    if isinstance(error, RequestError):
        yield _bad_request(error)
    if isinstance(error, QueueFullError | TooManyError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(math.ceil(error.retry_after * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)
    yield error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN)


def _reason(error: Exception) -> str:
    return _REASONS.get(type(error), "SERVER_ERROR")


def _bad_request(error: RequestError) -> error_details_pb2.BadRequest:
    """As many violations as fit."""
    details = error_details_pb2.BadRequest()
    for violation in error.violations:
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(violation.field, 100), description=_clip(violation.message, 500)
        )
        if details.ByteSize() + entry.ByteSize() > DETAILS_BYTES - MESSAGE_BYTES - INFO_BYTES:
            break
        details.field_violations.append(entry)
    return details


def _clip(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8."""
    data = text.encode(errors="replace")
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "..."


def _number(code: grpc.StatusCode) -> int:
    return code_pb2.Code.Value(code.name)
