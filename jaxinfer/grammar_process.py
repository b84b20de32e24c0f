"""Our end of the process that runs llguidance (`grammar_worker.py`).

Jobs are answered through futures, from any thread. The process is started with the first job. When
one takes it down, whoever it was fails and the others are computed again by the next process. If it
went without a word they are so one by one, until it is known who it was: a fault in one request
fails that request.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from jaxinfer.structured import StructuredOutput

WORKER = Path(__file__).with_name("grammar_worker.py")
MEMORY_BYTES = 4 << 30  # of addresses: a quarter is stacks of threads, and hardly used
MISSING = "needs the package llguidance, which is not installed: pip install llguidance"

logger = logging.getLogger(__name__)


class GrammarError(ValueError):
    """Something that is no grammar, that costs too much, or that an output has left."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id of the model, and the ids that stand for no text."""

    tokens: Sequence[bytes]
    special: Sequence[int]


@dataclass(slots=True, eq=False)
class Job:
    """What may follow the first `count` of `tokens`, the output of a sequence so far; sequence 0 is
    nobody's. Tokens may be added to the list meanwhile.

    `mask` has a bit a token and one more, whether the output may end; or it raises GrammarError.
    """

    sequence: int
    structure: StructuredOutput
    tokens: Sequence[int] = ()
    count: int = 0
    mask: Future[bytes] = field(default_factory=Future)


class GrammarProcess:
    """One process. `seconds` bounds the processor time of a job, `vocabulary` is called once."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float):
        self._vocabulary, self._seconds = vocabulary, seconds
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._ready: Connection | None = None  # that jobs may be sent over
        self._running = False
        self._waiting: deque[Job] = deque()
        self._sent: dict[int, Job] = {}  # by number: not answered yet
        self._known: dict[int, int] = {}  # by sequence: how much of its output the process has
        self._one_by_one = False
        self._guilty: set[StructuredOutput] = set()

    def ask(self, job: Job) -> None:
        """Answer a job in its time."""
        with self._lock:
            if job.structure in self._guilty:
                _fail(job, "has ended the process that computes it before")
                return
            if not self._running and importlib.util.find_spec("llguidance") is None:
                _fail(job, MISSING)
                return
            self._waiting.append(job)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="jaxinfer-grammar", daemon=True).start()
            self._send()

    def forget(self, sequence: int) -> None:
        """No more jobs are of this sequence."""
        with self._lock:
            if self._known.pop(sequence, None) is not None and self._ready is not None:
                with contextlib.suppress(OSError):
                    self._ready.send((0, sequence, "close"))

    @property
    def unanswered(self) -> int:
        return len(self._waiting) + len(self._sent)

    def _send(self) -> None:
        """Send what waits, or one job at a time."""
        while self._waiting and self._ready and not (self._one_by_one and self._sent):
            job = self._waiting.popleft()
            if job.mask.cancelled():
                continue
            number, known = next(self._numbers), self._known.get(job.sequence, 0)
            start = known if 0 < known <= job.count else 0
            self._sent[number] = job
            if job.sequence:
                self._known[job.sequence] = job.count
            said = job.structure
            tokens = list(job.tokens[start : job.count])
            message = (number, job.sequence, said.kind, said.source, start, tokens)
            with contextlib.suppress(OSError):  # it ended: the thread that reads will see to it
                self._ready.send(message)
        if not self._sent and not self._waiting:
            self._one_by_one = False

    def _run(self) -> None:
        """Have a process work until it ends, and start over if there is more."""
        while self._running:
            verdict, trouble = False, ""
            try:
                verdict = self._work()
            except Exception as error:
                logger.exception("grammars cannot be followed")
                trouble = f"cannot be computed: {type(error).__name__}: {error}"
            with self._lock:
                if trouble:
                    for job in (*self._sent.values(), *self._waiting):
                        _fail(job, trouble)
                    self._sent.clear()
                    self._waiting.clear()
                self._ended(verdict)
                self._running = bool(self._waiting)

    def _work(self) -> bool:
        """Start the process and read what it says until it ends; whether it said why.

        Raises RuntimeError if it does not start.
        """
        process, connection = self._start()
        verdict = started = False
        try:
            limits = {"seconds": self._seconds, "memory": MEMORY_BYTES}
            vocabulary = self._vocabulary()
            connection.send((limits, list(vocabulary.tokens), list(vocabulary.special)))
            connection.recv()  # it has read them
            started = True
            with self._lock:
                self._ready = connection
                self._send()
            while True:
                verdict = self._take(*connection.recv())
        except (EOFError, OSError):
            if started:
                return verdict
        finally:
            connection.close()
            code = process.wait()
        raise RuntimeError(f"the process that runs llguidance does not start, code {code}")

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, its = socket.socketpair()
        command = [sys.executable, "-P", str(WORKER), str(its.fileno())]
        process = subprocess.Popen(  # in a session of its own: signals to us are not for it
            command,
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # where a native library writes that it failed
            start_new_session=True,
        )
        its.close()
        return process, Connection(ours.detach())

    def _take(self, number: int, mask: bytes, error: str, last: bool) -> bool:
        """An answer; whether it is the last one, since its job took too long."""
        with self._lock:
            job = self._sent.pop(number, None)
            if job is not None:
                if last:
                    self._guilty.add(job.structure)
                if error:
                    _fail(job, error)
                else:
                    _settle(job, mask)
            self._send()
            return last

    def _ended(self, verdict: bool) -> None:
        """The process is gone: with a verdict, or without a word."""
        self._ready = None
        left = list(self._sent.values())
        self._sent.clear()
        self._known.clear()
        if self._one_by_one and not verdict and left:
            self._guilty.add(left[0].structure)
            _fail(left.pop(), "ended the process that computes it: it may be nested too deeply")
        self._one_by_one = not verdict and bool(left)
        for job in left:
            self._waiting.appendleft(job)


def _settle(job: Job, mask: bytes) -> None:
    with contextlib.suppress(InvalidStateError):
        job.mask.set_result(mask)


def _fail(job: Job, why: str) -> None:
    with contextlib.suppress(InvalidStateError):
        job.mask.set_exception(GrammarError(why))
