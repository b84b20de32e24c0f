"""A file of requests in OpenAI's batch format, answered line by line into another.

An answer is appended as soon as it is there, in one write. Whatever ends the process, answers are
whole but for a last line, which the next run removes; it asks what has no answer yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from starlette.types import ASGIApp, Message, Scope

URLS = ("/v1/chat/completions", "/v1/completions")
MOST_FAULTS = 10  # lines that one refusal names
RETRY_SECONDS = 1.0  # where a full queue does not say when
_ID = "batch_req_"
_BEGIN = f'{{"id": "{_ID}'.encode()  # of every line that is written


class BatchError(ValueError):
    """The files cannot be used as they are; nothing was asked."""


class Line(NamedTuple):
    """Where a request stands in the file: its name, and the bytes of its line."""

    custom_id: str
    start: int
    size: int


class Answer(NamedTuple):
    """What HTTP would have answered."""

    status: int
    headers: Mapping[str, str]
    body: Any


Ask = Callable[[str, bytes], Awaitable[Answer]]  # of a path and a JSON body


# -- what is asked -----------------------------------------------------------------------------


def read_requests(path: Path) -> list[Line]:
    """The requests of a file, checked. Raises BatchError naming lines, and OSError."""
    lines: list[Line] = []
    faults: list[str] = []
    seen: dict[str, int] = {}
    start = 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                fault, name = _fault(data)
                if not fault and name in seen:
                    fault = f"custom_id {name!r} is that of line {seen[name]} too"
                if fault:
                    faults.append(f"line {number}: {fault}")
                seen.setdefault(name, number)
                lines.append(Line(name, start, len(data)))
            start += len(data)
    if faults:
        more = f"; {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise BatchError(f"{path}: {'; '.join(faults[:MOST_FAULTS])}{more}")
    if not lines:
        raise BatchError(f"{path} has no requests; give one JSON object a line")
    return lines


def _fault(data: bytes) -> tuple[str, str]:
    """(what is wrong with a line or "", its custom_id)."""
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}", ""
    if not isinstance(request, dict):
        return "is no JSON object", ""
    name = request.get("custom_id")
    if not isinstance(name, str) or not name:
        return f"custom_id is {name!r}; give each request a text of its own", ""
    if request.get("method", "POST") != "POST":
        return f"method is {request['method']!r}; it is POST", name
    if request.get("url") not in URLS:
        return f"url is {request.get('url')!r}; it is one of {', '.join(URLS)}", name
    body = request.get("body")
    if not isinstance(body, dict):
        return "body is no JSON object", name
    if body.get("stream"):
        return "body.stream is set; answers of a batch are whole, leave it out", name
    return "", name


# -- what is answered --------------------------------------------------------------------------


class Journal:
    """The file of answers. A context: nobody else writes to it meanwhile.

    Attributes:
        answered: custom_id → HTTP status of what it has.
    """

    def __init__(self, path: Path, requests: list[Line]):
        self._path, self._names = path, {line.custom_id for line in requests}
        self.answered: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Raises BatchError for a file that is another batch's or in use, and OSError."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            os.close(self._file)
            raise BatchError(f"another run writes to {self._path}") from error
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def _read(self) -> None:
        whole = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not data.startswith(_BEGIN) and not _BEGIN.startswith(data):
                        raise self._foreign(number)
                    break  # written in part when the last run was ended
                whole += len(data)
                name, status = self._entry(number, data)
                self.answered[name] = status
        os.ftruncate(self._file, whole)

    def _entry(self, number: int, data: bytes) -> tuple[str, int]:
        try:
            entry = json.loads(data)
            name, status = entry["custom_id"], entry["response"]["status_code"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(number) from error
        if name not in self._names:
            raise BatchError(
                f"{self._path}: line {number} answers {name!r}, which is not asked; it is of "
                "another batch, name another file"
            )
        return name, status

    def _foreign(self, number: int) -> BatchError:
        return BatchError(f"{self._path}: line {number} is no answer of a batch; name another file")

    def add(self, name: str, answer: Answer) -> None:
        """Write an answer down, whole or not at all. Raises OSError, for a full disk."""
        call = answer.body.get("id") if isinstance(answer.body, dict) else None
        entry = {
            "id": f"{_ID}{uuid.uuid4().hex}",
            "custom_id": name,
            "response": {
                "status_code": answer.status,
                "request_id": call or "",
                "body": answer.body,
            },
            "error": None,
        }
        data = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        left, end = memoryview(data), os.fstat(self._file).st_size
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            os.ftruncate(self._file, end)  # others may still be written behind it
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.answered[name] = answer.status

    @property
    def refused(self) -> int:
        """How many have another answer than 200."""
        return sum(status != 200 for status in self.answered.values())


# -- asking ------------------------------------------------------------------------------------


async def run(
    requests: Path,
    lines: list[Line],
    journal: Journal,
    ask: Ask,
    concurrency: int,
    progress: Callable[[int, int], None],
) -> None:
    """Ask what the journal has no answer to, `concurrency` of them at a time.

    Raises RuntimeError when the engine takes no more; what is answered by then is written.
    """
    with requests.open("rb") as file:
        left = _unanswered(file, lines, journal)
        lock = asyncio.Lock()

        async def work() -> None:
            while True:
                async with lock:  # one reader at a time
                    found = next(left, None)
                if found is None:
                    return
                name, url, body = found
                journal.add(name, await _ask(ask, url, body))
                progress(len(journal.answered), len(lines))

        progress(len(journal.answered), len(lines))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())


def _unanswered(
    file: BinaryIO, lines: list[Line], journal: Journal
) -> Iterator[tuple[str, str, bytes]]:
    """(custom_id, url, body) of each."""
    for line in lines:
        if line.custom_id in journal.answered:
            continue
        file.seek(line.start)
        request = json.loads(file.read(line.size))
        yield line.custom_id, request["url"], json.dumps(request["body"]).encode()


async def _ask(ask: Ask, url: str, body: bytes) -> Answer:
    """The answer, once the queue has room for the request."""
    while True:
        answer = await ask(url, body)
        if answer.status == 503:
            raise RuntimeError(f"the engine takes no more requests: {_message(answer)}")
        if answer.status != 429:
            return answer
        await asyncio.sleep(float(answer.headers.get("retry-after", RETRY_SECONDS)))


def _message(answer: Answer) -> str:
    with contextlib.suppress(KeyError, TypeError):
        return str(answer.body["error"]["message"])
    return str(answer.body)


@dataclass(frozen=True, slots=True)
class InProcess:
    """Asks an ASGI app of this process, as its HTTP server would."""

    app: ASGIApp

    async def __call__(self, path: str, body: bytes) -> Answer:
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
            "client": None, "server": None,
        }  # fmt: skip
        sent: list[Message] = []
        given = _request(body)

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, given.__anext__, send)
        start = next(m for m in sent if m["type"] == "http.response.start")
        whole = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, json.loads(whole))


async def _request(body: bytes) -> AsyncIterator[Message]:
    """What an app receives: the body, then nothing, from a client that stays."""
    yield {"type": "http.request", "body": body, "more_body": False}
    await asyncio.Event().wait()
