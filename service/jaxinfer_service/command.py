"""The entry of the `jaxinfer` command: what signals mean, from before anything large is imported.

SIGINT (Ctrl-C) unwinds the stack, as Python has it. SIGTERM ends the process at once, but for what
runs `unwinding`. Either way one line says so, and the exit code is 128 and the signal's number.
What serves or talks in the foreground takes the signals itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class Terminated(BaseException):
    """SIGTERM came while something had to be cleaned up."""


def main() -> None:
    """Run the command that the arguments name."""
    signal.signal(signal.SIGTERM, _end_at_once)
    try:
        from jaxinfer_service import cli  # takes a while

        cli.main()
    except BaseException as error:
        found = _interruption(error)
        if found is None:
            raise
        number = signal.SIGTERM if isinstance(found, Terminated) else signal.SIGINT
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        # Nothing is left to unwind. An ordinary end would wait for threads, and Python makes it a
        # death by SIGINT when that came in certain moments.
        os._exit(_say(number, found))


@contextlib.contextmanager
def unwinding(consequence: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """What runs within is unwound by SIGTERM too, so that it can remove what it has begun.

    `consequence` says, when it was, what that means. The function to call now and then raises again
    what was lost: Python ignores an exception that comes in a finaliser, or in JAX's own callbacks.
    A second signal changes nothing, lest it interrupt the removing.
    """
    import logging  # it takes a while

    came: list[type[BaseException]] = []

    def unwind(number: int, frame: Any) -> None:
        if came:
            return
        came.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        logging.disable()  # JAX logs what its plugins' start is interrupted by, and goes on
        raise came[0]

    def check() -> None:
        if came:
            raise came[0]

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, unwind)
    try:
        yield check
    except BaseException as error:
        if not came:
            raise
        found = _interruption(error) or came[0]()  # some extensions make another error of it
        found.add_note(consequence())
        raise found from None
    finally:
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_at_once(number: int, frame: Any) -> NoReturn:
    os._exit(_say(number))


def _interruption(error: BaseException | None) -> BaseException | None:
    """The signal that an error goes back to, whatever was made of it on its way."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt | Terminated):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _say(number: int, error: BaseException | None = None) -> int:
    """One line on stderr; returns the exit code."""
    notes = getattr(error, "__notes__", [])
    with contextlib.suppress(OSError):
        os.write(2, f"jaxinfer: {'; '.join(['interrupted', *notes])}\n".encode())
    return 128 + number
