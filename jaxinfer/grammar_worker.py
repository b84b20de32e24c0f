"""The process that runs llguidance: started as a script, it imports none of our packages.

A grammar of a stranger may take all the time and memory there is, or end the process that reads it
(deep nesting overflows a native stack), and none of that can be interrupted from within. So it
happens here: memory is limited, a job that takes too much processor time ends the process and says
whose it was, and `grammar_process.py` starts another.

Messages are tuples over the socket whose descriptor is the only argument. To it: first the limits
and the vocabulary, then jobs (number, sequence, kind, source, start, tokens) that ask what may
follow a sequence's output, whose first `start` tokens are known here; sequence 0 only wants to
know whether its source is a grammar. A job of kind "close" forgets its sequence. Back come
(number, mask, error, last): a bit a token, and one more for the end; `last` if it is what ends the
process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

THREADS = 4
STACK_BYTES = 256 << 20  # a thread's: nesting that fits the size of a source must fit into it
KEPT_GRAMMARS = 64
WATCH_SECONDS = 0.1
SPENT = 3  # the exit code after a job that took too long

# Forcing tokens that are the only spelling of what must follow would walk all of it at every step.
OPTIONS = '%llguidance {"no_forcing": true}\n'
# White space between parts of JSON, without which it is endless in some models' outputs.
WHITE_SPACE = {"whitespace_pattern": r"[ \t\n\r]{1,40}"}


class Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, the last one being the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]):
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: Any) -> list[int]:
        raise RuntimeError("nothing here is forced, so nothing is to be encoded")


class Worker:
    """Answers jobs over one connection, several at a time."""

    def __init__(self, connection: Connection, limits: dict[str, Any], vocabulary: Vocabulary):
        self._connection, self._seconds = connection, limits["seconds"]
        end = vocabulary.eos_token_id
        self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=end + 1, eos_token=end)  # type: ignore[arg-type]
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
        )
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._matchers: dict[int, Any] = {}
        self._running: dict[int, tuple[int, float]] = {}  # job: its thread's clock, and its start

    def serve(self) -> None:
        """Until the other end is closed."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._say(0, b"", "")
        with ThreadPoolExecutor(THREADS) as pool:
            while True:
                job = self._connection.recv()
                if job[2] == "close":
                    self._matchers.pop(job[1], None)
                else:
                    pool.submit(self._answer, *job)

    def _answer(self, number: int, sequence: int, *job: Any) -> None:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._running[number] = clock, time.clock_gettime(clock)
        mask, error = b"", ""
        try:
            mask = self._mask(sequence, *job)
        except ValueError as wrong:
            error = _told(job[0], str(wrong))
        except Exception as wrong:  # of the library's Python parts, which recurse
            error = f"cannot be understood: {type(wrong).__name__}: {wrong}"
        del self._running[number]
        self._say(number, mask, error)

    def _say(self, number: int, mask: bytes, error: str, last: bool = False) -> None:
        with self._lock:
            self._connection.send((number, mask, error[:500], last))

    def _mask(self, sequence: int, kind: str, source: str, start: int, tokens: list[int]) -> bytes:
        matcher = self._matchers.get(sequence)
        if start == 0:
            matcher = self._grammar(kind, source).deep_copy()
            if sequence:
                self._matchers[sequence] = matcher
        elif matcher is None:
            raise ValueError("the sequence was forgotten")
        if tokens and not matcher.consume_tokens(tokens):
            raise ValueError(matcher.get_error() or "the grammar does not accept the last token")
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return mask

    def _grammar(self, kind: str, source: str) -> Any:
        """What matches from the beginning. Raises ValueError for what is no grammar."""
        with self._lock:
            known = self._grammars.get((kind, source))
            if known is not None:
                self._grammars.move_to_end((kind, source))
                return known
        made = llguidance.LLMatcher(self._tokenizer, _lark(kind, source), limits=self._limits)
        if made.is_error():
            raise ValueError(made.get_error())
        with self._lock:
            self._grammars[kind, source] = made
            if len(self._grammars) > KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        return made

    def _watch(self) -> None:
        """End the process when a job has taken too much of the processor's time."""
        while True:
            time.sleep(WATCH_SECONDS)
            for number, (clock, start) in list(self._running.items()):
                try:
                    spent = time.clock_gettime(clock) - start
                except OSError:  # its thread has ended
                    continue
                if spent > self._seconds and number in self._running:
                    error = f"takes more than {self._seconds:g} s of processor time"
                    self._say(number, b"", error, last=True)
                    os._exit(SPENT)


def _told(kind: str, error: str) -> str:
    """What the library says, without what it repeats of the source, or places in what we made."""
    said = re.split(r"\n +\d+ \| ", error)[0].strip()
    said = said if kind == "grammar" else re.sub(r"^at \d+\(\d+\): ", "", said)
    return said or "cannot be understood"


def _lark(kind: str, source: str) -> str:
    """A source in the library's form of Lark. Raises ValueError for what cannot be one."""
    if kind == "regex":
        return f"{OPTIONS}start: /{llguidance.regex_to_lark(source, '')}/"
    if kind == "json_object":
        return f"{OPTIONS}start: %json {json.dumps(_schema({'type': 'object'}))}"
    if kind == "json_schema":
        return f"{OPTIONS}start: %json {json.dumps(_schema(json.loads(source)))}"
    if kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
        return f"{OPTIONS}start: {' | '.join(texts)}"
    return OPTIONS + any_to_lark(source)


def _schema(schema: Any) -> Any:
    """With our white space, unless it says something of that itself."""
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance", {})
    if any(name.startswith("whitespace") for name in own):
        return schema
    return schema | {"x-guidance": WHITE_SPACE | own}


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    limits, tokens, special = connection.recv()
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    try:
        Worker(connection, limits, Vocabulary(tokens, special)).serve()
    except (EOFError, OSError):
        os._exit(0)  # whatever is being computed, nobody wants it any more


if __name__ == "__main__":
    main(int(sys.argv[1]))
