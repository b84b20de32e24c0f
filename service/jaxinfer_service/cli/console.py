"""What commands say: log lines, progress and errors, all on stderr. stdout is for answers."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer

from jaxinfer_service.call_ids import AddIds

Progress = Callable[[str, int, int], None]  # (what, done, total)

OURS = ("jaxinfer", "jaxinfer_service")
LOG_SECONDS = 5.0  # between progress lines in a log
LONG = ("compiling ", "downloading ")  # progress that begins like this takes minutes
LEVELS = ("debug", "info", "warning", "error")
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}

logger = logging.getLogger(__name__)


def set_up_logging(level: str, form: str) -> None:
    """One handler for all; other packages' records from warnings on. Raises typer.BadParameter."""
    if level not in LEVELS:
        raise typer.BadParameter(f"--log-level {level!r} is not one of {', '.join(LEVELS)}")
    if form not in ("text", "json"):
        raise typer.BadParameter(f"--log-format {form!r} is neither text nor json")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(AddIds())
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


class _TextFormatter(logging.Formatter):
    """time LEVEL message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{key}={_on_one_line(value)}" for key, value in _extra(record).items()]
        line = " ".join([_time(record), record.levelname, record.getMessage(), *pairs])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _on_one_line(value: object) -> object:
    """What was sent by others must not look like lines of the log."""
    return repr(value) if isinstance(value, str) and not value.isprintable() else value


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def fail(error: object, code: int = 1) -> NoReturn:
    """One clear line, and an exit code; docs/operations.md has them all."""
    logger.debug("failed", exc_info=error if isinstance(error, BaseException) else None)
    if any(isinstance(h.formatter, _JsonFormatter) for h in logging.getLogger().handlers):
        logger.error("%s", error)  # who asked for JSON reads nothing else
    else:
        typer.echo(f"jaxinfer: {error}", err=True)
    raise typer.Exit(code)


def decoded(data: bytes) -> str:
    """What was read from standard input, as text; input that is not UTF-8 ends the command."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(not_utf8(error))


def not_utf8(error: UnicodeDecodeError) -> str:
    """Says which byte of the input is wrong."""
    wrong = error.object[error.start]
    return f"the input is not UTF-8: byte 0x{wrong:02x} at position {error.start}; convert it first"


@contextlib.contextmanager
def progress(announce: bool = False) -> Iterator[Progress]:
    """Shows what is being done: a bar on a terminal, else a log line every few seconds.

    With `announce`, what is about to take minutes is said even where the log says nothing.
    """
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _LoggedProgress(announce)


class _LoggedProgress:
    def __init__(self, announce: bool) -> None:
        self._announce = announce and not logger.isEnabledFor(logging.INFO)
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, what: str, done: int, total: int) -> None:
        if done == 0 and what.startswith(LONG):
            if self._announce:
                typer.echo(f"jaxinfer: {what}", err=True)
            else:
                logger.info(what)
        elif time.monotonic() >= self._next:
            logger.info("%s: %d of %d", what, done, total)
            self._next = time.monotonic() + LOG_SECONDS


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            shown = bars.tasks[0]
            if shown.total != total or done < shown.completed:
                bars.reset(task)
            bars.update(task, description=what, completed=done, total=total)

        yield report
