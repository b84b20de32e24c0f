"""What a caller names its call by: an id that comes back to it, and the trace it is a part of.

Both are read from `x-request-id` and `traceparent` (W3C Trace Context), of gRPC metadata or HTTP
headers, and go into what is logged on behalf of the call. A call without an id gets one.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from jaxinfer_service.tracing import current

ID_HEADER, TRACE_HEADER = "x-request-id", "traceparent"
_ID = re.compile("[!-~]{1,128}")  # what may be written into a header and a log as it is
_TRACE = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}.*")


class CallIds(NamedTuple):
    """`trace_id` is "" for a call that is of no trace."""

    request_id: str
    trace_id: str


_current: contextvars.ContextVar[CallIds | None] = contextvars.ContextVar("call", default=None)


def read(request_id: str | None, traceparent: str | None) -> CallIds:
    """The ids of a call. One that is no id counts as not given."""
    own = request_id if request_id and _ID.fullmatch(request_id) else uuid.uuid4().hex
    trace = _TRACE.fullmatch(traceparent or "")
    return CallIds(own, trace[1] if trace else "")


@contextlib.contextmanager
def within(ids: CallIds) -> Iterator[None]:
    """What is logged within is logged with these ids."""
    before = _current.set(ids)
    try:
        yield
    finally:
        _current.reset(before)


class AddIds(logging.Filter):
    """Gives records of a call its ids; to be added to a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (ids := _current.get()) is not None:
            record.request_id = ids.request_id
            if trace_id := ids.trace_id or current.trace_id():
                record.trace_id = trace_id
        return True
